"""Count what a GPU has to do while code runs on fake tensors: FLOPs, bytes and kernels.

FLOPs come from the formulas of torch's `FlopCounterMode`. Every other operation is counted by the
bytes that it reads and writes, as the kernels of eager mode do, since those are limited by the
bandwidth of the GPU's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    mm_flop,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from engine.model.packing import UNPACK, bytes_by_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_ATEN: Final = torch.ops.aten
_NAMES: Final = {1: "eight", 2: "half", 4: "single", 8: "single"}  # by the bytes of an element
# Operations that start no kernel, besides views.
_FREE: Final = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift", "set_", "resize")
_SMALL: Final = 150
"""FLOPs per byte below which a product waits for memory on most GPUs: 77 (RTX 3090) to 400 (L4)."""


@dataclass(frozen=True)
class Work:
    """What a GPU has to do.

    Attributes:
        half: FLOPs of products in bf16 or fp16.
        single: FLOPs of products in fp32.
        eight: FLOPs of products in fp8.
        attention: FLOPs of fused attention.
        small: FLOPs of products that wait for memory, such as those of a LoRA's matrices.
        bytes: Read and written by all other operations and by small products.
        kernels: Number of operations.
        unpacked: Bytes of unpacking a packed base, where one kernel does it.
        unpacked_by_torch: The same where torch's kernels do.
    """

    half: int = 0
    single: int = 0
    eight: int = 0
    attention: int = 0
    small: int = 0
    bytes: int = 0
    kernels: int = 0
    unpacked: int = 0
    unpacked_by_torch: int = 0

    @property
    def flops(self) -> int:
        """Return the FLOPs of all products."""
        return self.half + self.single + self.eight + self.attention + self.small


NOTHING: Final = Work()


def total(works: Iterable[Work]) -> Work:
    """Add up."""
    every = [work for work in works if work is not NOTHING]
    sums = {f.name: sum(getattr(work, f.name) for work in every) for f in fields(Work)}
    return Work(**sums)


class Counter:
    """Counts operations, until what was counted is taken."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self) -> Work:
        """Return what was counted since the last call."""
        counts, self._counts = self._counts, {}
        return Work(**counts) if counts else NOTHING

    def count(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Count an operation.

        Args:
            func: The operation.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: What it returned.
        """
        free, formula, attends = _kind_of(func)
        if func is UNPACK:
            packed, scale, codes = args[:3]
            self._add("kernels", 1)
            self._add("unpacked", _size((packed, scale, result)))
            self._add("unpacked_by_torch", bytes_by_torch(packed, scale, codes, result))
            return
        if free:
            return
        given = [*_tensors(args), *_tensors(v for k, v in (kwargs or {}).items() if k != "out")]
        moved = _size((*given, result))
        self._add("kernels", 1)
        if formula is None:
            self._add("bytes", moved)
            return
        flops = int(formula(*args, **(kwargs or {}), out_val=result))
        if flops < _SMALL * moved:
            self._add("small", flops)
            self._add("bytes", moved)
        else:
            self._add("attention" if attends else _NAMES[args[1].itemsize], flops)

    def _add(self, name: str, number: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + number


def _size(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among values."""
    return sum(t.numel() * t.itemsize for t in _tensors(values))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _product(factor: Any, other: Any, *_: Any, **__: Any) -> int:
    return int(mm_flop(factor, other))


_FORMULAS: Final[dict[Any, Callable[..., int]]] = FlopCounterMode(
    display=False,
    custom_mapping={
        # Torch's own formulas know the fused kernels of GPUs only.
        _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        # They know `_scaled_mm` only, which `functional.scaled_mm` no longer calls.
        _ATEN._scaled_mm_v2: _product,
    },
).flop_registry


@cache
def _kind_of(func: Any) -> tuple[bool, Callable[..., int] | None, bool]:
    """Return whether an operation is free, its formula, and whether it is fused attention."""
    packet = func.overloadpacket
    name = packet.__name__
    free = func.namespace != "aten" or func.is_view or name.startswith(_FREE)
    return free, _FORMULAS.get(packet), "attention" in name


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
