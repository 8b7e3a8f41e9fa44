"""A fake Slurm, and jobs for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.backends.slurm.keeper import Keeper
from jobs.spec.file.load import load_spec
from tests.support.jobs.fake_slurm import FakeSlurm
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.queue.store import Job, Store


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A cluster without a job, and nobody who asks it but the test."""
    monkeypatch.setattr("jobs.backends.slurm.backend.ensure", lambda store, place: None)
    monkeypatch.setattr("jobs.backends.slurm.commands._SINFO_PATIENCE", PATIENCE)
    made = FakeSlurm.on_path(tmp_path / "slurm", monkeypatch)
    yield made
    made.clean_up()


@pytest.fixture
def submit(store: Store, slurm: FakeSlurm, job_values: dict[str, Any]) -> Callable[..., Job]:
    """Submit a job of 4 ranks on 2 nodes."""

    def do(**changes: Any) -> Job:
        more = {"launcher": "slurm", "num_machines": 2, "num_processes": 4, "strategy": "fsdp2"}
        return service.submit(store, load_spec(None, job_values | more | changes))

    return do


@pytest.fixture
def keeper(store: Store, slurm: FakeSlurm) -> Keeper:
    """Looks after the jobs when the test says so, and asks Slurm each time."""
    return Keeper(store, ask_every=0.0)
