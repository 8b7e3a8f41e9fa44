"""Write safetensors files and verify on disk what was written."""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from typing import TYPE_CHECKING, Final

import torch

from engine.exports.recipe import UNKNOWN_HASH
from engine.model.files.safetensors_writer import SafetensorsWriter, tensor_bytes
from engine.model.files.weight_files import read_header
from jobs.errors import NotFiniteError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.exports.source import Fact
    from engine.model.files.weight_files import StoredTensor

_CHUNK_BYTES: Final = 16 * 2**20
# Tensors are compared by CRC-32, which suits disk corruption. The SHA-256 of all tensors is only
# for the header and costs 0.7 s per GB on a CPU with SHA instructions.


class DamagedError(RuntimeError):
    """The data on disk differs from what was written."""


class VerifiedFile:
    """A safetensors file that records every tensor's checksum while writing.

    Args:
        path: The file.
        facts: Dtype and shape of every tensor by name.
        metadata: Strings for its header.
    """

    def __init__(self, path: Path, facts: Mapping[str, Fact], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.facts = dict(facts)
        self._sums: dict[str, int] = {}
        self._writer = SafetensorsWriter(path, facts, metadata)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor in its planned precision.

        Raises:
            NotFiniteError: It holds a non-finite value.
            UserError: It holds a value that is too large for that precision.
        """
        dtype = self.facts[name][0]
        stored = tensor.to(dtype).contiguous()
        if not _finite(stored):
            if _finite(tensor):
                raise UserError(
                    f"{name} contains a value too large for {str(dtype).removeprefix('torch.')}",
                    "export in bf16 or fp32 (export_dtype, --dtype)",
                )
            raise NotFiniteError(
                f"{name} contains non-finite values: training has diverged",
                "export an earlier checkpoint (fsdp-tui export ID --step N)",
            )
        self._writer.add(name, stored)
        self._sums[name] = zlib.crc32(tensor_bytes(stored))

    def close(self) -> None:
        """Finish the file and sync it to disk."""
        self._writer.close()

    def abandon(self) -> None:
        """Remove the file if it is incomplete."""
        self._writer.abandon()

    def check(self, checked: Callable[[], None] = lambda: None) -> None:
        """Read the file back, bypassing the page cache where possible, and compare.

        The same pass computes the hash of all tensors that ModelSpec puts in the header.

        Args:
            checked: Called after each tensor.

        Raises:
            DamagedError: Names, shapes, precision or values differ from what was written.
        """
        try:
            places = {place.name: place for place in read_header(self.path)}
        except UserError as error:
            raise DamagedError(f"the export cannot be read back: {error.message}") from None
        facts = {name: (place.dtype, tuple(place.shape)) for name, place in places.items()}
        if facts != self.facts:
            odd = sorted(n for n in facts | self.facts if facts.get(n) != self.facts.get(n))
            raise DamagedError(f"{self.path} lacks, adds or changes tensors: {odd[:3]}")
        whole = hashlib.sha256()
        with open(self.path, "r+b", buffering=0) as file:
            # The pages are synced, so the kernel can drop them, and the reads below come from the
            # disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for place in sorted(places.values(), key=lambda place: place.start):
                if _sum(file.fileno(), place, whole.update) != self._sums[place.name]:
                    raise DamagedError(f"{self.path}: {place.name} differs from memory")
                checked()
            first = min(place.start for place in places.values())
            at = os.pread(file.fileno(), first, 0).find(UNKNOWN_HASH.encode())
            if at >= 0:
                os.pwrite(file.fileno(), f"0x{whole.hexdigest()}".encode(), at)
                os.fsync(file.fileno())


def _finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, without allocating a tensor of the same size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # torch has no comparisons for fp8
        tensor = tensor.bfloat16()
    low, high = torch.aminmax(tensor)  # NaN if any value is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _sum(descriptor: int, place: StoredTensor, add: Callable[[bytes], object]) -> int:
    """Return a tensor's CRC-32, and pass its bytes to `add`."""
    checksum = 0
    at, left = place.start, place.elements * place.dtype.itemsize
    while left:
        data = os.pread(descriptor, min(left, _CHUNK_BYTES), at)
        if not data:
            return -1  # the file is too short
        checksum = zlib.crc32(data, checksum)
        add(data)
        at, left = at + len(data), left - len(data)
    return checksum
