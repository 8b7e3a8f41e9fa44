"""Runs a block by itself, forward and backward, and writes down what it did to memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from engine.memory.tracing.live import rounded, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.memory.tracing.timeline import Entry, Recorder


Asked = tuple[bool, ...]


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies.

    Attributes:
        storage: Number of a new storage, or of an input that it is a view of.
        of_input: Which of both.
        shape: Its shape.
        stride: Its strides.
        offset: Its offset, in elements.
        dtype: Its precision.
        differentiable: Whether it has a gradient.
    """

    storage: int
    of_input: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    differentiable: bool


@dataclass
class Record:
    """What a block does to memory.

    Attributes:
        name: The block that was traced.
        forward: Its forward.
        backward: Its backward; empty if it has none.
        result: What it returns: a tree of slots.
        outputs: Its tensors.
        sizes: Bytes of each new storage among them.
        kept: Bytes that it keeps for backward besides inputs and outputs.
        cached: Bytes that stay until the whole model's forward ends: what autocast keeps.
        evicted: Bytes of what autocast kept for the model around it until it was traced.
        saved_inputs: Which inputs it keeps for backward.
        saved_outputs: Which new storages of outputs it keeps.
        gradients: Bytes of gradients of its parameters.
        input_gradients: Gradients of its inputs; None for those without.
        gradient_sizes: Bytes of each storage among them.
        asked: Which of its output tensors have a gradient.
        unused: Trained parameters that get none.
    """

    name: str
    result: TreeSpec
    forward: list[Entry] = field(default_factory=list)
    backward: list[Entry] = field(default_factory=list)
    outputs: list[Slot | Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kept: int = 0
    cached: int = 0
    evicted: int = 0
    saved_inputs: list[int] = field(default_factory=list)
    saved_outputs: list[int] = field(default_factory=list)
    gradients: int = 0
    input_gradients: list[Slot | None] = field(default_factory=list)
    gradient_sizes: list[int] = field(default_factory=list)
    asked: Asked = ()
    unused: tuple[str, ...] = ()


def record_block(
    recorder: Recorder,
    name: str,
    module: torch.nn.Module,
    call: Callable[..., Any],
    leaves: list[Any],
    tree: TreeSpec,
    asked: Asked | None,
) -> Record:
    """Run a block by itself.

    Args:
        recorder: Whose clock it runs by.
        name: The block's name.
        module: The block.
        call: Calls it.
        leaves: What it is called with.
        tree: Arguments that these are the leaves of.
        asked: Which of its output tensors have a gradient; None for all that can.
    """
    live = recorder.live
    recorder.flush()
    numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    watch = _Watch(recorder, len(numbers))
    inputs = _stand_ins([leaves[number] for number in numbers], watch)
    before = live.alive()
    given = dict(enumerate(leaves)) | dict(zip(numbers, inputs, strict=True))
    args, kwargs = tree_unflatten([given[n] for n in range(len(leaves))], tree)
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(storage_of(tensor))
        return tensor

    with recorder.apart() as entries:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call(*args, **kwargs)
        recorder.flush()
    del args, kwargs
    given.clear()
    returned, shape = tree_flatten(result)
    del result
    record = Record(name, shape, forward=entries)
    places = {storage_of(tensor): n for n, tensor in reversed(list(enumerate(inputs)))}
    fresh = _write_outputs(record, returned, places)
    inputs.clear()
    everything = {key: live.size(key) for key in live.alive()}
    torch.clear_autocast_cache()
    left = live.alive()
    sizes = {key: size for key, size in everything.items() if key not in before}
    record.cached = sum(size for key, size in sizes.items() if key not in left)
    record.evicted = sum(everything[key] for key in (everything.keys() & before) - left)
    record.kept = sum(sizes[key] for key in sizes.keys() & left - fresh.keys())
    record.saved_inputs = sorted(places[key] for key in places.keys() & left)
    record.saved_outputs = sorted(fresh[key] for key in fresh.keys() & saved)
    outputs = [leaf for leaf in returned if isinstance(leaf, torch.Tensor)]
    record.asked = asked or tuple(leaf.requires_grad for leaf in outputs)
    ends = [
        output for output, has_gradient in zip(outputs, record.asked, strict=True) if has_gradient
    ]
    returned.clear()
    outputs.clear()
    if ends and torch.is_grad_enabled():
        _record_backward(record, watch, ends)
        record.unused = tuple(
            name for name, p in module.named_parameters() if p.requires_grad and p.grad is None
        )
        module.zero_grad(set_to_none=True)
    live.drop(live.alive() - before)
    live.reset()  # of all this, nothing has happened to the model
    return record


def _record_backward(record: Record, watch: _Watch, ends: list[torch.Tensor]) -> None:
    """Run the backward of outputs, which are taken away."""
    seed = _Seed.apply(watch, *ends)
    ends.clear()
    with watch.recorder.apart() as entries, _outside_of_autocast():
        watch.begin = entries
        seed.backward()
        watch.finish()
    record.backward, record.gradients = watch.entries, watch.gradients
    record.input_gradients, record.gradient_sizes = watch.slots, watch.sizes


@contextmanager
def _outside_of_autocast() -> Iterator[None]:
    """Autocast ends with forward. What is recomputed enters its own, and with the outermost one
    ends what it kept: so none may be around.
    """
    enabled, depth = torch.is_autocast_enabled("cpu"), torch.autocast_increment_nesting()
    torch.set_autocast_enabled("cpu", False)
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()
        torch.set_autocast_enabled("cpu", enabled)


def _stand_ins(tensors: list[torch.Tensor], watch: _Watch) -> list[torch.Tensor]:
    """Tensors like these, with storages that nobody else holds, and that are not counted."""
    live = watch.recorder.live
    storages: dict[int, torch.Tensor] = {}
    made = []
    with live.silent():
        for tensor in tensors:
            key = storage_of(tensor)
            if key not in storages:
                size = tensor.untyped_storage().nbytes()
                storages[key] = torch.empty(size, dtype=torch.uint8)
                live.drop({storage_of(storages[key])})
                live.ignore(storages[key])
            made.append(view(storages[key], _slot(tensor, 0, of_input=False)))
        trained = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        if trained and torch.is_grad_enabled():
            anchor = torch.empty(0, requires_grad=True)
            passed = _Sink.apply(watch, trained, anchor, *(made[number] for number in trained))
            for number, stand_in in zip(trained, passed, strict=True):
                made[number] = stand_in
    return made


def _write_outputs(record: Record, returned: list[Any], places: dict[int, int]) -> dict[int, int]:
    """Write down where the outputs lie; the new storages among them and their numbers."""
    fresh: dict[int, int] = {}
    for tensor in returned:
        if not isinstance(tensor, torch.Tensor):
            record.outputs.append(tensor)
            continue
        key = storage_of(tensor)
        of_input = key in places
        if not of_input and key not in fresh:
            fresh[key] = len(record.sizes)
            record.sizes.append(rounded(tensor.untyped_storage().nbytes()))
        record.outputs.append(_slot(tensor, places[key] if of_input else fresh[key], of_input))
    return fresh


class _Watch:
    """What is seen of a block's backward."""

    def __init__(self, recorder: Recorder, inputs: int) -> None:
        self.recorder = recorder
        self.begin: list[Entry] = []
        self.entries: list[Entry] = []
        self.slots: list[Slot | None] = [None] * inputs
        self.sizes: list[int] = []
        self.gradients = 0
        self._start = 0
        self._done = False

    def start(self) -> None:
        self.begin.clear()
        self.recorder.begin()
        self._start = self.recorder.live.gradients

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self.recorder.flush()
            self.entries = list(self.begin)
            self.gradients = self.recorder.live.gradients - self._start

    def sink(self, numbers: list[int], gradients: Sequence[torch.Tensor | None]) -> None:
        self.finish()
        fresh: dict[int, int] = {}
        for number, gradient in zip(numbers, gradients, strict=True):
            if gradient is None:
                continue
            key = storage_of(gradient)
            if key not in fresh:
                fresh[key] = len(self.sizes)
                self.sizes.append(rounded(gradient.untyped_storage().nbytes()))
            self.slots[number] = _slot(gradient, fresh[key], of_input=False)


class _Seed(torch.autograd.Function):
    """Where a block's backward begins: makes the gradients of its outputs."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.watch = watch
        ctx.like = [(tuple(o.shape), o.dtype) for o in outputs]
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradients = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        ctx.watch.start()
        return None, *gradients


class _Sink(torch.autograd.Function):
    """Where it ends: sees the gradients of its inputs."""

    @staticmethod
    def forward(
        ctx: Any, watch: _Watch, numbers: list[int], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.watch, ctx.numbers = watch, numbers
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.watch.sink(ctx.numbers, gradients)
        return None, None, None, *[None] * len(gradients)


def _slot(tensor: torch.Tensor, storage: int, of_input: bool) -> Slot:
    return Slot(
        storage,
        of_input,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.requires_grad,
    )


def view(storage: torch.Tensor, slot: Slot) -> torch.Tensor:
    if slot.of_input:
        return storage.as_strided(slot.shape, slot.stride, slot.offset)
    return storage.view(slot.dtype).as_strided(slot.shape, slot.stride, slot.offset)
