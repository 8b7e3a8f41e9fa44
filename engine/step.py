"""One optimizer step: forward and backward over the global batch, average, clip, update."""

from __future__ import annotations

import math
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.fsdp import FSDPModule

from engine.draws import keyed_generator, sample_generators
from engine.gradients import average_gradients, clip
from engine.objective import loss_of
from engine.precision import autocast
from jobs.errors import UserError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from engine.data.loader import Loader, MicroBatch
    from engine.families import Family
    from engine.objective import Objective
    from engine.peaks import Peaks
    from engine.training import Training
    from engine.world import World
    from jobs.spec import JobSpec

# The schedule advances with every step, also when the first ones are left out.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

_MOST_SKIPPED: Final = 20  # in a row; an fp16 loss scale starts at 2^16 and halves each time
_MEASURED_FIRST: Final = 3  # steps; Adam's state is there from the second on
_MEASURED_EVERY: Final = 100


@dataclass(frozen=True)
class StepResult:
    """What a step came to, the same on every rank but for the times.

    Attributes:
        loss: Mean over the global batch.
        norm: Global gradient norm before clipping.
        rate: The learning rate of this step.
        skipped: Nothing was updated, since loss or gradient were not finite.
        seconds: Wall time.
        data_seconds: Of it, waiting for data.
    """

    loss: float
    norm: float
    rate: float
    skipped: bool
    seconds: float
    data_seconds: float


class Stepper:
    """Does steps. All ranks call `run` together."""

    def __init__(
        self,
        spec: JobSpec,
        family: Family,
        objective: Objective,
        training: Training,
        loader: Loader,
        world: World,
        peaks: Peaks,
    ) -> None:
        self._spec = spec
        self._family = family
        self._objective = objective
        self._training = training
        self._loader = loader
        self._world = world
        self._peaks = peaks
        self._trained = list(training.trained().values())
        self._done = 0
        self._skipped = 0

    def run(self) -> StepResult:
        """Do the next step.

        Raises:
            UserError: Loss or gradient is not finite, and the job says to fail, or this has
                happened too often in a row.
        """
        begun = time.perf_counter()
        training, step = self._training, self._training.step
        # Dropout inside the model draws from the global generator: keyed like everything else.
        torch.manual_seed(
            keyed_generator(self._spec.seed, step, -1 - self._world.data_rank).initial_seed()
        )
        losses, waited = self.accumulate(step)
        with self._measured("step"):
            average_gradients(self._trained, self._world)
            if training.scaler is not None:
                training.scaler.unscale_(training.optimizer)
            norm = clip(self._trained, self._spec.max_grad_norm, self._world)
            # Both are global, so all ranks decide alike; one wait for the device for both.
            loss, norm_value = torch.stack(
                [self._world.average(losses), norm.to(losses.device)]
            ).tolist()
            rate = float(training.scheduler.get_last_lr()[0])
            skipped = self._update(loss, norm_value, step)
        self._done += 1
        seconds = time.perf_counter() - begun
        return StepResult(loss, norm_value, rate, skipped, seconds, waited)

    def measures(self) -> bool:
        """Whether the memory of the next step is measured; the same on every rank."""
        return self._done < _MEASURED_FIRST or self._done % _MEASURED_EVERY == 0

    def accumulate(self, step: int) -> tuple[torch.Tensor, float]:
        """Forward and backward of each micro-batch; gradients are left on the parameters.

        FSDP2 reduces and scatters the gradients of each micro-batch, and sums the shards in fp32:
        a rank never holds more of them than its shard and a unit's. Waiting for the last backward
        would save communication and keep the whole model's gradients in fp32 on every rank. What
        is whole on a rank anyway is summed up there, and averaged once.

        Returns:
            The mean loss, a scalar on the device, and the seconds of waiting for data.
        """
        model, scaler = self._training.model, self._training.scaler
        losses = torch.zeros((), device=self._world.device)
        waited = 0.0
        batches, count = self._loader.step(step), self._spec.gradient_accumulation_steps
        for number in range(1, count + 1):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            if isinstance(model, FSDPModule):
                # HSDP's replicas meet once a step: until then each sums up its shards' gradients,
                # on the device. Where these are to be in host memory they meet each time.
                last = number == count or self._spec.fsdp_cpu_offload
                model.set_requires_all_reduce(last)
            with self._measured("forward"):
                loss = self._loss(batch, step) / count
            del batch  # before the next one comes to the device
            with self._measured("backward"):
                # Ranks that share a sample have a part of its gradient each; see
                # `engine.context_parallel`.
                whole = loss * self._world.context_size
                (whole if scaler is None else scaler.scale(whole)).backward()
            losses += loss.detach()
        return losses, waited

    def _loss(self, batch: MicroBatch, step: int) -> torch.Tensor:
        generators = sample_generators(self._spec.seed, step, batch.positions)
        problem = self._objective.draw(batch.latents, generators)
        with autocast(self._spec, self._world.device):
            prediction = self._family.predict(
                self._training.model,
                problem.noisy,
                problem.level,
                batch.condition,
                self._spec.train_guidance,
            )
        return loss_of(prediction, problem, self._spec)

    def _update(self, loss: float, norm: float, step: int) -> bool:
        """Step optimizer, schedule and average; whether the update was left out."""
        training = self._training
        finite = math.isfinite(loss) and math.isfinite(norm)
        # An fp16 gradient that overflows is the loss scale's doing, not the model's.
        overflow = training.scaler is not None and math.isfinite(loss)
        if not finite:
            self._tolerate(loss, norm, step, overflow)
        else:
            self._skipped = 0
        if training.scaler is not None:
            if finite or overflow:
                training.scaler.step(training.optimizer)  # does nothing after an overflow
            training.scaler.update()
        elif finite:
            training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        training.scheduler.step()
        training.step = step + 1
        if finite and training.ema is not None:
            training.ema.update(training.step)
        return not finite

    def _tolerate(self, loss: float, norm: float, step: int, overflow: bool) -> None:
        """Count a step that is left out.

        Raises:
            UserError: It must not be.
        """
        self._skipped += 1
        what = (
            f"the loss or gradient is not finite at step {step + 1} "
            f"(loss {loss}, gradient norm {norm})"
        )
        if self._spec.on_nonfinite == "fail" and not overflow:
            raise UserError(what, "lower learning_rate, or resume from an earlier checkpoint")
        if self._skipped >= _MOST_SKIPPED:
            raise UserError(
                f"{what}, as in {self._skipped} steps in a row", "lower learning_rate, or use bf16"
            )

    def _measured(self, name: str) -> AbstractContextManager[None]:
        return self._peaks.phase(name) if self.measures() else nullcontext()
