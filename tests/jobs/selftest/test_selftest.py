"""The self-test: what is compared with what, which GPUs it takes, and what it leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.doctor.examine import Verdict, ok
from jobs.errors import UserError
from jobs.queue.states import State
from jobs.run.rundir import event
from jobs.selftest import choose_gpus, run, scenes
from jobs.selftest.scenes import largest_difference
from jobs.selftest.stage import SceneFailed, Stage, _report_speed, utilisation, wide_values
from jobs.spec.file.load import load_spec
from jobs.spec.values.datasets import datasets_of
from tests.support.tui.made_up_runs import FakeGpus, add_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.doctor.examine import Finding
    from jobs.queue.store import Store


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ([0.5, 0.25], [0.5, 0.25], 0.0),
        ([0.5, 0.26], [0.5, 0.25], 0.04),
        ([0.5], [0.5, 0.25], float("inf")),
        ([], [], float("inf")),
    ],
)
def test_losses_are_compared_step_by_step(
    found: list[float], expected: list[float], difference: float
) -> None:
    assert largest_difference(found, expected) == pytest.approx(difference)


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (1, []),
        (2, ["ddp", "fsdp2"]),
        (3, ["ddp", "fsdp2"]),
        (4, ["ddp", "fsdp2", "hsdp"]),
        (6, ["ddp", "fsdp2", "hsdp"]),
        (7, ["ddp", "fsdp2"]),
    ],
)
def test_only_strategies_that_divide_the_ranks_are_tried(ranks: int, strategies: list[str]) -> None:
    assert list(scenes._layouts(ranks)) == strategies


def test_flops_are_counted_against_the_gpu_they_ran_on() -> None:
    share = utilisation(0.1, "NVIDIA H100 80GB HBM3")
    assert share is not None
    assert 0 < share < 1
    slower_chip = utilisation(0.1, "NVIDIA H100 PCIe")
    assert slower_chip == pytest.approx(share * 989 / 756)
    assert utilisation(0.2, "NVIDIA H100 80GB HBM3") == pytest.approx(share / 2)
    assert utilisation(0.1, "a GPU of next year") is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_a_gpu_is_not_taken_for_one_with_a_similar_name(name: str, peak: float | None) -> None:
    share, known = utilisation(0.1, name), utilisation(0.1, "NVIDIA H100 80GB HBM3")
    assert known is not None
    assert share == (None if peak is None else pytest.approx(known * 989e12 / peak))


@pytest.mark.parametrize(
    ("seconds", "busy", "verdict"),
    [(0.2, 0.97, Verdict.OK), (0.2, 0.5, Verdict.WARN), (0.001, 0.97, Verdict.FAIL)],
)
def test_a_speed_that_no_gpu_has_is_not_believed(
    store: Store, seconds: float, busy: float, verdict: Verdict
) -> None:
    job = add_job(store, state=State.COMPLETED)
    job.run_dir.create()
    steps = (event("step", step=n, loss=0.5, seconds=seconds) for n in range(1, 31))
    job.run_dir.events.write_text("".join(steps))
    found = _report_speed("1 GPU", job, 1, "NVIDIA H100 80GB HBM3", busy)
    assert found.verdict is verdict
    assert found.facts["seconds"] == seconds


def test_a_batch_that_is_too_large_is_so_for_every_gpu_and_its_data_suffice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = FakeGpus(2)()
    stage = Stage(store, store.home, gpus, 2)
    monkeypatch.setattr(stage, "engine", lambda *words: {})
    values = wide_values(stage, "memory", 2, too_large=True, max_train_steps=1)
    spec = load_spec(None, values)
    assert spec.max_train_steps == 1
    assert spec.train_batch_size * 2**30 > max(gpu.memory_total for gpu in gpus)
    (data,) = datasets_of(spec)
    assert data.repeats * 16 >= 2 * spec.train_batch_size


def test_equal_losses_prove_nothing_where_nothing_is_computed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(store, state=State.COMPLETED)
    stage = Stage(store, store.home, [], 2)
    monkeypatch.setattr(stage, "run", lambda values: job)
    first = scenes._OneDevice(stage)
    first._job = job
    for every, verdict in ((0.0, Verdict.WARN), (0.5, Verdict.OK)):
        monkeypatch.setattr(scenes, "losses", lambda job, every=every: [0.0, every])
        (finding,) = first.compare("ddp", {})
        assert finding.verdict is verdict


def test_gpus_that_someone_uses_are_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(4)
    gpus.gpus = [replace(gpu, memory_used=0) for gpu in gpus.gpus]
    monkeypatch.setattr("jobs.machine.devices.gpus", gpus)
    monkeypatch.setattr("jobs.selftest.scenes.claimed", lambda: {gpus()[1].uuid: 7})
    assert [gpu.index for gpu in choose_gpus(store, ())] == [0, 2, 3]
    assert [gpu.index for gpu in choose_gpus(store, ["1"])] == [1], "as asked for"
    with pytest.raises(UserError, match="no GPU '9'"):
        choose_gpus(store, ["0", "9"])
    every = {gpu.uuid: 7 for gpu in gpus()}
    monkeypatch.setattr("jobs.selftest.scenes.claimed", lambda: every)
    with pytest.raises(UserError, match="every GPU is in use"):
        choose_gpus(store, ())


def test_a_machine_without_gpus_is_tested_on_cpu_ranks(store: Store, no_gpus: None) -> None:
    assert choose_gpus(store, ()) == []


def test_a_paused_queue_is_named_before_anything_starts(store: Store) -> None:
    store.pause(True)
    with pytest.raises(UserError, match="the queue is paused"):
        next(run(store, [], 2, say=lambda words: None))
    assert store.all() == []


def test_a_scene_that_fails_keeps_its_job_and_the_next_is_played(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (add_job(store, state=State.COMPLETED) for _ in range(2))
    stages: list[Stage] = []

    def run_scenes(stage: Stage) -> Iterator[Finding]:
        stages.append(stage)
        stage.jobs += [good.id, bad.id]

        def fails() -> Iterator[Finding]:
            yield from ()
            raise SceneFailed("losses differ by 1.0e-01", bad)

        yield from scenes._run_scene(stage, "ddp", fails)
        yield from scenes._run_scene(stage, "fsdp2", lambda: iter([ok("fsdp2", "all is well")]))

    monkeypatch.setattr("jobs.selftest.scenes.run_scenes", run_scenes)
    found = list(run(store, [], 2, say=lambda words: None))
    assert [(one.name, one.verdict) for one in found] == [
        ("ddp", Verdict.FAIL),
        ("fsdp2", Verdict.OK),
    ]
    assert found[0].found == "losses differ by 1.0e-01"
    assert f"`fsdp-tui logs {bad.id}`" in str(found[0].advice)
    assert [job.id for job in store.all()] == [bad.id]
    assert stages[0].root.is_dir(), "its model and data, which the kept job names"
    report: dict[str, Any] = json.loads((store.home / "selftest.json").read_text())
    assert [one["verdict"] for one in report["findings"]] == ["fail", "ok"]
