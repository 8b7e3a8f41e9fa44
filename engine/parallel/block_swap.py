"""Keep frozen weights of some blocks in host memory, and copy each block to the GPU for its turn.

Each rank swaps by itself, with no collective. A block's weights lie in one piece of pinned memory,
so that a copy is one call. It runs on a stream of its own while the blocks before it compute;
events order the two streams, and the host never waits. FSDP2 over one rank with its CPU offload
does the same on the stream that computes (torch 2.11 to 2.13), so that nothing hides its copies.
"""

from __future__ import annotations

import mmap
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import register_multi_grad_hook

from engine.model.files.weights import PinnedMemory, bytes_of
from jobs.machine.residence import residence
from jobs.spec.values.value_types import on_card

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    from engine.families import Family
    from engine.ranks.world import World
    from jobs.spec.job_spec import RecipeKeys

_MEMORY: Final = "fsdp-tui-swapped-blocks"

# Modules of UNets in the order of forward. Diffusers registers the middle last, and attentions
# before the resnets that they follow.
_STAGES: Final = ("down_blocks", "mid_block", "up_blocks", "conv_norm_out", "conv_out")
_PAIR: Final = ("resnets", "attentions")
# Wan VACE's control blocks are registered last and called first. FLUX.3's come after its
# `mode_blocks.image_cond`, which no forward calls: fetched ahead, a block of it would stay where it
# was fetched to.
_CALLED: Final = (
    *("vace_blocks", "blocks"),
    *("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks"),
)


def place_in_forward(name: str) -> tuple[int, ...]:
    """Return the key that sorts the names of a model's modules into the order of forward.

    The sort must be stable, since it moves only modules of UNets, FLUX.3 and Wan VACE: other models
    register their blocks in that order, except for Lumina 2's four refiners.
    """
    stage, *path = name.split(".")
    for order, blocks in enumerate(_CALLED):
        if name.startswith(f"{blocks}."):
            return (order,)
    if stage not in _STAGES:
        return ()
    place = (_STAGES.index(stage), int(path.pop(0)) if path and path[0].isdigit() else 0)
    part, number = (*path, "", "")[:2]
    if part in _PAIR:
        return (*place, 0, int(number or 0), _PAIR.index(part))
    return (*place, 1) if part else place  # samplers come after all pairs


def spread(count: int, blocks: int) -> list[int]:
    """Places of `count` among `blocks`, as far apart as they can be.

    Between two that are swapped there are others, whose computing hides the copies.
    """
    return [(2 * number + 1) * blocks // (2 * count) for number in range(count)]


def swap_blocks(
    model: torch.nn.Module, spec: RecipeKeys, family: Family, world: World, *, share: bool = False
) -> SwappedBlocks | None:
    """Choose `swap_blocks` blocks, spread over the model, and allocate host memory for them.

    A model with fewer blocks swaps all.

    Args:
        model: On the meta device, with its adapter, which stays on the GPU.
        spec: The job.
        family: Its family.
        world: The ranks, none of which shards.
        share: Whether ranks of one machine share the memory; then a collective.

    Returns:
        What copies them, once it is started; None if this rank swaps none.
    """
    if not swaps(spec):
        return None
    blocks = [(n, m) for n, m in model.named_modules() if type(m).__name__ in family.blocks]
    blocks.sort(key=lambda block: place_in_forward(block[0]))
    count = min(on_card(spec.swap_blocks, world.gpu()[1]), len(blocks))
    here = residence()
    ranks = world.gather((here, count)) if share else [(here, count)]
    me = world.rank if share else 0
    places = {  # of the blocks that each rank of this machine swaps
        rank: spread(number, len(blocks))
        for rank, (where, number) in enumerate(ranks)
        if where == here
    }
    laid_out = {place: _Block(blocks[place][1]) for place in sorted(set().union(*places.values()))}
    pages, sharing = (None, [me])
    if share and world.size > 1:
        size = sum(bytes_of(block.weights()) for block in laid_out.values())
        pages, sharing = _shared_pages(size, world)
    if not count:
        return None
    chosen = set(places[me])
    # The first one of those that share a block reads it.
    before = set().union(*(places[rank] for rank in sharing if rank < me))
    return SwappedBlocks(
        model,
        laid_out if pages is not None else {n: b for n, b in laid_out.items() if n in chosen},
        chosen,
        len(blocks),
        world.device,
        pages=pages,
        read_elsewhere=chosen & before,
        shared=any(places[rank] for rank in sharing if rank != me),
    )


def swaps(spec: RecipeKeys) -> bool:
    """Return whether any rank of a job may swap blocks; the same on all ranks."""
    return bool(spec.swap_blocks) and spec.model_type == "lora"


class SwappedBlocks:
    """Copies blocks to the device: the next one while one computes, so that two are there at most.

    Args:
        model: On the meta device.
        laid_out: Place in forward → block, for what has a place in the memory: what is swapped
            here, or by any rank that shares it.
        chosen: Places of those that are swapped here.
        blocks: Number of all blocks.
        device: What computes.
        pages: The memory, if ranks share it.
        read_elsewhere: Places of those whose weights another rank reads.
        shared: Whether another rank swaps any.

    Attributes:
        hosts: `id` of a parameter on the meta device → its tensor in host memory.
        size: Bytes of what is swapped here.
        note: A log message.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        laid_out: dict[int, _Block],
        chosen: set[int],
        blocks: int,
        device: torch.device,
        *,
        pages: mmap.mmap | None = None,
        read_elsewhere: Collection[int] = (),
        shared: bool = False,
    ) -> None:
        on_gpu = device.type == "cuda"
        self._model, self._device = model, device
        self._blocks = [block for place, block in laid_out.items() if place in chosen]
        self._read_elsewhere = [laid_out[place] for place in read_elsewhere]
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        size = sum(bytes_of(block.weights()) for block in laid_out.values())
        self._memory = PinnedMemory(size, pages, pin=on_gpu)
        self.hosts: dict[int, torch.Tensor] = {}
        for place, block in laid_out.items():
            first = self._memory.used
            hosts = {id(weight): self._memory.take_like(weight) for weight in block.weights()}
            if place in chosen:
                self.hosts |= hosts
                block.host = self._memory.bytes_between(first, self._memory.used)
        self.size = sum(block.host.nbytes for block in self._blocks)
        self.note = (
            f"{len(chosen)} of {blocks} blocks stay in host memory ({self.size / 2**30:.2f} "
            f"GiB{', shared by the ranks of this machine' * shared}) and are copied to "
            f"the {'GPU' if on_gpu else 'model'} when they compute"
        )

    def read_elsewhere(self) -> set[str]:
        """Return the names of the parameters that another rank reads, after `materialise`."""
        swapped = {p for block in self._read_elsewhere for p in block.weights()}
        return {n for n, p in self._model.named_parameters(remove_duplicate=False) if p in swapped}

    def start(self) -> None:
        """Swap from now on.

        Called once the weights are in host memory; nothing but their blocks can read them then.
        """
        for number, block in enumerate(self._blocks):
            block.move(self._device)
            block.module.register_forward_pre_hook(
                partial(self._before_forward, number), with_kwargs=True
            )
            block.module.register_forward_hook(partial(self._after_forward, number))
        self._model.register_forward_pre_hook(self._before_model)

    # -- hooks -----------------------------------------------------------------------------

    def _before_model(self, *_: Any) -> None:
        for block in self._blocks:
            if block.stage == _BACKWARD:  # which has failed: within one, only blocks are called
                block.stage = ""
        self._fetch(self._blocks[0])

    def _before_forward(
        self, number: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        block = self._blocks[number]
        self._await(block)
        if block.stage == _BACKWARD:  # recomputed
            return None
        if number + 1 < len(self._blocks):
            self._fetch(self._blocks[number + 1])
        if not torch.is_grad_enabled():
            return None
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            self._release_after_gradients(block)
            return None
        # Through one function, so that its backward runs when the block's is done.
        passed = iter(_Passed.apply(partial(self._after_backward, block), *inputs))
        return _replaced((args, kwargs), lambda t: next(passed) if t.requires_grad else t)

    def _after_forward(self, number: int, _: Any, __: Any, outputs: Any) -> None:
        block = self._blocks[number]
        if block.stage == _BACKWARD:
            return
        backward = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        for tensor in backward:
            tensor.register_hook(lambda _: self._before_backward(number))
        block.stage = _EXPECTED if backward else ""
        # Backward begins with the last one.
        if not (backward and number + 1 == len(self._blocks)):
            self._release(block)

    def _before_backward(self, number: int) -> None:
        block = self._blocks[number]
        if block.stage == _BACKWARD:  # by another output
            return
        block.stage = _BACKWARD
        self._await(block)
        if number and self._blocks[number - 1].stage == _EXPECTED:
            self._fetch(self._blocks[number - 1])

    def _after_backward(self, block: _Block) -> None:
        block.stage = ""
        self._release(block)

    def _release_after_gradients(self, block: _Block) -> None:
        """Release a block whose inputs need no gradient when those of its adapter are computed."""
        trained = [p for p in block.module.parameters() if p.requires_grad]
        if not trained:
            return

        def release(_: Any) -> None:
            handle.remove()
            self._after_backward(block)

        handle = register_multi_grad_hook(trained, release)

    # -- copies ----------------------------------------------------------------------------

    def _fetch(self, block: _Block) -> None:
        """Start to copy a block to the device, unless it is there."""
        if block.here:
            return
        on_stream: AbstractContextManager[Any] = nullcontext()
        if self._stream is not None:
            on_stream = torch.cuda.stream(self._stream)
        with on_stream:
            block.there.untyped_storage().resize_(block.host.nbytes)
            # `data` has a version of its own: for autograd, the weights have not changed.
            block.there.data.copy_(block.host, non_blocking=True)
        block.here = True  # not if there was no memory for it
        if self._stream is not None:
            block.copied = self._stream.record_event()

    def _await(self, block: _Block) -> None:
        """Have what is computed from now on wait until a block is on the device."""
        self._fetch(block)
        if block.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(block.copied)
            block.copied = None

    def _release(self, block: _Block) -> None:
        """Free a block's memory on the device, once what computes with it is done."""
        if self._stream is not None:
            # Its memory belongs to the stream that copies, which takes it again, or unmaps it when
            # that stream is done (`expandable_segments`).
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        block.there.untyped_storage().resize_(0)
        block.here = False


_EXPECTED: Final = "backward is expected"
_BACKWARD: Final = "in backward"


@dataclass(eq=False)
class _Block:
    """A swapped block.

    Attributes:
        module: The block.
        places: Where its frozen parameters are: a module and the parameter's name in it.
        host: Its frozen weights in host memory, as bytes.
        there: The same on the device; empty while it is not there.
        here: Whether it is on the device, or being copied.
        stage: "" from the end of backward to the end of forward.
        copied: Recorded after its copy; None once the stream that computes waits for it.
    """

    module: torch.nn.Module
    places: list[tuple[torch.nn.Module, str]] = field(init=False)
    host: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    there: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    here: bool = False
    stage: str = ""
    copied: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        # Now: what a training adapter adds is frozen too, and stays on the device.
        self.places = [
            (module, name)
            for module in self.module.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad
        ]

    def weights(self) -> list[torch.nn.Parameter]:
        """Return its frozen parameters, each once."""
        return list(dict.fromkeys(getattr(module, name) for module, name in self.places))

    def move(self, device: torch.device) -> None:
        """Replace its frozen parameters by such as lie in `there`, and empty that."""
        self.there = torch.empty(self.host.nbytes, dtype=torch.uint8, device=device)
        start = self.host.data_ptr()
        moved = {}
        for weight in self.weights():
            first = weight.data_ptr() - start if weight.numel() else 0
            own = self.there[first : first + weight.nbytes].view(weight.dtype).view(weight.shape)
            moved[weight] = torch.nn.Parameter(own, requires_grad=False)
        for module, name in self.places:
            setattr(module, name, moved[getattr(module, name)])
        self.there.untyped_storage().resize_(0)


class _Passed(torch.autograd.Function):
    """Pass tensors on, and call `done` when all of their gradients are computed."""

    @staticmethod
    def forward(
        ctx: Any, done: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.done = done
        # No views, for which compiled blocks would need other graphs (`engine.model.compiled`).
        return tuple(tensor.view_as(tensor).detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.done()
        return None, *gradients


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested tuples, lists and dicts with other tensors, in the order of `_tensors`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(part, change) for part in value)
    if isinstance(value, dict):
        return {name: _replaced(part, change) for name, part in value.items()}
    return value


def _shared_pages(size: int, world: World) -> tuple[mmap.mmap | None, list[int]]:
    """Return memory that the ranks of this machine share, and which ranks do.

    A rank that cannot open the first one's, in another container perhaps, gets None: its own. So
    do all if the first one cannot. A collective.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # Elsewhere, the number in a path may be another process's, and the file another one.
    title = f"{_MEMORY}-{world.token}"
    own = path = None
    if local == 0:
        with suppress(OSError):
            own = os.memfd_create(title)
            os.ftruncate(own, size)
            path = f"/proc/{os.getpid()}/fd/{own}"
    here = residence()
    # Ranks of a machine need not follow one another.
    ranks = world.gather((here, local, path))
    first = next((n for n, (*place, _) in enumerate(ranks) if place == [here, 0]), world.rank)
    path = ranks[first][-1]
    pages = None
    with suppress(OSError, ValueError):
        if path is not None and os.readlink(path).startswith(f"/memfd:{title}"):
            with open(path, "r+b") as file:
                pages = mmap.mmap(file.fileno(), size)
    opened = world.gather(pages is not None)  # until then, the first one keeps its file open
    if own is not None:
        os.close(own)
    if pages is None or not opened[first]:
        return None, [world.rank]
    return pages, [n for n, (where, *_) in enumerate(ranks) if where == here and opened[n]]
