"""Many processes on one jobs database at once: nothing is locked out, lost, or in two states.

A few hundred calls by default; `FSDP_TUI_STRESS_SECONDS=60` is the long version.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import UserError
from jobs.queue.states import ACTIVE, State, may_follow
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    import pytest

    from jobs.queue.store import Store

WORKERS = 20
SECONDS = float(os.environ.get("FSDP_TUI_STRESS_SECONDS", "0"))
CALLS = 12  # of each worker, at least


def work(number: int, seconds: float, values: dict[str, Any]) -> dict[str, Any]:
    """Submit, stop and list for a while, in a process of its own.

    Supervisors are played too: a job that this process started is carried to some end by it.

    Returns:
        How often what was done, the ids of its jobs, the jobs it took away, the slowest call.
    """
    import random

    from jobs import service
    from jobs.backends.local import dispatch
    from jobs.machine import devices
    from jobs.queue.store import Store
    from jobs.spec.file.load import load_spec

    dice = random.Random(number)
    store = Store(patience=PATIENCE)
    spec = load_spec(None, values)
    started: list[int] = []
    submitted: list[int] = []
    removed: list[int] = []
    counts: Counter[str] = Counter()
    errors: list[str] = []
    slowest = 0.0
    setattr(devices, "gpus", list)  # noqa: B010
    setattr(dispatch, "_SUPERVISOR_STARTS_WITHIN", 3600.0)  # noqa: B010
    setattr(dispatch, "_start_supervisor", lambda job: started.append(job.id))  # noqa: B010
    setattr(service, "ensure_keepers", lambda store: None)  # noqa: B010

    def submit() -> None:
        submitted.append(service.submit(store, spec).id)

    def stop() -> None:
        service.stop(store, dice.choice(submitted), now=dice.random() < 0.5)

    def look() -> None:
        service.refresh(store)
        known = {job.id for job in store.all()}
        assert known >= set(submitted) - set(removed), "a job is gone"

    def supervise() -> None:
        """What a supervisor writes."""
        job = started.pop()
        assert store.change(job, State.RUNNING, "all ranks are up", only_from={State.STARTING})
        end = State.STOPPED if store.get(job).stop_level else State.COMPLETED
        assert store.change(job, end, "played", only_from=ACTIVE)

    def remove() -> None:
        job = dice.choice(submitted)
        service.remove(store, job)
        removed.append(job)

    until, calls = time.monotonic() + seconds, 0
    while (over := calls >= CALLS and time.monotonic() > until) is False or started:
        calls += 1
        choice = dice.random()
        action = (
            supervise
            if started and (choice < 0.5 or over)
            else submit
            if (choice < 0.5 and len(submitted) < 40) or not submitted
            else stop
            if choice < 0.75
            else remove
            if choice < 0.8
            else look
        )
        begun = time.monotonic()
        try:
            action()
        except UserError:  # it has ended already, it is gone, it still runs
            counts["refused"] += 1
        except Exception as error:
            errors.append(f"{action.__name__}: {type(error).__name__}: {error}")
        else:
            counts[action.__name__] += 1
        slowest = max(slowest, time.monotonic() - begun)
    return {
        "submitted": submitted,
        "removed": removed,
        "counts": counts,
        "errors": errors,
        "slowest": slowest,
    }


def test_many_processes_share_the_jobs(
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("FSDP_TUI_CPU_JOBS", "4")
    with subprocess.Popen(
        [sys.executable, __file__, str(SECONDS), json.dumps(job_values), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as workers:
        try:
            _, err = workers.communicate(timeout=SECONDS + PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(workers.pid, signal.SIGKILL)
    assert workers.returncode == 0, err
    reports = [json.loads((tmp_path / f"report-{n}").read_text()) for n in range(WORKERS)]

    errors = [error for report in reports for error in report["errors"]]
    assert errors == []
    counts: Counter[str] = sum((Counter(r["counts"]) for r in reports), Counter())
    for action in ("submit", "stop", "look", "supervise"):
        assert counts[action], f"nobody came to {action}"
    slowest = max(report["slowest"] for report in reports)
    with capsys.disabled():
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        print(f"\n{WORKERS} processes: {told}; slowest call {slowest:.2f} s")

    submitted = [job for report in reports for job in report["submitted"]]
    removed = [job for report in reports for job in report["removed"]]
    assert len(set(submitted)) == len(submitted), "an id was given twice"
    jobs = {job.id: job for job in store.all()}
    assert set(jobs) == set(submitted) - set(removed)
    for job in jobs.values():
        assert job.state is State.QUEUED or job.state.ended, "a started job was forgotten"
        states = [change.after for change in store.history(job.id)]
        assert states[0] is State.QUEUED
        assert all(may_follow(a, b) for a, b in pairwise(states)), states
        assert states[-1] is job.state
        assert states.count(State.STARTING) <= 1, "started twice"
        assert job.run_dir.job_file.is_file()
    present = {Path(path).name for path in (store.home / "runs").iterdir()}
    assert present == {job.run_dir.root.name for job in jobs.values()}, "files without a job"


def fork_workers(seconds: float, values: dict[str, Any], reports: Path) -> int:
    """How many of them failed."""
    from jobs import service  # noqa: F401  # once, and not by each of them

    for number in range(WORKERS):
        if os.fork() == 0:
            status = 1
            try:
                report = work(number, seconds, values)
                (reports / f"report-{number}").write_text(json.dumps(report))
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
    return sum(os.wait()[1] != 0 for _ in range(WORKERS))


if __name__ == "__main__":
    sys.exit(fork_workers(float(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])))
