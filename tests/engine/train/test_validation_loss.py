"""The loss on samples that are held out: which they are, what is measured, what stays as it was.

On several ranks: `test_sampling_ranks.py`.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engine.data.index.data_index import DataIndex, Sample, build_index, hold_out
from engine.data.prepare import Prepared
from engine.data.report import make_plan, make_report, summary
from engine.diffusion.denoising import Denoising
from engine.diffusion.objective import NoiseDraw
from engine.diffusion.rectified_flow import Flow
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_job
from engine.toy.components.weights import one_thread
from engine.train.validation_loss import (
    batches_of,
    forwards_each,
    held_frames,
    problem_at,
    quantile_of,
)
from jobs.errors import UserError
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALONE = World(0, 1, torch.device("cpu"), "single", "t")


def sample_of(number: int, dataset: int = 0, content: int | None = None) -> Sample:
    digest = f"{number if content is None else content:064x}"
    bucket = ((64, 64), (96, 64))[number % 2]
    return Sample(f"{number}.png", f"/{number}.png", dataset, ("a",), 64, 64, digest, bucket)


def spec_of(fraction: float, **values: Any) -> JobSpec:
    datasets = [f"/d{number}" for number in range(values.pop("datasets", 1))]
    return JobSpec(datasets=datasets, validation_fraction=fraction, **values)


@st.composite
def indices(draw: st.DrawFn) -> tuple[DataIndex, int]:
    """Samples of several datasets, some of them copies of others."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    samples = []
    for dataset, size in enumerate(sizes):
        for _ in range(size):
            number = len(samples)
            content = draw(st.integers(0, number)) if draw(st.booleans()) else number
            samples.append(sample_of(number, dataset, content))
    return DataIndex(samples, others=[{} for _ in sizes]), len(sizes)


@given(
    found=indices(), fraction=st.floats(0.01, 0.5), seed=st.integers(0, 5), batch=st.integers(1, 4)
)
def test_what_is_held_out_is_never_trained_on(
    found: tuple[DataIndex, int], fraction: float, seed: int, batch: int
) -> None:
    index, datasets = found
    spec = spec_of(fraction, seed=seed, datasets=datasets, train_batch_size=batch)
    try:
        trained, held = hold_out(index, spec)
    except UserError:
        assert all(
            any(
                len({s.digest for s in index.samples if s.dataset == number}) == 1
                for number in range(datasets)
                if digest in {s.digest for s in index.samples if s.dataset == number}
            )
            for digest in {s.digest for s in index.samples}
        ), "nothing could be spared"
        return
    plan = make_plan(spec, trained)
    drawn = {
        trained.samples[draw.sample].name
        for step in range(math.ceil(3 * batch * plan.steps_per_epoch))
        for draw in plan.draws(step)
    }
    assert drawn == {sample.name for sample in trained.samples}
    assert not drawn & {sample.name for sample in held}
    assert not {s.digest for s in trained.samples} & {s.digest for s in held}, "nor a copy of it"
    assert len(held) >= 1
    assert {s.dataset for s in trained.samples} == set(range(datasets)), "something of each is left"
    assert sorted(trained.samples + held, key=lambda s: int(s.path[1:-4])) == index.samples
    assert [s.path for s in held] == [s.path for s in index.samples if s in held], "in order"


def test_so_many_are_held_out_and_always_the_same() -> None:
    index = DataIndex([sample_of(number) for number in range(40)])
    trained, held = hold_out(index, spec_of(0.1))
    assert (len(trained.samples), len(held)) == (36, 4)
    assert hold_out(index, spec_of(0))[1] == []
    assert len(hold_out(index, spec_of(0.001))[1]) == 1
    turned = DataIndex(random.Random(1).sample(index.samples, 40))
    assert {s.name for s in hold_out(turned, spec_of(0.1))[1]} == {s.name for s in held}
    assert hold_out(index, spec_of(0.1, num_processes=4, train_batch_size=2))[1] == held
    assert hold_out(index, spec_of(0.1, seed=7))[1] != held
    assert hold_out(index, spec_of(0.1, seed=7, validation_seed=42))[1] == held
    assert set(held) < set(hold_out(index, spec_of(0.3))[1]), "more takes the same and others"


def test_every_sample_has_its_chance() -> None:
    index = DataIndex([sample_of(number) for number in range(10)])
    chosen = Counter(
        sample.name for seed in range(300) for sample in hold_out(index, spec_of(0.1, seed=seed))[1]
    )
    assert len(chosen) == 10
    assert max(chosen.values()) < 3 * min(chosen.values())


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([sample_of(0)], "would hold out the only sample"),
        ([sample_of(0), sample_of(1, content=0)], "would hold out all samples of a dataset"),
    ],
)
def test_a_dataset_that_can_spare_none_is_refused(samples: list[Sample], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        hold_out(DataIndex(samples), spec_of(0.1))
    assert "set validation_fraction: 0" in str(caught.value)


def test_the_data_report_says_how_many_are_held_out(toy: Path) -> None:
    spec = toy_spec(toy, validation_fraction=0.25)
    index = build_index(spec)
    report = make_report(spec, index, None)
    assert (report.samples, report.held_out) == (18, 6)
    assert sum(bucket.samples for bucket in report.buckets) == 18
    assert summary(report)[0].startswith("18 samples and 6 held out in ")
    assert "held out" not in summary(make_report(toy_spec(toy), index, None))[0]


@given(
    count=st.integers(1, 30),
    batch=st.integers(1, 5),
    levels=st.integers(1, 5),
    ranks=st.integers(1, 8),
)
def test_every_sample_is_measured_once_at_every_level(
    count: int, batch: int, levels: int, ranks: int
) -> None:
    held = [sample_of(number) for number in range(count)]
    spec = spec_of(0.1, train_batch_size=batch, validation_timesteps=levels)
    batches = batches_of(held, spec)
    measured = Counter((number, one.level) for one in batches for number in one.samples)
    assert measured == {(n, level): 1 for n in range(count) for level in range(levels)}
    for one in batches:
        assert 1 <= len(one.samples) <= batch
        assert len({held[number].bucket for number in one.samples}) == 1
    each = forwards_each(len(batches), ranks)
    assert (each - 1) * ranks < len(batches) <= each * ranks


@given(batch=st.integers(1, 5), seed=st.integers(0, 50), rest=st.permutations(range(12)))
def test_the_same_videos_are_measured_from_their_first_frames(
    batch: int, seed: int, rest: list[int]
) -> None:
    """Whatever the seed of the training, its batches, and the videos beside them."""

    def given_first(order: list[int], **values: Any) -> dict[str, int]:
        spec = spec_of(0.1, validation_seed=1, **values)
        shares = {"from_first": 0.5, "to_last": 0.5}
        held = [replace(sample_of(n), digest=f"{n:015x}", **shares) for n in order]
        batches = batches_of(held, spec)
        firsts = [{held_frames(held[n], spec) for n in one.samples} for one in batches]
        assert all(len(alike) == 1 for alike in firsts), "a batch has one answer"
        return {sample.name: held_frames(sample, spec) for sample in held}

    found = given_first(rest[:8], seed=seed, train_batch_size=batch)
    all_of_them = given_first(list(range(12)))
    assert found == {f"{number}.png": all_of_them[f"{number}.png"] for number in rest[:8]}
    assert {0, 1, 2} == set(all_of_them.values())


LATENTS = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))


def test_levels_are_the_middles_of_equal_shares() -> None:
    spec = JobSpec(validation_timesteps=4)
    assert [quantile_of(level, spec) for level in range(4)] == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize(
    ("how", "own", "levels"),
    [
        ("uniform", None, [0.125, 0.375, 0.625, 0.875]),
        ("logit_normal", None, [0.2404, 0.4210, 0.5790, 0.7596]),
        ("shift", None, [0.3564, 0.5600, 0.7065, 0.8469]),  # each of them s·x / (1 + (s-1)·x)
        ("uniform_shift", 2.5, [0.2632, 0.6, 0.8065, 0.9459]),
        ("mode", None, [0.2372, 0.4606, 0.5394, 0.7628]),
    ],
)
def test_levels_are_those_that_training_draws(
    how: str, own: float | None, levels: list[float]
) -> None:
    """The middles of four equal shares of it."""
    spec = JobSpec(timestep_sampling=how, flow_shift=own)
    flow = Flow(spec, lambda height, width, frames: 1 + height / width)
    problems = [problem_at(flow, LATENTS, NOISE, quantile_of(level, spec)) for level in range(4)]
    assert [problem.level[0].item() for problem in problems] == pytest.approx(levels, abs=1e-4)


def test_flow_problems_are_those_of_the_training_without_its_weights() -> None:
    flow = Flow(JobSpec(loss_weighting="cosmap"), lambda height, width, frames: 3.0)
    problem = problem_at(flow, LATENTS, NOISE, 0.3)
    trained = flow.add_noise(LATENTS, NoiseDraw(problem.level, NOISE))
    assert torch.equal(problem.noisy, trained.noisy)
    assert torch.equal(problem.target, NOISE - LATENTS)
    assert trained.weight is not None
    assert problem.weight is None


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_denoising_problems_are_those_of_the_scheduler_and_have_no_weights(kind: Any) -> None:
    scheduler = DDPMScheduler(num_train_timesteps=1000, prediction_type=kind)
    problem = problem_at(Denoising(scheduler, snr_gamma=5.0), LATENTS, NOISE, 0.625)
    assert problem.level.tolist() == [625, 625]
    assert torch.equal(problem.noisy, scheduler.add_noise(LATENTS, NOISE, problem.level))
    velocity = scheduler.get_velocity(LATENTS, NOISE, problem.level)
    assert torch.equal(problem.target, NOISE if kind == "epsilon" else velocity)
    assert problem.weight is None


# -- in a job ------------------------------------------------------------------------------


@pytest.fixture
def train(toy: Path, toy_cache: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(name: str, **changes: Any) -> list[dict[str, Any]]:
        """The events of a job on one rank."""
        settings = {"cache_dir": str(toy_cache), "train_batch_size": 2}
        run_dir = RunDir(tmp_path / name)
        run_dir.create()
        telemetry = Telemetry(run_dir, 0)
        with one_thread():
            run_job(toy_spec(toy, **settings | changes), run_dir, ALONE, telemetry)
        telemetry.close()
        return [json.loads(line) for line in run_dir.events.read_text().splitlines()]

    return run


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


@pytest.mark.slow
def test_measuring_changes_nothing_of_the_training(train: Any, toy: Path, tmp_path: Path) -> None:
    """Against a job on a copy of the data in which what is held out is missing."""
    settings = {"lora_dropout": 0.3, "caption_dropout_probability": 0.3, "max_train_steps": 3}
    held = hold_out(build_index(toy_spec(toy)), toy_spec(toy, validation_fraction=0.15))[1]
    shutil.copytree(toy / "data", tmp_path / "rest")
    for sample in held:
        (tmp_path / "rest" / sample.name).unlink()
    plain = train("plain", dataset=str(tmp_path / "rest"), missing_captions="skip", **settings)
    measured = train(
        "measured",
        validation_fraction=0.15,
        validation_loss_steps=2,
        validation_on_startup=True,
        validation_timesteps=2,
        **settings,
    )

    def steps(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(event["loss"], event["grad_norm"]) for event in of_kind(events, "step")]

    assert len(held) == 4
    assert steps(measured) == steps(plain)
    assert len(steps(plain)) == 3
    assert [event["step"] for event in of_kind(measured, "validation")] == [0, 2, 3]
    (data,) = of_kind(measured, "data")
    assert (data["samples"], data["held_out"]) == (20, 4)


def test_what_is_measured_is_told_and_does_not_depend_on_the_loss_of_the_training(
    train: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "validation_fraction": 0.1,
        "validation_on_startup": True,
        "learning_rate": 3e-3,
        "lora_dropout": 0.5,
        "max_train_steps": 1,
    }
    first, last = of_kind(train("mse", **settings), "validation")
    assert (first["step"], last["step"], first["samples"]) == (0, 1, 2)
    assert [level for level, _ in first["levels"]] == [0.125, 0.375, 0.625, 0.875]
    assert f"step 1  validation loss {last['loss']:.5f}  2 held out, 4" in capfd.readouterr().out
    mean = sum(loss for _, loss in first["levels"]) / 4
    assert first["loss"] == pytest.approx(mean, rel=1e-9)
    assert last["loss"] != first["loss"]
    huber = of_kind(train("huber", loss_type="huber", train_batch_size=1, **settings), "validation")
    assert huber[0]["loss"] == pytest.approx(first["loss"], rel=1e-6), "before any step"


@pytest.mark.slow
def test_held_out_images_count_by_their_masks(train: Any, toy: Path, tmp_path: Path) -> None:
    """What two halves lose on average, the whole loses."""
    settings: dict[str, Any] = {
        "validation_fraction": 0.1,
        "validation_on_startup": True,
        "validation_timesteps": 1,
        "max_train_steps": 1,
        "crop": "square",
        "dataset": "",
    }
    losses = {}
    for half in ("left", "right", "whole"):
        shutil.copytree(toy / "data", folder := tmp_path / half)
        for path in sorted(folder.glob("*.png")) if half != "whole" else ():
            with Image.open(path) as image:
                mask = Image.new("L", image.size)
            first, last = (0, mask.width // 2) if half == "left" else (mask.width // 2, mask.width)
            mask.paste(255, (first, 0, last, mask.height))
            mask.save(path.with_name(f"{path.stem}-mask.png"))
        masked = {"masked_loss": "file"} if half != "whole" else {}
        events = train(half, datasets=[{"path": str(folder)}], **masked, **settings)
        losses[half] = of_kind(events, "validation")[0]["loss"]
    assert (losses["left"] + losses["right"]) / 2 == pytest.approx(losses["whole"], rel=1e-5)
    assert losses["left"] != pytest.approx(losses["whole"], rel=1e-3)


@pytest.mark.slow
def test_the_averaged_weights_are_measured(train: Any) -> None:
    settings: dict[str, Any] = {
        "validation_fraction": 0.1,
        "validation_loss_steps": 2,
        "validation_timesteps": 1,
    }
    plain = of_kind(train("plain", **settings), "validation")
    averaged = of_kind(train("averaged", use_ema=True, **settings), "validation")
    assert [event["step"] for event in plain] == [2, 4]
    pairs = zip(plain, averaged, strict=True)
    assert all(one["loss"] != other["loss"] for one, other in pairs)


@pytest.mark.slow
def test_a_sample_whose_validation_loss_is_not_finite_is_named(
    train: Any, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"validation_fraction": 0.1, "validation_on_startup": True, "max_train_steps": 1}
    bad = hold_out(build_index(toy_spec(toy)), toy_spec(toy, **settings))[1][1].name
    held_latents = Prepared.held_latents

    def spoilt(self: Prepared, number: int) -> torch.Tensor:
        return held_latents(self, number) * (torch.nan if self.held[number].name == bad else 1.0)

    monkeypatch.setattr(Prepared, "held_latents", spoilt)
    warned = [event["message"] for event in of_kind(train("spoilt", **settings), "warning")]
    assert warned == [f"the validation loss is not finite: that of {bad}"] * 2
