"""A step on a model of one weight: what it comes to, and what becomes of one that went wrong."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from engine.data.loader import Inputs, MicroBatch
from engine.diffusion.objective import NoiseDraw, NoisySample
from engine.ranks.telemetry import Peaks
from engine.ranks.world import World
from engine.train.ema import Ema
from engine.train.optimizer import build_optimizer, build_scheduler
from engine.train.optimizer_step import Stepper, StepResult
from engine.train.train_state import TrainState
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.steps import accumulation_steps
from tests.support.engine.toy_jobs import Line

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE = World(rank=0, size=1, device=torch.device("cpu"), strategy="single", token="t")


@dataclass
class Rig:
    """A stepper on `Line`, whose answers may be spoilt in some steps."""

    spec: JobSpec
    spoilt: set[int] = field(default_factory=set)
    late: bool = False  # as on a GPU
    waits: float = 0.0  # seconds, for each micro-batch
    told: list[StepResult] = field(default_factory=list)
    world: World = ALONE
    bursts: set[int] = field(default_factory=set)  # steps whose gradient is infinite
    drawn: list[float] = field(default_factory=list)  # in the model, as its dropout would
    asked: list[tuple[int, list[int]]] = field(default_factory=list)  # what micro-batches held
    spoilt_micros: set[tuple[int, int]] = field(default_factory=set)  # by step and number

    def __post_init__(self) -> None:
        self.model = Line()
        optimizer = build_optimizer(self.spec, [self.model.weight], ALONE.device)
        ema = Ema(dict(self.model.named_parameters()), 0.9) if self.spec.use_ema else None
        scaler = torch.amp.GradScaler("cpu") if self.spec.mixed_precision == "fp16" else None
        scheduler = build_scheduler(self.spec, optimizer)
        self.training = TrainState(self.model, optimizer, scheduler, ema, scaler)
        family: Any = self
        loader: Any = self
        self.stepper = Stepper(
            self.spec,
            family,
            self,
            self.training,
            loader,
            self.world,
            Peaks(ALONE.device),
            late=self.late,
        )

    def run(self) -> StepResult:
        """Do a step; what was told last."""
        self.stepper.run(self.told.append)
        return self.told[-1]

    @property
    def forwards(self) -> int:
        return accumulation_steps(self.spec)

    def step(self, step: int) -> Iterator[MicroBatch]:
        for _ in range(self.forwards):
            time.sleep(self.waits)
            drawn = NoiseDraw(torch.zeros(1), torch.zeros(1, 1, 1, 1))
            preserved: dict[str, Any] | None = None if self.spec.preservation == "none" else {}
            yield MicroBatch(range(1), torch.ones(1, 1, 1, 1), drawn, {}, preserved=preserved)

    def inputs(self, step: int, micros: list[int]) -> list[Inputs]:
        self.asked.append((step, micros))
        return [Inputs([f"{step}-{micro}.png"], []) for micro in micros]

    def draw(self, latents: torch.Tensor, generators: Any) -> NoiseDraw:
        raise AssertionError("the loader draws")

    def add_noise(self, latents: torch.Tensor, drawn: NoiseDraw) -> NoisySample:
        return NoisySample(latents, drawn.level, drawn.noise)

    def predict(self, model: Any, noisy: torch.Tensor, *_: Any) -> torch.Tensor:
        step, micro = self.training.step, len(self.drawn) % self.spec.gradient_accumulation_steps
        spoilt = step in self.spoilt or (step, micro) in self.spoilt_micros
        factor = float("nan") if spoilt else 1.0
        answer: torch.Tensor = model(noisy) * factor
        if self.training.step in self.bursts:
            answer.register_hook(lambda gradient: gradient * float("inf"))
        self.drawn.append(torch.rand(()).item())
        return answer


def rig(
    *spoilt: int,
    late: bool = False,
    bursts: tuple[int, ...] = (),
    world: World = ALONE,
    **values: Any,
) -> Rig:
    common = {
        "mixed_precision": "no",
        "learning_rate": 0.1,
        "max_grad_norm": 0,
        "optimizer": "sgd",
        "weight_decay": 0.0,
    }
    return Rig(JobSpec(**common | values), set(spoilt), late, world=world, bursts=set(bursts))


def test_a_step_is_gradient_descent() -> None:
    at = rig()
    result = at.run()
    assert (result.loss, result.norm, result.skipped) == (4.0, 4.0, False)
    assert at.model.weight.item() == pytest.approx(2.0 - 0.1 * 4.0)
    assert at.training.step == 1
    assert set(at.stepper._peaks.phases) == {"forward", "backward", "step"}


@pytest.mark.parametrize("late", [False, True])
def test_a_pass_that_preserves_adds_its_loss_and_tells_it(late: bool) -> None:
    """Without an adapter the base predicts the same, so that there is nothing to add."""
    at, plain = (
        rig(late=late, optimizer="adamw", gradient_accumulation_steps=3, **values)
        for values in ({"preservation": "blank"}, {})
    )
    for one in (at, plain):
        one.stepper.run(one.told.append)
        one.stepper.settle(one.told.append)
    mine, theirs = at.told[0], plain.told[0]
    assert (mine.base_loss, theirs.base_loss) == (0.0, None)
    assert replace(mine, base_loss=None, seconds=0, data_seconds=0) == replace(
        theirs, seconds=0, data_seconds=0
    )
    assert len(at.drawn) == 3 * len(plain.drawn) == 9
    assert at.model.weight.equal(plain.model.weight)
    assert set(at.stepper._peaks.phases) == {"base", "forward", "backward", "step"}


def test_waiting_for_data_counts_for_every_micro_batch() -> None:
    at = rig(gradient_accumulation_steps=3)
    at.waits = 0.05
    result = at.run()
    assert 0.15 <= result.data_seconds <= result.seconds
    assert result.loss == pytest.approx(4.0)


def test_a_loss_that_is_not_finite_ends_the_job_and_changes_nothing() -> None:
    at = rig(0)
    with pytest.raises(UserError, match=r"not finite at step 1 .*leave these samples out"):
        at.run()
    assert at.model.weight.item() == 2.0
    assert at.training.step == 0
    later = rig(1)
    later.run()
    with pytest.raises(UserError, match=r"not finite at step 2 .*lower learning_rate"):
        later.run()


@pytest.mark.parametrize("late", [False, True])
def test_only_the_micro_batches_whose_loss_is_not_finite_are_looked_at_again(late: bool) -> None:
    at = rig(late=late, optimizer="adamw", on_nonfinite="skip", gradient_accumulation_steps=3)
    at.spoilt_micros = {(2, 1)}
    for _ in range(4):
        at.stepper.run(at.told.append)
    settled(at)
    assert at.asked == [(2, [1])]
    origins = [result.origin for result in at.told]
    assert origins == [None, None, ", with 2-1.png; the inputs were finite", None]


def test_a_gradient_that_is_not_finite_says_nothing_of_the_samples() -> None:
    at = rig(bursts=(0,), on_nonfinite="skip")
    assert at.run().origin == ""
    assert at.asked == []


def test_a_loss_that_is_not_finite_is_skipped_where_the_job_says_so() -> None:
    at = rig(1, on_nonfinite="skip", lr_scheduler="linear", max_train_steps=10)
    at.run()
    before = at.model.weight.item()
    assert at.run().skipped
    assert at.model.weight.item() == before
    assert at.training.step == 2, "the data moves on"
    assert at.training.scheduler.get_last_lr() == [pytest.approx(0.08)]
    assert not at.run().skipped
    assert at.model.weight.item() < before


def test_skipping_has_an_end() -> None:
    at = rig(*range(100), on_nonfinite="skip")
    for _ in range(19):
        at.run()
    with pytest.raises(UserError, match="20 steps in a row"):
        at.run()


def test_the_average_leaves_out_what_the_step_left_out() -> None:
    at = rig(1, on_nonfinite="skip", use_ema=True)
    at.run()
    assert at.training.ema is not None
    average = at.training.ema.shadow["weight"].item()
    at.run()
    assert at.training.ema.shadow["weight"].item() == average


def test_fp16_gradients_are_scaled_and_unscaled() -> None:
    at = rig(mixed_precision="fp16", max_grad_norm=1.0)
    result = at.run()
    assert result.norm == pytest.approx(4.0, rel=1e-3), "the norm is that of the real gradient"
    assert at.model.weight.item() == pytest.approx(2.0 - 0.1 * 1.0, rel=1e-3), "clipped to 1"


def test_an_fp16_gradient_that_overflows_is_left_out_even_where_nan_would_end_the_job() -> None:
    at = rig(mixed_precision="fp16")
    assert at.training.scaler is not None
    at.training.scaler.scale(torch.ones(()))
    at.training.scaler.update(3e38)
    result = at.run()
    assert (result.loss, result.norm, result.skipped) == (4.0, float("inf"), True)
    assert at.training.scaler.get_scale() == pytest.approx(1.5e38)
    assert at.model.weight.item() == 2.0


def test_a_skipped_nan_lowers_the_fp16_scale_and_training_goes_on() -> None:
    at = rig(0, mixed_precision="fp16", on_nonfinite="skip")
    assert at.training.scaler is not None
    scale = at.training.scaler.get_scale()
    assert at.run().skipped
    assert at.training.scaler.get_scale() == scale / 2
    assert not at.run().skipped


@pytest.mark.parametrize("accumulation", [1, 3])
def test_ranks_that_share_a_sample_make_up_for_the_mean_over_ranks(accumulation: int) -> None:
    """Each has a part of the gradient, and the parts add up; the loss is whole on each."""
    world = replace(ALONE, context_size=4)
    at = rig(world=world, gradient_accumulation_steps=accumulation)
    result = at.run()
    assert (result.loss, result.norm) == (pytest.approx(4.0), pytest.approx(4 * 4.0))


@pytest.mark.parametrize(
    ("bursts", "said"),
    [
        ((), "(loss nan, gradient norm nan), with 0-0.png; the inputs were finite"),
        ((0,), "(loss 4.0, gradient norm inf)"),
    ],
)
def test_either_of_loss_and_gradient_ends_the_job_and_is_named(
    bursts: tuple[int, ...], said: str
) -> None:
    at = rig(*(() if bursts else (0,)), bursts=bursts)
    with pytest.raises(UserError) as caught:
        at.run()
    assert caught.value.message.endswith(f"is not finite at step 1 {said}")
    assert at.model.weight.item() == 2.0


def test_an_infinite_gradient_is_skipped_where_the_job_says_so() -> None:
    at = rig(bursts=(0,), on_nonfinite="skip")
    result = at.run()
    assert (result.loss, result.norm, result.skipped) == (4.0, float("inf"), True)
    assert at.model.weight.item() == 2.0


def test_a_step_that_goes_well_ends_a_row_of_skipped_ones() -> None:
    at = rig(*range(19), *range(20, 39), on_nonfinite="skip")
    for _ in range(39):
        at.run()
    assert [result.step for result in at.told if not result.skipped] == [20]


def test_an_infinite_fp16_gradient_counts_towards_the_row_though_it_ends_nothing_alone() -> None:
    at = rig(bursts=tuple(range(20)), mixed_precision="fp16")
    for _ in range(19):
        assert at.run().skipped
    with pytest.raises(UserError, match="20 steps in a row"):
        at.run()


@pytest.mark.parametrize("first", [0, 50])
def test_the_first_three_steps_of_a_process_and_every_hundredth_are_measured(first: int) -> None:
    """Measuring waits for the device, so that other steps must not."""
    at = rig()
    at.training.step = first  # a resumed run measures its own first steps
    found: list[tuple[int, str]] = []

    @contextmanager
    def phase(name: str, *, measured: bool) -> Iterator[None]:
        if measured:
            found.append((at.training.step, name))
        yield

    at.stepper._peaks.phase = phase  # type: ignore[assignment,method-assign]
    said = []
    for _ in range(202):
        said.append(at.stepper.measures())
        at.run()
    steps = [0, 1, 2, 100, 200]
    assert [number for number, one in enumerate(said) if one] == steps
    names = ("forward", "backward", "step")
    assert found == [(first + step, name) for step in steps for name in names]


@pytest.mark.parametrize("measured", [True, False])
def test_the_part_of_a_step_that_fails_is_known(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = rig()
    monkeypatch.setattr(at.stepper, "measures", lambda: measured)
    at.run()
    assert at.stepper._peaks.doing is None
    monkeypatch.setattr(at.training.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        at.run()
    assert at.stepper._peaks.doing == "step"
    assert bool(at.stepper._peaks.phases) is measured


def test_what_a_model_draws_is_keyed_by_seed_step_and_place_among_the_data() -> None:
    """Golden: a resumed run drops what it would have dropped."""
    at = rig(seed=42)
    at.run()
    at.run()
    assert at.drawn == pytest.approx([0.184177995, 0.330163896], abs=1e-6)
    resumed = rig(seed=42)
    resumed.training.step = 1
    resumed.run()
    assert resumed.drawn == at.drawn[1:]
    # Ranks that share a sample drop the same of it, others do not.
    places = [replace(ALONE, rank=rank, context_size=2) for rank in range(4)]
    alike = [rig(seed=42, world=place) for place in places]
    for one in alike:
        one.run()
    first, second, third, fourth = (one.drawn for one in alike)
    assert first == second == at.drawn[:1]
    assert third == fourth == pytest.approx([0.850427866], abs=1e-6)


@pytest.mark.parametrize(
    ("offload", "wanted"), [(False, [False, False, True]), (True, [True, True, True])]
)
def test_replicas_meet_once_a_step_unless_gradients_go_to_host_memory(
    offload: bool, wanted: list[bool]
) -> None:
    class Sharded(FSDPModule, Line):
        pass

    at = rig(gradient_accumulation_steps=3, fsdp_cpu_offload=offload)
    asked: list[bool] = []
    at.model.__class__ = Sharded
    at.model.set_requires_all_reduce = asked.append  # type: ignore[assignment]
    assert at.run().loss == pytest.approx(4.0)
    assert asked == wanted


# -- as on a GPU: a step is judged when the next one has been given to it ------------------------


def settled(at: Rig) -> Rig:
    at.stepper.settle(at.told.append)
    return at


def run_both(steps: int, *spoilt: int, **values: Any) -> tuple[Rig, Rig]:
    """The same steps, judged at once and late, on AdamW; all of them told."""
    pair = [rig(*spoilt, late=late, **{"optimizer": "adamw"} | values) for late in (False, True)]
    for at in pair:
        for _ in range(steps):
            at.stepper.run(at.told.append)
        settled(at)
    return pair[0], pair[1]


def test_a_late_step_is_told_during_the_next_and_settling_tells_the_last() -> None:
    at = rig(late=True)
    at.stepper.run(at.told.append)
    assert at.told == []
    at.stepper.run(at.told.append)
    assert [result.step for result in at.told] == [1]
    assert [result.step for result in settled(at).told] == [1, 2]
    assert [result.step for result in settled(at).told] == [1, 2], "each of them once"
    at.stepper.run(at.told.append)
    assert [result.step for result in settled(at).told] == [1, 2, 3]


@pytest.mark.parametrize(
    "values",
    [
        {"use_ema": True, "lr_scheduler": "linear", "max_train_steps": 9, "weight_decay": 0.1},
        {"mixed_precision": "fp16", "use_ema": True},
        {"optimizer": "sgd", "on_nonfinite": "fail"},
        {"optimizer": "adafactor", "mixed_precision": "fp16"},
        {"optimizer": "muon", "weight_decay": 0.1},
        {"optimizer": "prodigy", "learning_rate": 1.0},
    ],
)
def test_late_steps_come_to_the_same_bit_for_bit(values: dict[str, Any]) -> None:
    spoilt = () if values.get("on_nonfinite") == "fail" else (2, 3)
    now, late = run_both(6, *spoilt, **{"on_nonfinite": "skip"} | values)
    assert late.model.weight.item() == now.model.weight.item()
    told = [
        [(r.step, str(r.loss), str(r.norm), r.rate, r.skipped) for r in at.told]
        for at in (now, late)
    ]
    assert told[1] == told[0]
    assert [r.step for r in late.told] == list(range(1, 7))
    assert [r.step for r in late.told if r.skipped] == [step + 1 for step in spoilt]
    states = (at.training.optimizer.state_dict()["state"].values() for at in (late, now))
    for mine, other in zip(*states, strict=True):
        assert {name: float(v) for name, v in mine.items()} == {
            name: float(v) for name, v in other.items()
        }
    if now.training.ema is not None and late.training.ema is not None:
        average = now.training.ema.shadow["weight"]
        assert torch.allclose(late.training.ema.shadow["weight"], average, rtol=1e-6)
    if now.training.scaler is not None and late.training.scaler is not None:
        assert late.training.scaler.get_scale() == now.training.scaler.get_scale()
        assert [r.scale for r in late.told if r.skipped] == [r.scale for r in now.told if r.skipped]


def test_a_late_step_that_is_not_finite_is_named_and_has_changed_nothing() -> None:
    """It ends the job when all ranks have done the next one, or before anything is saved."""
    at = rig(1, late=True, optimizer="adamw", use_ema=True)
    at.stepper.run(at.told.append)
    weight = at.model.weight.item()
    at.stepper.run(at.told.append)
    assert at.model.weight.item() == weight, "the device has left it out"
    with pytest.raises(UserError, match=r"not finite at step 2 \(loss nan"):
        settled(at)
    assert [result.step for result in at.told] == [1]

    at = rig(1, late=True, optimizer="adamw")
    at.stepper.run(at.told.append)
    at.stepper.run(at.told.append)
    given = at.training.step
    with pytest.raises(UserError, match="not finite at step 2"):
        at.stepper.run(at.told.append)
    assert at.training.step == given + 1, "where all ranks have done the whole of the next one"


def test_a_late_gradient_that_is_not_finite_is_named_beside_its_loss() -> None:
    at = rig(late=True, optimizer="adamw", bursts=(0,))
    at.stepper.run(at.told.append)
    with pytest.raises(UserError) as caught:
        settled(at)
    assert caught.value.message.endswith("at step 1 (loss 4.0, gradient norm inf)")


@pytest.mark.parametrize("numbers", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_last_words_leave_out_what_is_not_finite(numbers: tuple[float, float]) -> None:
    at = rig(late=True)
    at.stepper.run(at.told.append)
    given: Any = at.stepper._given
    at.stepper._given = given._replace(numbers=torch.tensor(numbers))
    at.stepper.last_words()
    assert at.told == []
    assert at.stepper._given is not None, "all ranks judge it at the same place"


def test_late_skipping_has_an_end() -> None:
    at = rig(*range(100), late=True, optimizer="adamw", on_nonfinite="skip")
    for _ in range(20):
        at.stepper.run(at.told.append)
    with pytest.raises(UserError, match=r"step 20 .*20 steps in a row"):
        at.stepper.run(at.told.append)


def test_an_optimizer_that_cannot_leave_out_a_step_by_itself_is_asked_at_once() -> None:
    at = rig(1, late=True, on_nonfinite="skip", optimizer="adamw_schedule_free")
    assert not at.run().skipped
    weight = at.model.weight.item()
    assert at.run().skipped
    assert at.model.weight.item() == weight


def test_last_words_are_those_of_a_step_that_went_well() -> None:
    at = rig(1, late=True)
    at.stepper.run(at.told.append)
    at.stepper.last_words()
    assert [result.step for result in at.told] == [1]
    at.stepper.run(at.told.append)
    at.stepper.last_words()
    assert [result.step for result in at.told] == [1]


def test_nothing_waits_for_a_device_that_is_still_computing() -> None:
    class Computing:
        def reached(self) -> bool:
            return False

        def wait(self) -> None:
            raise AssertionError("the device stands still meanwhile")

    at = rig(late=True)
    at.stepper.run(at.told.append)
    given: Any = at.stepper._given
    at.stepper._given = given._replace(done=Computing())
    at.stepper.last_words()
    assert at.told == []
    at.stepper._hear(wait=False)
    assert at.told == []
    at.stepper._given = given
    at.stepper._hear(wait=False)
    assert [result.step for result in at.told] == [1]
