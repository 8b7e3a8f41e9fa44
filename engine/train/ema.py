"""A moving average of what is trained, sharded like it.

Only the trained tensors are averaged, each rank its own part, so that under FSDP the average
costs one more shard and no communication.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.model.files.weights import local_part
from engine.train.skipping import follow_unless

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]  # an average and its parameter, this rank's parts


_BUCKET: Final = 16 << 20  # elements; bounds the extra memory of an update


class Ema:
    """The average of a set of parameters.

    An average in host memory follows parameters on a GPU behind the training's back: whoever is
    about to change them calls `catch_up` first.

    Args:
        parameters: Name → trained parameter, plain or `DTensor`.
        decay: Share of the old average that each step keeps.
        on_cpu: Keep plain tensors in host memory; `DTensor`s stay where they are.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], decay: float, *, on_cpu: bool = False
    ) -> None:
        self._parameters = dict(parameters)
        self._decay = decay
        self._shadow: dict[str, torch.Tensor] = {
            name: parameter.detach().to("cpu", copy=True) if on_cpu else parameter.detach().clone()
            for name, parameter in self._parameters.items()
        }
        self._follower: Follower | None = None

    @property
    def shadow(self) -> dict[str, torch.Tensor]:
        """Return name → average, of the parameter's type, so that checkpoints save both alike."""
        self.catch_up()
        return self._shadow

    def decay_at(self, step: int) -> float:
        """Return the decay of optimizer step `step`, counted from 1.

        Early averages would remember the start for long, so the decay warms up as
        (1 + step) / (10 + step), as in TensorFlow's `ExponentialMovingAverage`.
        """
        return min(self._decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int, spoilt: torch.Tensor | None = None) -> None:
        """Move the average towards the parameters after optimizer step `step`, counted from 1.

        Args:
            step: The step.
            spoilt: A scalar on the device that computes; where it is 1 nothing changes.
        """
        self.catch_up()
        weight = 1 - self.decay_at(step)
        pairs = list(self._pairs())
        beside = [pair for pair in pairs if pair[0].device == pair[1].device]
        apart = [pair for pair in pairs if pair[0].device != pair[1].device]
        follow(beside, weight, spoilt)
        if apart:
            if self._follower is None:
                self._follower = Follower(apart[0][1].device)
            self._follower.begin(apart, weight, spoilt)

    def catch_up(self) -> None:
        """Wait until the average has seen the parameters as they are, which may change then."""
        if self._follower is not None:
            self._follower.finish()

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the present parameters."""
        for average, current in self._pairs():
            average.copy_(current)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run with the averaged weights in the model.

        Values are exchanged in place: only one tensor is allocated at a time, and the optimizer and
        FSDP keep their references to the parameters.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, current in self._pairs():
            before = current.clone()
            current.copy_(average)
            average.copy_(before)

    def _pairs(self) -> Iterator[Pair]:
        for name, average in self.shadow.items():
            yield local_part(average), local_part(self._parameters[name].detach())


def follow(pairs: Sequence[Pair], weight: float, spoilt: torch.Tensor | None) -> None:
    """Move averages by `weight` towards tensors on the same device; many in one kernel.

    Args:
        pairs: Averages and what they follow.
        weight: 0 … 1.
        spoilt: A scalar there; where it is 1 nothing changes.
    """
    averages, currents = zip(*pairs, strict=True) if pairs else ((), ())
    follow_unless(averages, currents, weight, spoilt)


class Follower:
    """Averages in host memory that follow tensors on a GPU, in a separate thread and stream.

    Tensors come over piece by piece through two pinned buffers: while one is filled, the average
    moves towards what is in the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="average")
        self._buffers: list[torch.Tensor] = []
        self._job: Future[None] | None = None

    def begin(self, pairs: list[Pair], weight: float, spoilt: torch.Tensor | None) -> None:
        """Follow the tensors' values once the device has finished its queued work."""
        self.finish()
        if not self._buffers:
            most = min(_BUCKET, sum(average.numel() for average, _ in pairs))
            self._buffers = [torch.empty(most, pin_memory=self._cuda) for _ in range(2)]
        ready = self._mark()
        self._job = self._thread.submit(self._run, pairs, weight, spoilt, ready)

    def finish(self) -> None:
        """Wait for that."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @torch.no_grad()
    def _run(
        self, pairs: list[Pair], weight: float, spoilt: torch.Tensor | None, ready: Any
    ) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                self._stream.wait_event(ready)
            if spoilt is not None and bool(spoilt.cpu()):  # this thread alone waits
                return
            before: tuple[Any, list[Pair]] | None = None
            for number, bucket in enumerate(_buckets(_pieces(pairs))):
                copied = self._copy(bucket, self._buffers[number % 2])
                self._move(before, weight)
                before = self._mark(), copied
            self._move(before, weight)

    def _copy(self, bucket: list[Pair], buffer: torch.Tensor) -> list[Pair]:
        """Averages, and copies in the buffer that will be complete."""
        sizes = [average.numel() for average, _ in bucket]
        parts = buffer[: sum(sizes)].split(sizes)
        for part, (_, current) in zip(parts, bucket, strict=True):
            part.copy_(current, non_blocking=True)
        return [(average, part) for part, (average, _) in zip(parts, bucket, strict=True)]

    def _move(self, copied: tuple[Any, list[Pair]] | None, weight: float) -> None:
        if copied is not None:
            if copied[0] is not None:
                copied[0].synchronize()
            follow(copied[1], weight, None)

    def _mark(self) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _pieces(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Flat pairs of at most a bucket."""
    for average, current in pairs:
        yield from zip(
            average.view(-1).split(_BUCKET), current.reshape(-1).split(_BUCKET), strict=True
        )


def _buckets(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield runs of pairs of about a bucket's size, none empty."""
    bucket: list[Pair] = []
    size = 0
    for pair in pairs:
        if bucket and size + pair[0].numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(pair)
        size += pair[0].numel()
    if bucket:
        yield bucket


# -- schedule free --------------------------------------------------------------------------
# Schedule-free AdamW: the weights that it trains, and their average.
#
# The model has the weights at which gradients are taken. Their average, which is what has
# been learned, follows from them and from the optimizer's `z` (Defazio et al. 2024). Its
# authors' `eval` and `train` (schedulefree 1.4) turn one into the other in place and round
# each time. Here the trained weights come back from a copy, so that training does not depend
# on how often a job samples, validates or saves.


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps an average of the weights in this way."""
    return "train_mode" in optimizer.defaults


@contextmanager
def averaged_in_place(optimizer: Any) -> Iterator[None]:
    """Run with the average in the model.

    The copy takes as much memory as the gradients, which do not exist at that time.
    """
    (group,) = optimizer.param_groups
    parameters = [local_part(parameter.detach()) for parameter in group["params"]]
    trained = [parameter.clone() for parameter in parameters]
    try:
        optimizer.eval()
        yield
    finally:
        torch._foreach_copy_(parameters, trained)
        group["train_mode"] = True


@torch.no_grad()
def averages_of(
    optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return a copy of the average, sharded like the parameters.

    Args:
        optimizer: One that `is_schedule_free`.
        parameters: Name → parameter, all of them the optimizer's.

    Returns:
        Name → average, bit for bit what `averaged_in_place` puts into the model.
    """
    (group,) = optimizer.param_groups
    weight = 1 - 1 / group["betas"][0]
    averages = {}
    for name, parameter in parameters.items():
        z = optimizer.state.get(parameter, {}).get("z")
        value = parameter.detach()
        averages[name] = value.clone() if z is None else torch.lerp(value, z, weight)
    return averages


def set_betas(optimizer: Any, betas: tuple[float, float]) -> None:
    """Take other betas and keep the average: its weights at the new ones are other weights."""
    (group,) = optimizer.param_groups
    if tuple(group["betas"]) == tuple(betas):
        return
    optimizer.eval()
    group["betas"] = betas
    optimizer.train()
