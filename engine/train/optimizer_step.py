"""One optimizer step: forward and backward over the global batch, average, clip, update.

On a GPU nothing here waits for the device, which would be idle meanwhile: a step's loss and norm
are read after the next step has been given to it, and what depends on them before that is decided
on the device.
"""

from __future__ import annotations

import math
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss

from engine.diffusion.objective import loss_of
from engine.diffusion.random_numbers import keyed_generator
from engine.families.shared.references import loss_inputs
from engine.model.adapters.lora import without_adapter
from engine.model.precision import computing
from engine.train.gradients import Averager, clip
from engine.train.nonfinite import Judge
from engine.train.skipping import decides_on_device, step_unless
from engine.train.token_routing import TokenRouting
from jobs.spec.rules.steps import accumulation_steps, passes, preserves, trains_to_base

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from engine.data.loader import Loader, MicroBatch
    from engine.diffusion.objective import NoisySample, Objective
    from engine.families import Family
    from engine.ranks.telemetry import Peaks
    from engine.ranks.world import World
    from engine.train.train_state import TrainState
    from jobs.spec.job_spec import JobSpec

# The schedule advances with every step, also when the first ones are skipped.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

_MEASURED_FIRST: Final = 3  # steps; Adam's state is there from the second on
_MEASURED_EVERY: Final = 100


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank except for the times.

    Attributes:
        step: Which one, counted from 1.
        loss: Mean over the global batch.
        norm: Global gradient norm before clipping.
        origin: Of a step that was skipped, since loss or gradient were not finite: which ranks and
            samples that comes from, "" if it is not known; None of others.
        scale: The loss scale of fp16 after it; may be None where nothing was skipped.
        rate: The learning rate of this step.
        seconds: Wall time; on a GPU, since it was done with the step before.
        data_seconds: The host's waiting for data; a GPU may have had work meanwhile.
        base_loss: The part of `loss` that holds the adapter to the base's own prediction; None in a
            job without such a part.
    """

    step: int
    loss: float
    norm: float
    origin: str | None
    scale: float | None
    rate: float
    seconds: float
    data_seconds: float
    base_loss: float | None = None

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated."""
        return self.origin is not None


class Moment:
    """A point in the device's queue: reached when it has done all work queued so far."""

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Blocking: a rank that waits leaves its core to the loader's threads.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record()

    def reached(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None and not self._event.query():
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        if self._event is None or earlier._event is None:
            return self._host - earlier._host
        return earlier._event.elapsed_time(self._event) / 1000


class _Given(NamedTuple):
    """A step that was given to the device, which may still be computing it.

    Attributes:
        step: Counted from 0.
        numbers: As of `Stepper._reduce` and, of fp16, the loss scale, in host memory once `done` is
            reached.
        begun: When its time starts.
        done: When it has been computed.
        rate: The learning rate.
        data_seconds: Seconds of waiting for data.
    """

    step: int
    numbers: torch.Tensor
    begun: Moment
    done: Moment
    rate: float
    data_seconds: float


class Stepper:
    """Does steps. All ranks call `run` and `settle` together.

    Args:
        spec: The job.
        family: Its family.
        objective: Its objective.
        training: What is trained.
        loader: This rank's micro-batches.
        world: The ranks.
        peaks: Measures memory.
        late: Whether a step is judged only when the next one has been given to the device; None
            for on GPUs only, where it is faster.
    """

    def __init__(
        self,
        spec: JobSpec,
        family: Family,
        objective: Objective,
        training: TrainState,
        loader: Loader,
        world: World,
        peaks: Peaks,
        *,
        late: bool | None = None,
    ) -> None:
        self._spec = spec
        self._forwards = accumulation_steps(spec)
        self._family = family
        self._objective = objective
        self._training = training
        self._loader = loader
        self._world = world
        self._peaks = peaks
        self._trained = list(training.trained().values())
        self._averager = Averager(self._trained, world)
        self._averager.watch()
        self._routing = TokenRouting(training.model, spec, family)
        self._judge = Judge(spec, training, loader, world)
        # Whether training continues after a step that is skipped.
        self._has_base = trains_to_base(spec) or preserves(spec)
        self._may_skip = spec.on_nonfinite == "skip" or training.scaler is not None
        requested = world.device.type == "cuda" if late is None else late
        self._late = requested and self._can_be_late()
        self._given: _Given | None = None
        self._tell: Callable[[StepResult], None] = lambda result: None
        self._done = 0

    def run(self, tell: Callable[[StepResult], None]) -> None:
        """Do the next step.

        Args:
            tell: Called with the result of each step, in order, as soon as it is known: for this
                step before `run` returns or, on a GPU, during the next one.

        Raises:
            UserError: Loss or gradient of a step is not finite, and the job is set to fail, or this
                has happened too often in a row. No file has any result of that step.
        """
        self._tell = tell
        begun, step = time.perf_counter(), self._training.step
        # Its time begins where that of the step before ended, if that one is still computed.
        start = self._given.done if self._given else Moment(self._world.device)
        # Dropout inside the model draws from the global generator; key it like all other draws.
        torch.manual_seed(
            keyed_generator(self._spec.seed, step, -1 - self._world.data_rank).initial_seed()
        )
        losses, base_loss, waited = self.accumulate(step)
        with self._measured("step"):
            numbers = self._reduce(losses, base_loss)
            del losses, base_loss
            rate = float(self._training.scheduler.get_last_lr()[0])
            if self._late:
                numbers = self._update_on_device(numbers)
            else:
                loss, norm, origin, scale, base = self._update(numbers, step)
        self._done += 1
        if not self._late:
            seconds = time.perf_counter() - begun
            tell(StepResult(step + 1, loss, norm, origin, scale, rate, seconds, waited, base))
            return
        numbers = numbers.to("cpu", non_blocking=True)  # pinned memory: does not block
        done = Moment(self._world.device)
        self._hear(wait=True)  # of the previous step: the device has at most two queued
        self._given = _Given(step, numbers, start, done, rate, waited)

    def settle(self, tell: Callable[[StepResult], None]) -> None:
        """Wait for the step that is still computed, if one is.

        Raises:
            UserError: As of `run`.
        """
        self._tell = tell
        self._hear(wait=True)

    def last_words(self) -> None:
        """Report the step before the one that failed, if its result is known; does not wait."""
        with suppress(Exception):  # the original error is being raised already
            self._hear(wait=False)

    def measures(self) -> bool:
        """Whether the memory of the next step is measured; the same on every rank."""
        return self._done < _MEASURED_FIRST or self._done % _MEASURED_EVERY == 0

    def accumulate(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Run forward and backward of each micro-batch; gradients are left on the parameters.

        FSDP2 reduces and scatters the gradients of each micro-batch, and sums the shards in fp32:
        a rank never holds more of them than its shard and a unit's. Waiting for the last backward
        would save communication and keep the whole model's gradients in fp32 on every rank. What
        is whole on a rank anyway is summed up there, and averaged once.

        With `preservation`, a micro-batch has two passes one after the other: one graph at a time
        is in memory. Ranks that share weights run the same passes and forwards.

        Returns:
            Each micro-batch's part of the mean loss, `(n,)` on the device; the sum of what of it
            holds the adapter to the base, `()`; and the seconds of waiting for data.
        """
        with self._routing.step(step):
            return self._accumulate(step)

    def _accumulate(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        model, scaler = self._training.model, self._training.scaler
        batches, count = self._loader.step(step), self._loader.forwards
        sums = torch.zeros(count + 1, device=self._world.device)
        losses, base_loss = sums[:count], sums[count]
        waited = 0.0
        for number in range(1, count + 1):
            asked = time.perf_counter()
            batch: MicroBatch | None = next(batches)
            waited += time.perf_counter() - asked
            for end in range(1, passes(self._spec) + 1):
                assert batch is not None
                preserving = end == 2
                last = number == count and end == passes(self._spec)
                if isinstance(model, FSDPModule):
                    # HSDP's replicas meet once a step: until then each sums up its shards'
                    # gradients, on the device. Where these are to be in host memory they meet
                    # each time.
                    model.set_requires_all_reduce(last or self._spec.fsdp_cpu_offload)
                target = None
                if preserving or batch.asks_base:
                    with self._measured("base"):
                        target = self._base_prediction(batch, preserving=preserving)
                with self._measured("forward"):
                    # Averaged over the ranks, of which each may compute another number.
                    loss = self._loss(batch, target, preserving=preserving) / self._forwards
                to_base = preserving or batch.to_base
                if end == passes(self._spec):
                    batch = None  # before the next one comes to the device
                del target
                self._hear(wait=False)
                if last:
                    self._averager.begin()
                with self._measured("backward"):
                    # Ranks that share a sample have a part of its gradient each; see
                    # `engine.parallel.context_parallel`.
                    whole = loss * self._world.context_size
                    (whole if scaler is None else scaler.scale(whole)).backward()
                # Copied: even detached, a loss keeps its autograd graph alive.
                losses[number - 1].add_(loss.detach())
                if to_base:
                    base_loss.add_(loss.detach())
        return losses, base_loss, waited

    def _loss(
        self, batch: MicroBatch, base: torch.Tensor | None, *, preserving: bool
    ) -> torch.Tensor:
        """Return the loss of a pass.

        Args:
            batch: The micro-batch.
            base: The base's own prediction, if it was computed.
            preserving: Whether this is the pass of `preservation`, whose loss is the plain squared
                error over whole images.
        """
        problem = self._objective.add_noise(batch.latents, batch.drawn)
        prediction = self._predict(problem, batch, preserving=preserving)
        if base is not None and (preserving or batch.to_base):
            problem = replace(problem, target=base.float())
        prediction, problem = loss_inputs(prediction, problem, batch.condition)
        if preserving:
            return self._spec.preservation_weight * mse_loss(prediction.float(), problem.target)
        return loss_of(prediction, problem, self._spec, batch.weight)

    @torch.no_grad()
    def _base_prediction(self, batch: MicroBatch, *, preserving: bool) -> torch.Tensor:
        """Return what the model without its adapter predicts for the pass's input."""
        problem = self._objective.add_noise(batch.latents, batch.drawn)
        with without_adapter(self._training.model):
            return self._predict(problem, batch, preserving=preserving)

    def _predict(
        self, problem: NoisySample, batch: MicroBatch, *, preserving: bool
    ) -> torch.Tensor:
        condition = batch.preserved if preserving else batch.condition
        assert condition is not None, "the loader has encoded it"
        # One context each: autocast would otherwise reuse what it cast without gradients.
        with computing(self._spec, self._world):
            return self._family.predict(
                self._training.model,
                problem.noisy,
                problem.level,
                condition,
                self._spec.train_guidance,
            )

    def _reduce(self, losses: torch.Tensor, base_loss: torch.Tensor) -> torch.Tensor:
        """Average and clip gradients.

        Args:
            losses: From `accumulate`.
            base_loss: From there too.

        Returns:
            Loss, norm and base loss of all ranks, so that all do alike, and this rank's `losses`:
            `(3 + n,)`. Where one of these is not finite, the loss of all ranks is not.
        """
        training = self._training
        self._averager.finish()
        if training.scaler is not None:
            training.scaler.unscale_(training.optimizer)
        norm = clip(self._trained, self._spec.max_grad_norm, self._world)
        total = losses.sum()
        if self._has_base:
            mean, base = self._world.average(torch.stack([total, base_loss]))
        else:  # without a launch for what nobody reads
            mean = base = self._world.average(total)
        others = [mean, base, *losses]
        if norm.device != mean.device:  # gradients in host memory: the host waits only once
            others = list(torch.stack(others).to(norm.device))
        return torch.stack([others[0], norm, *others[1:]])

    # -- the update, judged by the host ------------------------------------------------------

    def _update(
        self, numbers: torch.Tensor, step: int
    ) -> tuple[float, float, str | None, float | None, float | None]:
        """Step the optimizer unless loss or norm are not finite.

        Returns:
            Loss, norm, the origin and the loss scale of a step that was skipped, and the base loss.

        Raises:
            NotFiniteError: They are not, and must be. Nothing has changed.
        """
        loss, norm, base, *losses = numbers.tolist()
        training, scaler = self._training, self._training.scaler
        if training.ema is not None:
            training.ema.catch_up()
        origin = self._judge.reason_to_skip(step, loss, norm, losses)
        finite = origin is None
        if scaler is None:
            if finite:
                training.optimizer.step()
        else:
            if math.isfinite(loss):
                scaler.step(training.optimizer)  # does nothing after an overflow
            scaler.update()
        self._advance()
        if finite and training.ema is not None:
            training.ema.update(training.step)
        scale = None if finite or scaler is None else scaler.get_scale()
        return loss, norm, origin, scale, base if self._has_base else None

    # -- the update, before it is judged -----------------------------------------------------

    def _can_be_late(self) -> bool:
        """Whether a step may be given to the device before the result of the last one is known.

        Not with weights in host memory, which wait in any case. Where training continues after a
        step that is not finite, the device has to skip it; where the job ends, nothing more is
        saved.
        """
        if any(parameter.device.type != self._world.device.type for parameter in self._trained):
            return False
        return decides_on_device(self._training.optimizer) or not self._may_skip

    def _update_on_device(self, numbers: torch.Tensor) -> torch.Tensor:
        """Step the optimizer unless loss or norm are not finite, without reading them.

        Returns:
            The numbers and, with fp16, the loss scale.
        """
        training, scaler = self._training, self._training.scaler
        if training.ema is not None:
            training.ema.catch_up()
        spoilt = 1 - numbers.isfinite().all().to(numbers.dtype)
        if decides_on_device(training.optimizer):
            step_unless(training.optimizer, spoilt)
        else:
            training.optimizer.step()
        if scaler is not None:
            scaler.update()
            numbers = torch.cat([numbers, scaler.scale(torch.ones_like(numbers[:1]))])
        self._advance()
        if training.ema is not None:
            training.ema.update(training.step, spoilt if self._may_skip else None)
        return numbers

    def _hear(self, *, wait: bool) -> None:
        """Read the result of the step before, judge it, and report it.

        Args:
            wait: Whether to wait for it. Otherwise it is read only if it is known and finite: ranks
                do not learn it at the same time, and must fail at the same place.

        Raises:
            NotFiniteError: It is not finite, and must be.
        """
        given = self._given
        if given is None or not (wait or given.done.reached()):
            return
        given.done.wait()
        loss, norm, base, *losses = given.numbers.tolist()
        factor = losses.pop() if self._training.scaler is not None else None
        if not (wait or (math.isfinite(loss) and math.isfinite(norm))):
            return
        self._given = None
        origin = self._judge.reason_to_skip(given.step, loss, norm, losses)
        seconds = given.done.seconds_since(given.begun)
        result = StepResult(
            given.step + 1,
            loss,
            norm,
            origin,
            factor,
            given.rate,
            seconds,
            given.data_seconds,
            base if self._has_base else None,
        )
        self._tell(result)

    # ----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do what every step does, skipped or not."""
        training = self._training
        training.optimizer.zero_grad(set_to_none=True)
        training.scheduler.step()
        training.step += 1

    def _measured(self, name: str) -> AbstractContextManager[None]:
        return self._peaks.phase(name, measured=self.measures())
