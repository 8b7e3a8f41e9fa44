"""Runs a block once, forward and backward, and then repeats what it did to memory.

Blocks of one kind do the same to memory, whatever their weights: of the dozens that a model has,
one of each kind is traced, by itself; all of them, that one too, are then played in the model's own
forward and backward, where an echo allocates what the block left behind, and frees it when the
block would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from engine.memory.tracing.record import Record, Slot, record_block, view

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from engine.memory.tracing.record import Asked
    from engine.memory.tracing.timeline import Recorder


class Echo:
    """Plays blocks.

    Args:
        recorder: Where to.
        asked: Block → which of its tensors have a gradient in backward, where not all have: what
            the last block makes of the text may be of no use to anybody.

    Attributes:
        differs: What `asked` should have said of other blocks.
        unused: Parameters that got no gradient.
    """

    def __init__(self, recorder: Recorder, asked: Mapping[str, Asked] | None = None) -> None:
        self.recorder = recorder
        self.held: list[torch.Tensor] = []
        self.differs: dict[str, Asked] = {}
        self.unused: set[str] = set()
        self._asked = dict(asked or {})
        self._records: dict[Hashable, Record] = {}
        self._kinds: dict[torch.nn.Module, Hashable] = {}
        self._recording = False
        self._anchor = torch.empty(0, requires_grad=True)

    def play(
        self,
        module: torch.nn.Module,
        name: str,
        call: Callable[..., Any],
        how: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what a block's call would return.

        Args:
            module: The block.
            name: Its name in the model.
            call: Calls it.
            how: Tells ways to call it apart.
            args: Of the call.
            kwargs: Of the call.
        """
        if self._recording:
            return call(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        asked = self._asked.get(name)
        facts = (how, asked, self._kind(module), _circumstances(module), tree)
        key = (*facts, *map(_meta, leaves))
        record = self._records.get(key)
        if record is None:
            self._recording = True
            try:
                record = record_block(self.recorder, name, module, call, leaves, tree, asked)
                self._records[key] = record
                self._hold(record.evicted)
            finally:
                self._recording = False
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and record.backward:
            outputs = _Played.apply(self, record, name, self._anchor, *tensors)
        else:
            outputs = self.forward(record, name, tensors)[0]
        tensors_out = iter(outputs)
        filled = [next(tensors_out) if isinstance(s, Slot) else s for s in record.outputs]
        return tree_unflatten(filled, record.result)

    def release(self) -> None:
        """Free what blocks keep until the model's forward ends."""
        self.held.clear()

    def forward(
        self, record: Record, name: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Replay the forward; return its outputs, and the tensors kept for backward."""
        self.recorder.replay(record.forward, _renamed(record.name, name))
        with self.recorder.live.silent():
            storages = [torch.empty(size, dtype=torch.uint8) for size in record.sizes]
            outputs = [
                view(tensors[slot.storage] if slot.of_input else storages[slot.storage], slot)
                for slot in record.outputs
                if isinstance(slot, Slot)
            ]
            kept = [torch.empty(record.kept, dtype=torch.uint8)] if record.kept else []
            self._hold(record.cached)
        kept += [tensors[number] for number in record.saved_inputs]
        kept += [storages[number] for number in record.saved_outputs]
        return outputs, kept

    def backward(self, record: Record, name: str, asked: Asked) -> list[torch.Tensor | None]:
        """Replay the backward, if outputs have gradients; return the gradients of its tensors."""
        if asked != record.asked:
            self.differs[name] = asked
        self.unused |= {f"{name}.{parameter}" for parameter in record.unused}
        self.recorder.replay(record.backward, _renamed(record.name, name))
        live = self.recorder.live
        with live.silent():
            live.gradients += record.gradients
            storages = [torch.empty(size, dtype=torch.uint8) for size in record.gradient_sizes]
            return [
                None if slot is None else view(storages[slot.storage], slot)
                for slot in record.input_gradients
            ]

    def _hold(self, size: int) -> None:
        """Keep that number of bytes alive until the model's forward ends."""
        if size:
            self.held.append(torch.empty(size, dtype=torch.uint8))

    def _kind(self, module: torch.nn.Module) -> Hashable:
        if module not in self._kinds:
            plain = (int, float, str)
            own = ((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, plain))
            self._kinds[module] = (
                type(module),
                tuple(own),
                tuple(
                    (name, tuple(p.shape), p.dtype, p.requires_grad)
                    for name, p in module.named_parameters()
                ),
            )
        return self._kinds[module]


class _Played(torch.autograd.Function):
    """An echo in the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        echo: Echo,
        record: Record,
        name: str,
        anchor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        outputs, kept = echo.forward(record, name, tensors)
        ctx.save_for_backward(*kept)
        slots = [slot for slot in record.outputs if isinstance(slot, Slot)]
        ctx.mark_non_differentiable(
            *(t for t, slot in zip(outputs, slots, strict=True) if not slot.differentiable)
        )
        ctx.set_materialize_grads(False)
        ctx.played = echo, record, name
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        echo, record, name = ctx.played
        return (
            None,
            None,
            None,
            None,
            *echo.backward(record, name, tuple(g is not None for g in gradients)),
        )


def _meta(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.requires_grad
    return repr(leaf)


def _circumstances(module: torch.nn.Module) -> Hashable:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), module.training


def _renamed(recorded: str, name: str) -> Callable[[str], str]:
    return lambda unit: name + unit.removeprefix(recorded)
