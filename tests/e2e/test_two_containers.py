"""Two containers of a machine with one state directory: each has a pid namespace of its own.

The job runs here; the other container looks, stops, resumes and removes, with the product's own
commands.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from jobs import service
from jobs.machine.processes import with_run_id
from jobs.queue.states import State
from jobs.run.eventlog import EventLog
from tests.support.containers import CONTAINER, has_namespaces
from tests.support.jobs.lab import opened
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from jobs.queue.store import Store
    from tests.support.jobs.lab import Lab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="no pid namespaces for this user"),
]


@pytest.fixture
def lab(
    store: Store, job_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    with opened(store, job_values, monkeypatch, tmp_path / "gates") as made:
        yield made


def beside(*words: str) -> subprocess.CompletedProcess[str]:
    """Run commands of the product one after the other in another container; `;` ends each."""
    script = f'fsdp-tui() {{ {sys.executable} -m tui "$@"; }}; ' + "; ".join(words)
    return subprocess.run(
        [*CONTAINER, "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
    )


def test_another_container_only_looks_and_asks(lab: Lab) -> None:
    job = lab.running()
    supervisor, ranks = lab.supervisor(job), set(with_run_id(job.run_id))
    step = lab.step(job)
    looked = beside(*["fsdp-tui list"] * 5, "sleep 1", *["fsdp-tui list"] * 2)
    assert looked.returncode == 0, looked.stderr
    assert "runs in another container or machine" in looked.stdout
    assert "lost" not in looked.stdout
    for command in ("resume", "remove --yes"):
        refused = beside(*[f"fsdp-tui {command} {job.id}"] * 2)
        assert refused.returncode != 0
        assert f"job {job.id}" in refused.stderr
    assert lab.get(job).state is State.RUNNING
    assert lab.supervisor(job) == supervisor
    assert supervisor.alive()
    assert set(with_run_id(job.run_id)) == ranks
    lab.wait_for_step(job, step + 3)
    stopped = beside(f"fsdp-tui stop {job.id}")
    assert stopped.returncode == 0, stopped.stderr
    lab.wait(job, State.STOPPED)
    steps = [one.step for one in EventLog(job.run_dir.events).read_all().steps]
    assert steps == list(range(1, len(steps) + 1)), "nobody else has trained"


def test_a_supervisor_of_another_container_takes_nothing_over(lab: Lab) -> None:
    job = lab.running()
    before = lab.supervisor(job)
    lab.kill(before)
    ranks = set(with_run_id(job.run_id))
    looked = beside(*["fsdp-tui list"] * 5, "sleep 2", "fsdp-tui list")
    assert "lost" not in looked.stdout
    assert set(with_run_id(job.run_id)) == ranks, "its ranks go on"
    assert lab.supervisor(job) == before
    service.refresh(lab.store)  # here it is replaced
    lab.wait_for_step(job, lab.step(job) + 2)
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPED, look=True)
