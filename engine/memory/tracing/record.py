"""Run a block in isolation, forward and backward, and record its memory use."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from engine.memory.tracing.live import rounded, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from engine.memory.tracing.timeline import Entry, Recorder


Asked = tuple[bool, ...]


@dataclass(frozen=True)
class Slot:
    """Location of a tensor in a storage.

    Attributes:
        storage: Number of a new storage, or of the input that the tensor is a view of.
        of_input: Whether it is a view of an input.
        shape: Its shape.
        stride: Its strides.
        offset: Its offset, in elements.
        dtype: Its dtype.
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
    """The memory use of a block.

    Attributes:
        name: The block that was traced.
        forward: Timeline of its forward.
        backward: Timeline of its backward; empty if it has none.
        result: Structure of its return value: a tree of slots.
        outputs: The tensors in it.
        sizes: Bytes of each new storage among them.
        kept: Bytes that it keeps for backward in addition to inputs and outputs.
        cached: Bytes that live until the full model's forward ends: autocast's cache.
        evicted: Bytes that autocast had cached for the surrounding model before this block was
            traced.
        saved_inputs: Numbers of the inputs that it keeps for backward.
        saved_outputs: Numbers of the new output storages that it keeps.
        gradients: Bytes of its parameters' gradients.
        input_gradients: Gradients of its inputs; None for inputs without.
        gradient_sizes: Bytes of each storage among them.
        asked: Per output tensor, whether backward passes a gradient to it.
        unused: Trained parameters that get no gradient.
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
    """Run a block in isolation and record its memory use.

    Args:
        recorder: Records the timeline.
        name: The block's name.
        module: The block.
        call: Calls the block.
        leaves: Flattened arguments.
        tree: Structure of the arguments.
        asked: Per output tensor, whether it has a gradient in backward; None for all that can.
    """
    live = recorder.live
    recorder.flush()
    numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    watch = _Observer(recorder, len(numbers))
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
    live.reset()  # none of this has happened to the model
    return record


def _record_backward(record: Record, watch: _Observer, ends: list[torch.Tensor]) -> None:
    """Run the backward of outputs, and remove them from the list."""
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
    """Leave autocast for the backward, as in training, where autocast ends with forward.

    A recomputation enters its own autocast, and leaving the outermost one clears the cache.
    Therefore no outer autocast may be active.
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


def _stand_ins(tensors: list[torch.Tensor], watch: _Observer) -> list[torch.Tensor]:
    """Return copies of tensors with storages that nothing else holds and that are not counted."""
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
    """Record the locations of the outputs, and return their new storages with numbers."""
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


class _Observer:
    """Observes a block's backward."""

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
    """Start of a block's backward: creates the gradients of its outputs."""

    @staticmethod
    def forward(ctx: Any, watch: _Observer, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.watch = watch
        ctx.like = [(tuple(o.shape), o.dtype) for o in outputs]
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradients = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        ctx.watch.start()
        return None, *gradients


class _Sink(torch.autograd.Function):
    """End of a block's backward: receives the gradients of its inputs."""

    @staticmethod
    def forward(
        ctx: Any, watch: _Observer, numbers: list[int], anchor: torch.Tensor, *inputs: torch.Tensor
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


# -- echo -----------------------------------------------------------------------------------
# Run a block once, forward and backward, and then replay its memory use.
#
# Blocks of one kind use memory in the same way, independent of their weights. Of a model's dozens
# of blocks, one of each kind is traced in isolation. All of them, including that one, are then
# replayed in the model's own forward and backward: an echo allocates the tensors that the block
# would leave behind, and frees them when the block would.


class Echo:
    """Replays blocks.

    Args:
        recorder: Records the timeline.
        asked: For blocks whose outputs do not all have a gradient in backward: per output tensor,
            whether it has one. For example, nothing uses the text output of the last block.

    Attributes:
        differs: Entries that `asked` lacks.
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
            call: Calls the block.
            how: Distinguishes ways to call it.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        if self._recording:
            return call(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        asked = self._asked.get(name)
        facts = (how, asked, self._kind(module), _context(module), tree)
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
        """Free the tensors that blocks keep until the model's forward ends."""
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
        """Keep this number of bytes alive until the model's forward ends."""
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
    """A replayed block in the autograd graph."""

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


def _context(module: torch.nn.Module) -> Hashable:
    adapted = not any(getattr(layer, "disable_adapters", False) for layer in module.modules())
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), module.training, adapted


def _renamed(recorded: str, name: str) -> Callable[[str], str]:
    return lambda unit: name + unit.removeprefix(recorded)
