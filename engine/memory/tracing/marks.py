"""Marks where the forward and backward of each FSDP unit begin and end.

At the same places as FSDP2's own hooks: in backward a unit begins when the gradient of one of its
outputs is there, and ends when those of its inputs are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.memory.tracing.timeline import Kind, Recorder


def watch(
    model: torch.nn.Module, units: Sequence[str], recorder: Recorder, release: Callable[[], None]
) -> None:
    """Mark units, and count gradients of parameters as such.

    Args:
        model: The model.
        units: Names of its units.
        recorder: What writes marks down.
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
    """Says when the gradients of a unit's inputs are there."""

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
