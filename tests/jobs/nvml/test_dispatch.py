"""The queue on eight GPUs that the driver lists in another order than people number them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.backends.local.dispatch import dispatch
from jobs.machine import devices
from jobs.machine.devices import foreign_users
from jobs.machine.gpu import still_held
from jobs.queue.states import State
from jobs.queue.store import Store, Terms

if TYPE_CHECKING:
    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture"]
GIB = 1 << 30


pytestmark = pytest.mark.usefixtures("started")


def add(store: Store, wanted: int | list[str], *, shares: bool = False) -> int:
    terms = Terms(ranks=1, wanted=wanted, total_steps=1, shares=shares)
    return store.add(name="t", terms=terms, run_id="r", prepare=lambda run_dir: run_dir.create()).id


def test_overlap_any_number_and_order(store: Store, nvml: StubNvml) -> None:
    uuids = nvml.write_shuffled()
    named = add(store, [uuids[3], uuids[1]])
    overlapping = add(store, [uuids[1], uuids[2]])
    any_four, any_three = add(store, 4), add(store, 3)
    dispatch(store)
    assert store.get(named).gpus == [uuids[3], uuids[1]]
    assert store.get(named).reason == "starting on GPU 3, 1"
    assert store.get(overlapping).state is State.QUEUED
    assert store.get(overlapping).reason == f"waiting for job {named} on GPU 1"
    # Not GPU 2, for which the job before it waits.
    assert store.get(any_four).gpus == [uuids[n] for n in (0, 4, 5, 6)]
    assert store.get(any_three).reason == (
        f"waiting for 3 GPUs (1 available; GPU 2 reserved for job {overlapping}, which waits for "
        f"GPU 1; job {named} on GPUs 1,3, job {any_four} on GPUs 0,4-6)"
    )
    store.change(named, State.STOPPED, "")
    dispatch(store)
    assert store.get(overlapping).gpus == [uuids[1], uuids[2]]
    assert store.get(any_three).state is State.QUEUED


def test_strangers_are_left_alone_unless_the_job_shares(store: Store, nvml: StubNvml) -> None:
    busy = {"processes": [{"pid": 4_000_000, "memory": 9 * GIB}], "memory_used": 9 * GIB}
    uuids = nvml.write_shuffled(dict.fromkeys(range(7), busy))
    alone, two, sharing = add(store, 1), add(store, 2), add(store, 2, shares=True)
    dispatch(store)
    assert store.get(alone).gpus == [uuids[7]]
    assert "waiting for 2 GPUs (0 available; GPU 0 is used by" in store.get(two).reason
    assert store.get(sharing).gpus == uuids[:2]


def test_divided_and_lost_gpus_are_not_given_out(store: Store, nvml: StubNvml) -> None:
    uuids = nvml.write_shuffled({0: {"mig_mode": 1}, 1: {"errors": {"*": "GPU_IS_LOST"}}})
    everything = add(store, 6)
    dispatch(store)
    assert store.get(everything).gpus == uuids[2:]


def test_memory_of_a_dead_process_is_seen_until_it_is_given_back(nvml: StubNvml) -> None:
    held = {"processes": [{"pid": 4_000_001, "memory": GIB}], "memory_used": GIB}
    uuids = nvml.write_shuffled({5: held})
    assert still_held(devices.gpus(), uuids[4:6], {4_000_001, 7}) == [(5, 4_000_001)]
    assert still_held(devices.gpus(), uuids[:4], {4_000_001}) == []
    assert foreign_users(devices.gpus(), {4_000_001}) == {}
    nvml.write_shuffled()
    assert still_held(devices.gpus(), uuids, {4_000_001}) == []
