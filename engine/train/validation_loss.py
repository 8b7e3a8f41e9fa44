"""The loss on samples that are held out: always the same noise at the same levels.

Unlike the training loss, two values of it differ only in the model. The levels are quantiles of
those that training draws, so that each stands for an equal share of it. It is the plain squared
error whatever loss the job trains with, so that jobs that draw alike can be compared. Ranks share
the work; each error is computed by one of them, in a batch that does not depend on their number, so
that any number of ranks finds the same.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from engine.data.prepare import frame_shares
from engine.diffusion.objective import NoiseDraw, NoisySample, Objective
from engine.diffusion.random_numbers import CONDITION, SOUND, frames_given, keyed_generator
from engine.families.shared.collate import collate
from engine.families.shared.references import first_frame_of, loss_inputs, noised
from engine.model.compiled import uncompiled
from engine.model.precision import computing
from engine.parallel.sharding import reshard
from engine.train.gradients import sent_to
from engine.train.optimizer_step import Moment
from jobs.spec.families import takes_keyframes
from jobs.spec.keys.prompts import validation_seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.data.index.data_index import Sample
    from engine.data.prepare import Prepared
    from engine.run_context import RunContext
    from jobs.spec.job_spec import DataPlanKeys
    from jobs.spec.keys.validation import ValidationKeys

_DIGITS: Final = 15  # of a sample's digest, in the key of its noise


@dataclass(frozen=True)
class Measured:
    """A validation loss.

    Attributes:
        loss: Mean over samples and levels.
        levels: Level and mean over samples, from little noise to much. A level is a quantile in
            (0, 1) of what training draws; its sigma may depend on the size of an image.
        samples: How many are held out.
        nonfinite: The names of those whose error is not finite.
        seconds: Wall time.
    """

    loss: float
    levels: list[tuple[float, float]]
    samples: int
    nonfinite: list[str]
    seconds: float


class Batch(NamedTuple):
    """The input of one forward: indices of samples of one bucket, at one level."""

    samples: tuple[int, ...]
    level: int


@dataclass(frozen=True)
class ValidationLoss:
    """Measure the validation loss.

    Attributes:
        run: The job and its ranks.
        objective: Its objective.
        data: The caches, with what is held out.
    """

    run: RunContext
    objective: Objective
    data: Prepared

    @torch.no_grad()
    def measure(self, model: torch.nn.Module) -> Measured | None:
        """Measure it; a collective.

        Args:
            model: The model as it is to be judged, sharded or not.

        Returns:
            The loss; None if the job is to stop first.
        """
        begun = time.perf_counter()
        batches = batches_of(self.data.held, self.run.spec)
        each = forwards_each(len(batches), self.run.world.data_size)
        # Each error has one slot, which one rank writes and all others leave at 0, so their sum
        # is exact, and forwards that only keep ranks in step have no weight.
        shape = (len(self.data.held), self.run.spec.validation_timesteps)
        errors = torch.zeros(shape, dtype=torch.float64)
        # Read when all is done: the host prepares each forward while the last one is computed.
        computed: list[tuple[Batch, torch.Tensor]] = []
        before: Moment | None = None
        was_training = model.training
        model.eval()
        read: tuple[int, ...] = ()
        mask: torch.Tensor | None = None
        stopped = False
        with self.run.telemetry.phase("validate", each) as progress:
            for done in range(each):
                if stopped := any(self.run.world.any([self.run.stop_requested()])):
                    break
                place = self.run.world.data_rank * each + done
                batch = batches[min(place, len(batches) - 1)]
                if batch.samples != read:
                    read, (latents, condition) = batch.samples, self._read(batch.samples)
                    mask = self._mask(batch.samples, latents)
                batch_errors = self._errors(model, batch, latents, condition, mask)
                if place < len(batches) and self.run.world.rank % self.run.world.context_size == 0:
                    computed.append((batch, batch_errors))
                if before is not None:
                    before.wait()  # at most two are queued, with their inputs in pinned memory
                before = Moment(self.run.world.device)
                progress(done + 1)
            model.train(was_training)
            reshard(model)
            if stopped:
                return None
            if computed:
                numbers = torch.cat([own for _, own in computed]).cpu().double()
                sizes = [len(batch.samples) for batch, _ in computed]
                for (batch, _), own in zip(computed, numbers.split(sizes), strict=True):
                    errors[list(batch.samples), batch.level] = own
            if self.run.world.size > 1:
                dist.all_reduce(errors)
        finite = errors.isfinite().all(dim=1).tolist()
        bad = [sample.name for sample, good in zip(self.data.held, finite, strict=True) if not good]
        return _summary(errors, bad, time.perf_counter() - begun)

    def _read(self, samples: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Latents `(B, C, h, w)` and encoded captions `(B, …)`, on the device."""
        device = self.run.world.device
        frames = held_frames(self.data.held[samples[0]], self.run.spec)  # as of the whole batch
        texts = [self.data.held_text(number, frames) for number in samples]
        latents = sent_to(torch.stack([self.data.held_latents(n) for n in samples]), device)
        batch = self.run.family.arrange(collate(texts, multiple=self.run.world.context_size))
        batch |= self.run.family.sizes(self.run.spec, [self.data.held_shown(n) for n in samples])
        batch |= collate(
            [
                noised(
                    self.data.held_references(number, frames),
                    self.run.family.CONDITION_LEVEL,
                    self._generator(number, 0, CONDITION),
                )
                for number in samples
            ]
        )
        batch |= collate([self._sound(number) for number in samples])
        if frames and not takes_keyframes(self.run.spec):
            batch |= first_frame_of(latents)
        return latents, {name: sent_to(tensor, device) for name, tensor in batch.items()}

    def _mask(self, samples: tuple[int, ...], latents: torch.Tensor) -> torch.Tensor | None:
        """Return the factors of the samples' masks, `(B, 1, h, w)`; None if there are none."""
        masks = [
            self.data.held_mask(number, own) for number, own in zip(samples, latents, strict=True)
        ]
        given = [mask for mask in masks if mask is not None]
        return sent_to(torch.stack(given), latents.device) if given else None

    def _errors(
        self,
        model: torch.nn.Module,
        batch: Batch,
        latents: torch.Tensor,
        condition: dict[str, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the mean squared error of each sample, `(B,)`, on the device."""
        drawn = [
            torch.randn(latents.shape[1:], generator=self._generator(number, batch.level))
            for number in batch.samples
        ]
        noise = sent_to(torch.stack(drawn), latents.device)
        quantile = quantile_of(batch.level, self.run.spec)
        problem = problem_at(self.objective, latents, noise, quantile)
        with computing(self.run.spec, self.run.world), uncompiled(self.run.spec):
            prediction = self.run.family.predict(
                model, problem.noisy, problem.level, condition, self.run.spec.train_guidance
            )
        prediction, problem = loss_inputs(prediction, problem, condition)
        squares = (prediction.float() - problem.target).square()
        if mask is not None:
            squares = squares * mask
        return squares.flatten(start_dim=1).mean(dim=1)

    def _generator(self, number: int, *level: int) -> torch.Generator:
        content = _content_of(self.data.held[number])
        return keyed_generator(validation_seed_of(self.run.spec), content, *level)

    def _sound(self, number: int) -> dict[str, torch.Tensor]:
        """Return a held-out sample's sound, with one noise at all levels."""
        generator = self._generator(number, 0, SOUND)
        return self.data.sound_of(len(self.data.index.samples) + number, generator)


def batches_of(held: Sequence[Sample], spec: DataPlanKeys) -> list[Batch]:
    """All forwards of a measurement, in an order that reads each sample once. Pure."""
    by_bucket: dict[tuple[Any, ...], list[int]] = {}
    for number, sample in enumerate(held):
        alike = (sample.group, held_frames(sample, spec))
        by_bucket.setdefault(alike, []).append(number)
    size = spec.train_batch_size
    return [
        Batch(tuple(numbers[first : first + size]), level)
        for numbers in by_bucket.values()
        for first in range(0, len(numbers), size)
        for level in range(spec.validation_timesteps)
    ]


def held_frames(sample: Sample, spec: DataPlanKeys) -> int:
    """Return how many frames of a held-out sample the model gets, as `frames_given`. Pure.

    It depends on the content and the validation seed alone, as the noise does, so that losses of
    jobs with other seeds or batches can be compared.
    """
    shares = frame_shares(sample, spec)
    return frames_given(validation_seed_of(spec), -1, _content_of(sample), shares)


def _content_of(sample: Sample) -> int:
    return int(sample.digest[:_DIGITS], 16)


def forwards_each(batches: int, ranks: int) -> int:
    """How many forwards every rank makes; under FSDP, all must make as many. Pure."""
    return -(-batches // ranks)


def quantile_of(level: int, spec: ValidationKeys) -> float:
    """Return the middle of the level's share of (0, 1)."""
    return (level + 0.5) / spec.validation_timesteps


def problem_at(
    objective: Objective, latents: torch.Tensor, noise: torch.Tensor, quantile: float
) -> NoisySample:
    """Return the training problem with this noise at a fixed level, without weights.

    Args:
        objective: Of the job.
        latents: Clean latents `(B, C, h, w)`, or `(B, C, frames, h, w)`.
        noise: Of the same shape.
        quantile: In (0, 1), of the levels that the job's training draws for such latents.
    """
    level = torch.full(
        (len(latents),), objective.level_at(quantile, latents), device=latents.device
    )
    return replace(objective.add_noise(latents, NoiseDraw(level, noise)), weight=None)


def _summary(errors: torch.Tensor, nonfinite: list[str], seconds: float) -> Measured:
    """Of the errors `(samples, levels)`. Sums are exact, so that their order does not matter."""
    samples, count = errors.shape
    means = [math.fsum(errors[:, level].tolist()) / samples for level in range(count)]
    loss = math.fsum(errors.flatten().tolist()) / errors.numel()
    levels = [((level + 0.5) / count, mean) for level, mean in enumerate(means)]
    return Measured(loss, levels, samples, nonfinite, seconds)
