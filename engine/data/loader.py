"""Read each step's tensors from the caches, a few steps ahead of training."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch

from engine.data.encode.tensor_cache import nonfinite
from engine.data.encode.texts import TrainedTexts
from engine.data.index.batch_plan import Draw, positions_of
from engine.diffusion.objective import NoiseDraw
from engine.diffusion.random_numbers import (
    CONDITION,
    SOUND,
    drops_caption,
    frames_given,
    keyed_generator,
    sample_generators,
)
from engine.families.shared.collate import collate
from engine.families.shared.references import first_frame_of, noised
from jobs.spec.families import takes_keyframes
from jobs.spec.rules.steps import (
    accumulation_steps,
    forwards_of_ranks,
    micro_batches_of,
    share_on_card,
    steps_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.data.encode.texts import Text
    from engine.data.index.views import Shown
    from engine.data.prepare import Prepared
    from engine.diffusion.objective import Objective
    from engine.families import Family
    from engine.ranks.world import World
    from jobs.spec.job_spec import JobSpec

_READERS: Final = 2  # threads; reading and checksums release the GIL


@dataclass(frozen=True)
class MicroBatch:
    """The input of one rank's forward, on its device.

    Attributes:
        positions: Positions of its samples in the global batch, which key the random draws.
        latents: `(B, C, h, w)`, for videos `(B, C, f, h, w)`; normalized, fp32.
        drawn: Noise levels and noise.
        condition: Encoded captions, each `(B, …)`, in the layout of `Family.arrange`; and latents
            of conditioning images (`engine.families.shared.references`).
        weight: Error weights, `(B,)`, or `(B, 1, h, w)` in a job with masks; None if all are equal.
        to_base: Whether the target is the base's own prediction.
        asks_base: Whether to compute that prediction; where ranks share weights, all of them do for
            one of them.
        preserved: The condition with which the base's prediction is preserved, if it is.
    """

    positions: range
    latents: torch.Tensor
    drawn: NoiseDraw
    condition: dict[str, torch.Tensor]
    weight: torch.Tensor | None = None
    to_base: bool = False
    asks_base: bool = False
    preserved: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class Inputs:
    """Contents of a micro-batch, for error messages.

    Attributes:
        names: Names of its samples.
        nonfinite: Names of its input tensors that have non-finite values.
    """

    names: list[str]
    nonfinite: list[str]


@dataclass(frozen=True)
class _Read:
    """A micro-batch in host memory; conditions are None until their texts are encoded."""

    draws: list[Draw]
    positions: range
    latents: torch.Tensor
    drawn: NoiseDraw
    texts: list[Text]
    pictures: list[Shown]
    references: dict[str, torch.Tensor]
    condition: dict[str, torch.Tensor] | None
    weight: torch.Tensor | None
    to_base: bool
    asks_base: bool
    preserved_texts: list[Text]
    preserved: dict[str, torch.Tensor] | None


class Loader:
    """Yields this rank's micro-batches, step by step.

    Entire steps are read ahead into pageable memory, together with their random draws. Only the
    next micro-batch is in pinned memory, and only the requested one is on the device.

    Attributes:
        forwards: Micro-batches of this rank in a step.
    """

    def __init__(
        self, spec: JobSpec, data: Prepared, world: World, family: Family, objective: Objective
    ) -> None:
        self._spec = spec
        self._micros = _micro_batches(spec, world)
        self.forwards = len(self._micros)
        self._data = data
        self._world = world
        self._family = family
        self._objective = objective
        self._pins = world.device.type == "cuda"  # copies from pinned memory do not block
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="loader")
        # Use a separate pool: queued behind the reads of later steps, pinning would come too late.
        self._pinning = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._ahead: dict[int, Future[list[_Read]]] = {}
        self._pinned: dict[tuple[int, int], Future[_Read]] = {}

    def step(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a step, counted from 0, while later steps are read ahead.

        Each micro-batch is moved to the device when it is requested.
        """
        self._read_ahead(step)
        own = [(step, micro) for micro in range(self.forwards)]
        for place, following in pairwise([*own, (step + 1, 0)]):
            self._pin_ahead(*place)
            batch = self._pinned.pop(place).result()
            self._pin_ahead(*following)
            yield self._to_device(batch)

    @torch.no_grad()
    def inputs(self, step: int, micros: Sequence[int]) -> list[Inputs]:
        """Read micro-batches of a step again and list their samples and non-finite inputs.

        Args:
            step: A step that was trained, counted from 0.
            micros: Indices of the micro-batches within the step.
        """
        read = self._read(step) if micros else []
        inputs = []
        for batch in (read[micro] for micro in micros):
            condition = batch.condition
            if condition is None:
                condition = self._encoded(batch.texts, batch.pictures) | batch.references
            tensors = {"latents": batch.latents, "noise": batch.drawn.noise, **condition}
            if batch.weight is not None:
                tensors["loss weight"] = batch.weight
            names = [self._data.name_of(draw) for draw in batch.draws]
            inputs.append(Inputs(names, nonfinite(tensors)))
        return inputs

    def close(self) -> None:
        for threads in (self._threads, self._pinning):
            threads.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, step: int) -> None:
        last = min(step + self._spec.prefetch_steps, steps_of(self._spec) - 1)
        steps = range(step, max(step, last) + 1)
        self._ahead = {n: read for n, read in self._ahead.items() if n in steps}
        for number in steps:
            if number not in self._ahead:
                self._ahead[number] = self._threads.submit(self._read, number)

    def _pin_ahead(self, step: int, micro: int) -> None:
        """Start copying a micro-batch to pinned memory."""
        if (step, micro) not in self._pinned and step in self._ahead:
            read = self._ahead[step]
            self._pinned[step, micro] = self._pinning.submit(self._pin, read, micro)

    def _pin(self, reading: Future[list[_Read]], micro: int) -> _Read:
        batch = reading.result()[micro]
        if not self._pins:
            return batch
        condition = batch.condition
        if condition is not None:
            condition = {name: tensor.pin_memory() for name, tensor in condition.items()}
        preserved = batch.preserved
        if preserved is not None:
            preserved = {name: tensor.pin_memory() for name, tensor in preserved.items()}
        drawn = NoiseDraw(*(tensor.pin_memory() for tensor in batch.drawn))
        weight = None if batch.weight is None else batch.weight.pin_memory()
        latents = batch.latents.pin_memory()
        return replace(
            batch,
            latents=latents,
            drawn=drawn,
            condition=condition,
            weight=weight,
            preserved=preserved,
        )

    def _read(self, step: int) -> list[_Read]:
        draws = self._data.plan.draws(step)
        parts = [positions_of(micro, self._spec.train_batch_size) for micro in self._micros]
        return [self._micro_batch(step, draws, positions) for positions in parts]

    def _micro_batch(self, step: int, draws: tuple[Draw, ...], positions: range) -> _Read:
        each = [self._data.latents_of(draws[position]) for position in positions]
        latents = torch.stack(each)
        weights = [
            self._data.weight_of(draws[position], own)
            for position, own in zip(positions, each, strict=True)
        ]
        given = [weight for weight in weights if weight is not None]
        drawn = self._objective.draw(latents, sample_generators(self._spec.seed, step, positions))
        # The entire micro-batch has these shares, and the first sample decides for it.
        shares = self._data.frame_shares(draws[positions[0]])
        frames = frames_given(self._spec.seed, step, positions[0], shares)
        texts = [self._text(step, position, draws[position], frames) for position in positions]
        pictures = [self._data.shown_of(draws[position]) for position in positions]
        references = collate(
            [
                noised(
                    self._data.references_of(draws[place], frames),
                    self._family.CONDITION_LEVEL,
                    keyed_generator(self._spec.seed, step, place, CONDITION),
                )
                for place in positions
            ]
        )
        references |= collate(
            [
                self._data.sound_of(
                    draws[place].sample, keyed_generator(self._spec.seed, step, place, SOUND)
                )
                for place in positions
            ]
        )
        if frames and not takes_keyframes(self._spec):
            references |= first_frame_of(latents)
        own = [draws[position] for position in positions]
        preserved = [self._data.preserved_of(draw, frames) for draw in own]
        preserved_texts = [text for text in preserved if text is not None]
        condition = preserved_condition = None
        if self._data.texts.ahead:
            condition = self._encoded(texts, pictures) | references
            if preserved_texts:
                preserved_condition = self._encoded(preserved_texts, pictures) | references
        return _Read(
            own,
            positions,
            latents,
            drawn,
            texts,
            pictures,
            references,
            condition,
            torch.stack(given) if given else None,
            self._data.is_to_base(own[0]),  # then the entire batch is
            self._asks_base(draws, positions),
            preserved_texts,
            preserved_condition,
        )

    def _asks_base(self, draws: tuple[Draw, ...], positions: range) -> bool:
        """Return whether this rank computes the base's prediction for a micro-batch.

        Sharded weights are gathered by all ranks together, so each of them does if one needs it;
        all know the whole step's plan.
        """
        if not self._world.shards:
            return self._data.is_to_base(draws[positions[0]])
        together = self._world.data_size * len(positions)
        begin = positions[0] // together * together
        return any(map(self._data.is_to_base, draws[begin : begin + together : len(positions)]))

    def _text(self, step: int, position: int, draw: Draw, frames: int) -> Text:
        """Return the sample's caption, or the empty one if this draw drops it."""
        probability = self._spec.caption_dropout_probability
        dropped = drops_caption(self._spec.seed, step, position, probability)
        text_of = self._data.dropped_of if dropped else self._data.caption_of
        return text_of(draw, frames)

    def _encoded(self, texts: list[Text], pictures: list[Shown]) -> dict[str, torch.Tensor]:
        if isinstance(self._data.texts, TrainedTexts):
            encoded = self._data.texts.together(texts)
        else:
            each = [self._data.texts.encoded(text) for text in texts]
            encoded = collate(each, multiple=self._world.context_size)
        condition = self._family.arrange(encoded)
        return condition | self._family.sizes(self._spec, pictures)

    def _to_device(self, batch: _Read) -> MicroBatch:
        device = self._world.device
        condition = batch.condition
        if condition is None:  # the encoders share the device with training
            condition = self._encoded(batch.texts, batch.pictures) | batch.references
        preserved = batch.preserved
        if preserved is None and batch.preserved_texts:
            preserved = self._encoded(batch.preserved_texts, batch.pictures) | batch.references

        def moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

        return MicroBatch(
            batch.positions,
            batch.latents.to(device, non_blocking=True),
            NoiseDraw(*(tensor.to(device, non_blocking=True) for tensor in batch.drawn)),
            moved(condition),
            None if batch.weight is None else batch.weight.to(device, non_blocking=True),
            batch.to_base,
            batch.asks_base,
            None if preserved is None else moved(preserved),
        )


def _micro_batches(spec: JobSpec, world: World) -> list[int]:
    """Return which of a step's micro-batches this rank computes; a collective."""
    forwards = accumulation_steps(spec)
    counts = [forwards] * world.data_size
    if isinstance(spec.batch_shares, dict):  # not sharded, so each rank has samples of its own
        shares = world.gather(share_on_card(spec, world.gpu()[1]))
        counts = forwards_of_ranks(shares, forwards * world.data_size)
    return micro_batches_of(counts, world.data_rank)
