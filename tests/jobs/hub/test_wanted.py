"""Queued jobs that wait for a model, where the fetch itself is not at stake."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING, Any, Literal

import pytest

from jobs import service
from jobs.hub import fetches
from jobs.machine import file_lock
from jobs.machine.processes import ProcessId
from jobs.machine.residence import Residence
from jobs.queue.states import State
from jobs.service.plan import plan_submit
from jobs.spec.file.load import load_spec
from jobs.spec.values.hub_names import HubName

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

MODEL = HubName("model", "someone/FLUX.1-dev")


@pytest.mark.parametrize("state", ["failed", "done"])
def test_what_an_earlier_fetch_came_to_decides_no_new_job(
    home: Path,
    store: Store,
    job_values: dict[str, Any],
    started: list[int],
    no_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    state: Literal["failed", "done"],
) -> None:
    """A license accepted since then, or a cache deleted since then."""
    begun: list[str] = []
    monkeypatch.setattr(fetches, "start_detached", lambda *words, **_: begun.append(words[-1]))
    fetches.ensure_private_dir(fetches.lock_of(MODEL).parent)
    fetches.Fetch(state, reason="it is gated").write(MODEL)
    spec = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
    job = service.carry_out(store, plan_submit(store, spec, [MODEL]))
    assert (job.state, begun, started) == (State.QUEUED, [str(MODEL)], [])


def test_a_fetch_that_cannot_start_holds_up_no_other_job(
    home: Path,
    store: Store,
    job_values: dict[str, Any],
    started: list[int],
    no_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*words: str, **_: object) -> None:
        raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(fetches, "start_detached", fail)
    named = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
    waits = service.carry_out(store, plan_submit(store, named, [MODEL]))
    other = service.submit(store, load_spec(None, job_values))
    assert started == [other.id]
    said = (
        "its model cannot be fetched: the fetch of someone/FLUX.1-dev cannot start (exit status 1)"
    )
    assert waits.reason.startswith(f"{said}; see ")


def test_a_fetch_that_ends_without_a_word_is_not_started_at_every_look(
    home: Path,
    store: Store,
    job_values: dict[str, Any],
    started: list[int],
    no_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a full disk, it cannot write down why it failed."""
    begun: list[str] = []
    monkeypatch.setattr(fetches, "start_detached", lambda *words, **_: begun.append(words[-1]))
    spec = load_spec(None, job_values | {"pretrained_model_name_or_path": str(MODEL)})
    job = service.carry_out(store, plan_submit(store, spec, [MODEL]))
    for _ in range(3):
        service.refresh(store)
    assert begun == [str(MODEL)]
    reason = store.get(job.id).reason
    assert reason.startswith("waiting for its model: its fetch does not run; trying again in a min")
    assert str(fetches.log_of(MODEL)) in reason
    long_ago = time.time() - 3600
    os.utime(fetches.lock_of(MODEL), (long_ago, long_ago))
    service.refresh(store)
    assert len(begun) == 2
    # A new job does not wait for that.
    service.stop(store, job.id)
    service.carry_out(store, plan_submit(store, spec, [MODEL]))
    assert len(begun) == 3


def test_a_fetch_of_another_machine_is_judged_by_its_lock(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared home, its process number is someone else's here."""
    begun: list[str] = []
    sent: list[object] = []
    monkeypatch.setattr(fetches, "start_detached", lambda *words, **_: begun.append(words[-1]))
    monkeypatch.setattr(ProcessId, "signal", lambda *words: sent.append(words))
    fetches.ensure_private_dir(fetches.lock_of(MODEL).parent)
    with monkeypatch.context() as there:
        there.setattr(fetches, "residence", lambda: Residence("another"))
        fetches.Fetch("fetching", 1, 2).write(MODEL)
        now = fetches.look_at(MODEL)
        assert now is not None
        assert now.alive
    assert not now.alive
    assert not fetches.end(MODEL)
    assert sent == []
    with open(fetches.lock_of(MODEL), "a") as lock:
        assert file_lock.acquire(lock)
        fetches.start(MODEL)
        assert fetches.is_under_way(MODEL)
        assert fetches.look_at(MODEL) == now
    assert begun == []
    fetches.start(MODEL)
    assert begun == [str(MODEL)]
