"""Host memory that a GPU copies from directly, and no more of it than is asked for.

Torch's own allocator of such memory (2.11 to 2.13) rounds each tensor up to a power of two, so that
48 GB of offloaded shards take about 80. Its option against that, `pinned_max_round_threshold_mb`,
hands freed memory out again for tensors that are larger than it (2.13). So the shards lie in memory
of our own, which is registered with CUDA as torch's checkpoints do it.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALIGNMENT: Final = 512  # bytes; as CUDA aligns what it allocates


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that `PinnedMemory` needs for tensors like these."""
    return sum(_rounded(tensor.nbytes) for tensor in tensors)


class PinnedMemory:
    """Memory from which tensors are taken; it is given back when the last of them is gone.

    Where CUDA refuses to register it, it is ordinary memory: `Tensor.is_pinned` tells.

    Args:
        size: Bytes, from `bytes_of`.
    """

    def __init__(self, size: int) -> None:
        # Tensors hold the array and it holds the pages, so its end comes before theirs.
        self._array = (ctypes.c_char * max(1, size)).from_buffer(mmap.mmap(-1, max(1, size)))
        self._used = 0
        address = ctypes.addressof(self._array)
        with suppress(RuntimeError):
            pin_memory(address, len(self._array))
            weakref.finalize(self._array, _unpin, address)

    def take_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape and dtype; its contents are zeros.

        Args:
            tensor: On any device, contiguous, one of those that `bytes_of` has counted.
        """
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        first, self._used = self._used, self._used + _rounded(tensor.nbytes)
        flat = torch.frombuffer(self._array, dtype=tensor.dtype, count=tensor.numel(), offset=first)
        return flat.view(tensor.shape)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _unpin(address: int) -> None:
    with suppress(AssertionError, RuntimeError):  # at the end of the process CUDA may be gone
        unpin_memory(address)
