"""Record memory use over time: spans between marks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from engine.memory.tracing.work import NOTHING, Work, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.memory.tracing.live import Live


Kind = Literal["begin", "end", "enter", "leave", "backward", "done"]


@dataclass(frozen=True)
class Mark:
    """A moment in a timeline.

    Attributes:
        kind: `begin` or `end` of a phase; for a unit, `enter` and `leave` of its forward,
            `backward` and `done` of its backward.
        name: Name of the phase or the unit; "" for the root.
    """

    kind: Kind
    name: str


@dataclass(frozen=True)
class Span:
    """The interval between two marks, in bytes.

    Attributes:
        most: Peak of activations plus gradients.
        most_activations: Peak of activations.
        activations: Activations at its end.
        gradients: Gradients of parameters at its end; none is ever freed.
        work: What the GPU has to do in it.
    """

    most: int
    most_activations: int
    activations: int
    gradients: int
    work: Work = NOTHING


Entry = Mark | Span


class Recorder:
    """Records a timeline.

    Args:
        live: Counts the bytes.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.entries: list[Entry] = []
        self._base = (0, 0)

    def begin(self) -> None:
        """Count relative to the memory that is alive now."""
        self._base = (self.live.activations, self.live.gradients)
        self.live.reset()
        self._take_work()

    def flush(self) -> None:
        """End the current span."""
        live, (activations, gradients) = self.live, self._base
        live.simulate(0)
        self.entries.append(
            Span(
                live.most - activations - gradients,
                live.most_activations - activations,
                live.activations - activations,
                live.gradients - gradients,
                self._take_work(),
            )
        )
        live.reset()

    def mark(self, kind: Kind, name: str) -> None:
        """End the current span with a mark."""
        self.flush()
        self.entries.append(Mark(kind, name))

    def replay(self, entries: Sequence[Entry], rename: Callable[[str], str]) -> None:
        """Replay entries recorded elsewhere, without their lasting effects."""
        self.flush()
        above = self.live.activations - self._base[0], self.live.gradients - self._base[1]
        for entry in entries:
            if isinstance(entry, Mark):
                self.entries.append(Mark(entry.kind, rename(entry.name)))
            else:
                self.entries.append(
                    Span(
                        entry.most + sum(above),
                        entry.most_activations + above[0],
                        entry.activations + above[0],
                        entry.gradients + above[1],
                        entry.work,
                    )
                )

    @contextmanager
    def apart(self) -> Iterator[list[Entry]]:
        """Record a separate timeline, relative to the memory alive at its start."""
        outer, base = self.entries, self._base
        inner: list[Entry] = []
        self.entries = inner
        self.begin()
        try:
            yield inner
        finally:
            self.entries, self._base = outer, base
            self.live.reset()
            self._take_work()

    def _take_work(self) -> Work:
        return NOTHING if self.live.work is None else self.live.work.take()


def work_of(entries: Sequence[Entry], phase: str) -> Work:
    """Return what the GPU has to do in a phase."""
    works: list[Work] = []
    inside = False
    for entry in entries:
        if isinstance(entry, Span):
            works += [entry.work] if inside else []
        elif entry.kind in ("begin", "end") and entry.name == phase:
            inside = entry.kind == "begin"
    return total(works)


# -- marks ----------------------------------------------------------------------------------
# Mark where the forward and backward of each FSDP unit begin and end.
#
# The marks are at the same places as FSDP2's own hooks: a unit's backward begins when the gradient
# of one of its outputs is available, and ends when those of its inputs are.


def watch(
    model: torch.nn.Module, units: Sequence[str], recorder: Recorder, release: Callable[[], None]
) -> None:
    """Register hooks that mark units, and that count gradients of parameters as such.

    Args:
        model: The model.
        units: Names of its units.
        recorder: Records the marks.
        release: Called when the model's forward has ended.
    """
    for name in units:
        module = model.get_submodule(name)
        marks = _Marks(name, recorder, None if name else release)
        module.register_forward_pre_hook(marks.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(marks.leave)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p: recorder.live.attach(p.grad) if p.grad is not None else None
            )


class _Marks:
    def __init__(self, name: str, recorder: Recorder, release: Callable[[], None] | None) -> None:
        self._name = name
        self._recorder = recorder
        self._release = release

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not _in_backward():  # a recomputation finds its weights gathered
            self._mark("enter")
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, tree = tree_flatten((args, kwargs))
        numbers = [
            number
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if numbers:
            passed = _AfterBackward.apply(self._done, *(leaves[number] for number in numbers))
            for number, leaf in zip(numbers, passed, strict=True):
                leaves[number] = leaf
        return tree_unflatten(leaves, tree)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if _in_backward():
            return
        if self._release is not None:
            self._release()
        self._mark("leave")
        begun: list[bool] = []

        def begin(gradient: torch.Tensor) -> None:
            if not begun:
                begun.append(True)
                self._mark("backward")

        for leaf in tree_iter(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(begin)

    def _done(self) -> None:
        self._mark("done")

    def _mark(self, kind: Kind) -> None:
        self._recorder.mark(kind, self._name)


class _AfterBackward(torch.autograd.Function):
    """Calls a function once the gradients of a unit's inputs are available."""

    @staticmethod
    def forward(ctx: Any, say: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.say = say
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.say()
        return None, *gradients


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
