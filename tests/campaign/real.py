"""Random faults on real ranks of a toy model: a job that is killed and resumed loses nothing.

Its losses are bit for bit those of a job that nobody disturbed, its checkpoints verify, nothing of
it is left, and its reason is one sentence.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import StateError
from jobs.machine.processes import ProcessId, with_run_id
from jobs.run.checkpoint_files import list_all, verify
from jobs.run.eventlog import EventLog
from jobs.run.rundir import read_json
from tests.campaign.journal import dice
from tests.support.forks import client as forks
from tests.support.jobs.real_jobs import Bench
from tests.support.left_over import end_all_of, name_of
from tests.support.paths import ROOT

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from jobs.queue.store import Job
    from tests.campaign.journal import Journal

_STEPS: Final = 8
_ENDED: Final = ("completed", "stopped", "failed", "lost")
_TRUE_WITHIN: Final = 2.0  # seconds, on a machine that has nothing else to do
_TRIES: Final = 4  # resumes until a job must have come to its end
_FRESH: Final = 8  # every so many trials all processes are fresh interpreters instead of forks


def trial(journal: Journal, number: int) -> None:
    """One job, killed at random and resumed until it completes."""
    rng = dice("real", journal.seed, number)
    done: list[str] = []
    bench = _bench(forked=number % _FRESH != 0)
    try:
        _one(bench, rng, done)
    except Exception as error:
        journal.note(number, "+".join(done), f"{type(error).__name__}: {error} after {done}")
        end_all_of(bench.home / "state")
    else:
        journal.note(number, f"{len(done)} faults")


def _one(bench: Bench, rng: random.Random, done: list[str]) -> None:
    settings: dict[str, Any] = {
        "num_processes": rng.choice((1, 2)),
        "max_train_steps": _STEPS,
        "checkpointing_steps": 2,
        "stop_grace_seconds": 30.0,
    }
    expected = _undisturbed(settings["num_processes"])
    job = bench.submit(**settings)
    for _ in range(_TRIES):
        if rng.random() < 0.8:
            fault = rng.choice(list(FAULTS))
            _wait_until(bench, job, rng.randint(0, _STEPS - 1), rng.random())
            if bench.store.get(job).state.active:
                done.append(fault)
                with suppress(OSError, StateError, TypeError, IndexError):
                    FAULTS[fault](bench, bench.store.get(job), rng)
        facts = bench.wait(job, *_ENDED)
        _check(bench, bench.store.get(job), facts)
        if facts["state"] == "completed":
            break
        resumed = bench.cli("resume", str(job))
        assert resumed.returncode == 0, resumed.stderr
    else:
        facts = bench.wait(job, *_ENDED)
        assert facts["state"] == "completed", facts["reason"]
    steps = EventLog(Path(facts["run_dir"], "events.jsonl")).read_all().steps
    losses = [(one.step, one.loss) for one in steps]
    assert losses == expected, f"losses differ: {losses} instead of {expected}"
    assert bench.cli("remove", str(job), "--yes").returncode == 0


def _check(bench: Bench, job: Job, facts: dict[str, Any]) -> None:
    until = time.monotonic() + _TRUE_WITHIN * max(1.0, 2 * os.getloadavg()[0])
    while left := with_run_id(job.run_id):
        assert time.monotonic() < until, f"{facts['state']}, but {[*map(name_of, left)]} live"
        time.sleep(0.05)
    for listed in list_all(job.run_dir):
        damage = verify(listed).damage
        assert damage is None, f"{listed.name}: {damage}"
    reason = facts["reason"]
    assert 3 < len(reason) < 400, reason
    assert "\n" not in reason
    assert "supervisor failed" not in reason


def _wait_until(bench: Bench, job: int, step: int, more: float) -> None:
    """Until this step, or the end; the first one is also waited for in part."""
    log = EventLog(bench.store.get(job).run_dir.events)
    while not bench.store.get(job).state.ended:
        log.poll()
        if log.last is not None and log.last.step >= step:
            break
        if step == 0 and log.phase is not None:
            break
        time.sleep(0.05)
    time.sleep(more / 2)


@cache
def _bench(*, forked: bool) -> Bench:
    """One state directory for many trials, with filled caches; gone when Python ends."""
    folder = tempfile.TemporaryDirectory(prefix="campaign-real-")
    root = Path(folder.name)
    command = [sys.executable, "-m", "engine.toy", str(root / "toy"), "--pictures=6", "--size=64"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    os.environ["PYTHONPATH"] = str(ROOT)
    if forked:
        forks.prepare()
        atexit.register(forks.leave)
    (root / "state").mkdir(mode=0o700)
    atexit.register(folder.cleanup)
    atexit.register(end_all_of, root / "state")
    return Bench(root, root / "toy", forked=forked)


@cache
def _undisturbed(ranks: int) -> list[tuple[int, float]]:
    """Step and loss of a job that runs to its end."""
    bench = _bench(forked=True)
    run = bench.run(num_processes=ranks, max_train_steps=_STEPS, checkpointing_steps=2)
    return [(one.step, one.loss) for one in EventLog(run.files.events).read_all().steps]


def _kill_rank(bench: Bench, job: Job, rng: random.Random) -> None:
    one = rng.choice(job.run_dir.rank_statuses())
    ProcessId(one.pid, one.started).signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))


def _kill_launcher(bench: Bench, job: Job, rng: random.Random) -> None:
    record = read_json(job.run_dir.launch_file) or {}
    ProcessId(*record["launcher"]).signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))


def _kill_supervisor(bench: Bench, job: Job, rng: random.Random) -> None:
    if job.supervisor is not None:
        job.supervisor.signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))


def _kill_everything(bench: Bench, job: Job, rng: random.Random) -> None:
    for one in (job.supervisor, *with_run_id(job.run_id)):
        if one is not None:
            one.signal(signal.SIGKILL)


def _stop(bench: Bench, job: Job, rng: random.Random) -> None:
    bench.cli("stop", str(job.id), *(["--now"] if rng.random() < 0.3 else []))


FAULTS: Final[dict[str, Callable[[Bench, Job, random.Random], None]]] = {
    "rank": _kill_rank,
    "launcher": _kill_launcher,
    "supervisor": _kill_supervisor,
    "massacre": _kill_everything,
    "stop": _stop,
}
