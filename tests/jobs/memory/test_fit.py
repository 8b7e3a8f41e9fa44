"""Memory and disk against what a job needs, to the last byte."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.machine.gpu import Gpu
from jobs.memory.estimate import Need, Place, needs_of, pair_of, place_of
from jobs.memory.fit import CARDS, Fit, Room, Verdict, fit_of, worst
from jobs.memory.predicted import Predicted
from jobs.spec.job_spec import JobSpec
from tests.support.jobs.fake_memory import GIB, predict
from tui.text.estimate_text import pair_text, wrapped

if TYPE_CHECKING:
    from pathlib import Path

ROOM = Room("GPU 0", 80 * GIB)
ROOMS = (Room("a", 40), Room("b", 60), Room("c", 80))


def predicted(**changes: Any) -> Predicted:
    spec = JobSpec(pretrained_model_name_or_path="m", dataset="d", num_processes=2)
    return replace(Predicted.of(predict(spec.to_dict(), 2, "fsdp2")), **changes)


@pytest.mark.parametrize(
    ("low", "high", "free", "verdict"),
    [
        (9, 10, 10, Verdict.FITS),  # to the last byte
        (9, 11, 10, Verdict.TIGHT),
        (10, 11, 10, Verdict.TIGHT),  # at its least it fits to the last byte
        (11, 12, 10, Verdict.TOO_LARGE),
        (0, 0, 0, Verdict.FITS),
    ],
)
def test_what_needs_as_much_as_there_is_fits(
    low: int, high: int, free: int, verdict: Verdict
) -> None:
    fit = Fit(low, high, Room("GPU 0", 30, held=30 - free))
    assert fit.verdict is verdict
    assert fit.spare == free - high


def test_more_held_than_there_is_leaves_nothing() -> None:
    assert Room("GPU 0", 10) == Room("GPU 0", 10, held=0, passing=0)
    assert Room("GPU 0", 10, held=12).free == 0
    assert Room("GPU 0", 10, held=3, passing=5).free == 7, "what passes is waited for"


def test_a_prediction_on_gpus_is_a_band_that_experience_widens_upwards() -> None:
    found = predicted(reserved=(10, 20), overheads={})
    assert fit_of(found, ROOM, on_gpus=True) == Fit(10, 20, ROOM)
    assert fit_of(found, ROOM, on_gpus=True, factor=1.24) == Fit(10, 25, ROOM)
    assert fit_of(found, ROOM, on_gpus=True, factor=0.5) == Fit(10, 20, ROOM), "never narrower"


def test_on_the_cpu_the_machine_holds_all_ranks() -> None:
    told = predicted(host={"machine": 50}, reserved=(6, 7))
    assert fit_of(told, ROOM, on_gpus=False, factor=2.0) == Fit(50, 50, ROOM)
    untold = predicted(host={}, reserved=(6, 7))
    assert fit_of(untold, ROOM, on_gpus=False) == Fit(14, 14, ROOM)


def test_of_several_devices_the_tightest_counts() -> None:
    fits = [Fit(1, 2, Room(name, total)) for name, total in (("a", 9), ("b", 4), ("c", 7))]
    assert worst(fits).room.name == "b"


@pytest.mark.parametrize(
    ("place", "tightest"),
    [
        (Place(True, ROOMS), "b"),  # the two roomiest of three, for two ranks
        (Place(True, ROOMS, chosen=True), "a"),  # the job takes all of them
        (Place(True, ROOMS, here=False), "a"),
        (Place(False, ROOMS[2:]), "c"),
    ],
)
def test_free_choice_leaves_out_the_fullest(place: Place, tightest: str) -> None:
    assert place.fit(predicted(reserved=(1, 2), overheads={})).room.name == tightest


def test_gpus_that_no_job_may_have_are_no_place_for_one() -> None:
    gpus = [
        Gpu(0, "GPU-a", "x", 80 * GIB),
        Gpu(1, "GPU-b", "x", 80 * GIB, problem="has fallen off the bus"),
        Gpu(2, "GPU-c", "x", 0),
        Gpu(3, "GPU-d", "x", 80 * GIB, mig_mode=True),
    ]

    def rooms(spec: JobSpec) -> list[str]:
        place = place_of(spec, gpus)
        assert place.on_gpus
        assert place.here
        return [room.name for room in place.rooms]

    assert rooms(JobSpec()) == ["GPU 0"]
    assert rooms(JobSpec(gpus=[1, 0])) == ["GPU 0"]
    assert place_of(JobSpec(gpus=[0]), gpus).chosen
    assert not place_of(JobSpec(gpus=[1]), gpus).chosen
    imagined = place_of(JobSpec(), gpus[1:])
    assert (imagined.on_gpus, imagined.here) == (True, False)
    assert place_of(JobSpec(), gpus, card=24) == Place(True, (CARDS[24],), here=False)


def test_a_need_is_met_by_exactly_as_much() -> None:
    assert Need("host memory", 10, 10).enough
    assert not Need("host memory", 11, 10).enough


@pytest.mark.parametrize("container", [30, 90])
def test_what_a_job_needs_of_the_machine(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, container: int
) -> None:
    """Free memory, but never more than the container may have; disk where things are written."""
    memory = SimpleNamespace(available=40)
    monkeypatch.setattr("jobs.memory.estimate.psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("jobs.memory.estimate.host_bytes", lambda: container)
    looked: list[Path] = []

    def free(path: Path) -> int:
        looked.append(path)
        return 100 * len(looked)

    monkeypatch.setattr("jobs.memory.estimate._free", free)
    spec = JobSpec(cache_dir=str(tmp_path / "cache"))
    disk = {"checkpoint": 1, "checkpoints": 3, "export": 4, "cache": 5}
    found = needs_of(spec, predicted(host={"machine": 20}, disk=disk))
    assert [(need.needed, need.free) for need in found] == [
        (20, min(40, container)),
        (7, 100),
        (5, 200),
    ]
    assert looked == [home, tmp_path / "cache"]
    one = needs_of(spec, predicted(host={}, disk={"checkpoint": 2, "export": 4}))
    assert [(need.what, need.needed) for need in one] == [
        ("disk for checkpoints and the export", 6)
    ]
    epochs = spec.model_copy(update={"checkpointing_steps": "1 epoch"})
    of_data = needs_of(epochs, predicted(host={}, disk={"checkpoint": 2}))
    assert "one checkpoint (their number depends on the data)" in of_data[0].what
    assert needs_of(spec, predicted(host={}, disk={})) == []


@pytest.mark.parametrize(
    ("steps", "ranking", "hours"),
    [
        ({"max_train_steps": 1800}, True, (1.0, 2.0)),
        ({"max_train_steps": 1800}, False, None),
        ({"num_train_epochs": 2}, True, None),
    ],
)
def test_a_pair_takes_twice_the_disk_and_says_the_hours_of_each(
    steps: dict[str, int], ranking: bool, hours: tuple[float, float] | None
) -> None:
    spec = JobSpec(model_family="wan", model_flavour="2.2-t2v-a14b-low", both_experts=True, **steps)
    seconds = SimpleNamespace(low=2.0, high=4.0)
    ranked: Any = SimpleNamespace(own=SimpleNamespace(seconds=seconds)) if ranking else "no rates"
    own = predicted(disk={"checkpoints": 3 * GIB, "export": GIB})
    pair = pair_of(spec, own, ranked)
    assert pair is not None
    assert (pair.hours, pair.disk) == (hours, 8 * GIB)
    text = pair_text(pair)
    assert ("1.0-2.0 h at the same time" in text) == (hours is not None)
    assert ("2.0-4.0 h one after the other" in text) == (hours is not None)
    saves = "one checkpoint each" if "num_train_epochs" in steps else "checkpoints"
    assert f"disk for {saves} and exports of both: 8.0 GiB" in text
    assert pair_of(spec.model_copy(update={"both_experts": False}), own, ranked) is None
    assert pair_text(None) == ""


def test_sentences_are_wrapped_and_tables_are_not() -> None:
    table = f"strategy  ranks  {'x' * 60}"
    step = f"  1. 8-bit base: {'word ' * 20}".rstrip()
    lines = wrapped(f"{table}\n{step}\nshort", 60).split("\n")
    assert (lines[0], lines[-1]) == (table, "short")
    assert all(line.startswith("     w") and len(line) <= 60 for line in lines[2:-1])
    assert " ".join(" ".join(lines[1:-1]).split()) == step.strip()
