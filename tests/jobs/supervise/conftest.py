"""A supervisor of each kind, on a played clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.jobs.situations.local import LocalRig
from tests.support.jobs.situations.slurm import SlurmRig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.queue.store import Store
    from tests.support.jobs.situations.rig import Rig

KINDS: dict[str, type[LocalRig | SlurmRig]] = {"local": LocalRig, "slurm": SlurmRig}


@pytest.fixture(params=KINDS)
def idle(
    request: pytest.FixtureRequest,
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Rig]:
    """A job that was submitted; its supervisor has not started."""
    made = KINDS[request.param].make(store, job_values, monkeypatch, capsys)
    yield made
    made.clock.abandon()


@pytest.fixture
def rig(idle: Rig) -> Rig:
    """A job whose two ranks train."""
    idle.begin()
    return idle
