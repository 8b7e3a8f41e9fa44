"""Compute the numbers that the host reads back: how long a prompt is, which step comes next.

Kernels of the stub compute nothing, so a count of tokens would be what lay in memory before, and
libraries take it for a length or an index. Within `Numbers` every operation that makes integers,
booleans or a few numbers is also done on the CPU, in the device's own memory, which is host memory.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

_A_FEW = 64  # numbers, as in the timesteps of a schedule
# Whose shape depends on numbers, or whose library (cuSOLVER, NVRTC) is not played.
_ON_HOST_ALONE = frozenset(
    {
        torch.ops.aten.nonzero.default,
        torch.ops.aten.repeat_interleave.Tensor,
        torch.ops.aten.prod.dim_int,
        torch.ops.aten._linalg_solve_ex.default,
        torch.ops.aten._linalg_check_errors.default,
    }
)
_INDEXED = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    }
)
_READ = torch.ops.aten._local_scalar_dense.default
_COPIED = torch.ops.aten._to_copy.default


class Numbers(TorchDispatchMode):
    """While it is entered, integers, booleans and small tensors are what they would be on a GPU."""

    def __enter__(self) -> Self:
        ctypes.CDLL(None).cuda_stub_tell_numbers(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        ctypes.CDLL(None).cuda_stub_tell_numbers(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ON_HOST_ALONE and args[0].is_cuda:
            words, named = tree_map_only(torch.Tensor, _on_host, (args, kwargs))
            made, device = func(*words, **named), args[0].device
            return tree_map_only(torch.Tensor, lambda one: one.to(device), made)
        if func is _READ and args[0].is_cuda:
            return _READ(_on_host(args[0]))
        if func in _INDEXED:
            args = (args[0], _without_masks(args[1]), *args[2:])
        made = func(*args, **kwargs)
        if func is _COPIED and made.is_cpu and _is_known(args[0]):
            # A kernel would have put what is not contiguous in order.
            return made.copy_(_on_host(args[0]))
        out = [made] if isinstance(made, torch.Tensor) else tree_flatten(made)[0]
        if func.is_view or not out or not all(map(_is_known, out)):
            return made
        words, named = tree_map_only(torch.Tensor, _on_host, (args, dict(kwargs)))
        if "device" in named:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        with suppress(RuntimeError, NotImplementedError):  # what the CPU cannot do
            for device, host in zip(out, tree_flatten(func(*words, **named))[0], strict=True):
                _on_host(device).copy_(host)
        return made


def _is_known(value: Any) -> bool:
    """Whether it is worth computing: not what a model computes with."""
    return (
        type(value) is torch.Tensor
        and value.is_cuda
        and (value.numel() <= _A_FEW or not (value.is_floating_point() or value.is_complex()))
    )


def _without_masks(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Places instead of booleans: how many are true decides the shape of what is made."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.is_cuda and index.dtype is torch.bool:
            places = _on_host(index).nonzero().unbind(1)
            found += [place.to(index.device) for place in places]
        else:
            found.append(index)
    return found


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=storage.nbytes() // tensor.itemsize)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
