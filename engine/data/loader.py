"""Read a step's tensors from the caches, one step ahead of the training."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.data.plan import BatchPlan, positions_of_rank
from engine.draws import drops_caption

if TYPE_CHECKING:
    from engine.data.prepare import Prepared
    from engine.world import World
    from jobs.spec import JobSpec


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward, on its device.

    Attributes:
        positions: Places of its samples in the global batch; draws are keyed by them.
        latents: `(B, C, h, w)`, normalised, fp32.
        condition: Encoded captions, each `(B, …)`.
    """

    positions: range
    latents: torch.Tensor
    condition: dict[str, torch.Tensor]


class Loader:
    """This rank's micro-batches, step by step."""

    def __init__(self, spec: JobSpec, plan: BatchPlan, data: Prepared, world: World) -> None:
        self._spec = spec
        self._plan = plan
        self._data = data
        self._world = world
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._next: tuple[int, Future[list[MicroBatch]]] | None = None

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, counted from 0; the next step is fetched meanwhile."""
        if self._next is not None and self._next[0] == step:
            batches = self._next[1].result()
        else:
            batches = self._read(step)
        if step + 1 < self._spec.max_train_steps:
            self._next = (step + 1, self._thread.submit(self._read, step + 1))
        return [self._to_device(batch) for batch in batches]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[MicroBatch]:
        samples = self._plan.samples(step)
        return [
            self._micro_batch(
                step,
                samples,
                positions_of_rank(
                    self._world.data_rank,
                    self._world.data_size,
                    micro,
                    self._spec.train_batch_size,
                ),
            )
            for micro in range(self._spec.gradient_accumulation_steps)
        ]

    def _micro_batch(self, step: int, samples: tuple[int, ...], positions: range) -> MicroBatch:
        chosen = [samples[position] for position in positions]
        latents = [self._data.latents.read(self._data.latent_keys[i])["latents"] for i in chosen]
        texts = [
            self._data.text.read(self._text_key(step, position, sample))
            for position, sample in zip(positions, chosen, strict=True)
        ]
        condition = {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
        return MicroBatch(positions, torch.stack(latents), condition)

    def _text_key(self, step: int, position: int, sample: int) -> str:
        """The caption's key, or that of the empty caption when this draw drops it."""
        dropped = drops_caption(
            self._spec.seed, step, position, self._spec.caption_dropout_probability
        )
        return self._data.empty_key if dropped else self._data.text_keys[sample]

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        device = self._world.device
        return MicroBatch(
            batch.positions,
            batch.latents.to(device, non_blocking=True),
            {name: t.to(device, non_blocking=True) for name, t in batch.condition.items()},
        )
