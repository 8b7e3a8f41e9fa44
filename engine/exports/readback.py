"""A safetensors file that is compared, once it is on the disk, with what was in memory."""

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
# Tensors are compared by CRC-32, which is made for what disks do to data. SHA-256 of all of them is
# for the header alone, so a file costs 0.7 s a GB more on a CPU with instructions for it.


class DamagedError(RuntimeError):
    """What lies on the disk is not what was written."""


class VerifiedFile:
    """A safetensors file of which every tensor's checksum is remembered while it is written.

    Args:
        path: The file.
        facts: Name → dtype and shape of all its tensors.
        metadata: Strings for its header.
    """

    def __init__(self, path: Path, facts: Mapping[str, Fact], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.facts = dict(facts)
        self._sums: dict[str, int] = {}
        self._writer = SafetensorsWriter(path, facts, metadata)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor in the precision that was announced.

        Raises:
            NotFiniteError: It holds a number that is not finite.
            UserError: It holds one that is too large for that precision.
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
        """Finish the file, and wait until it is on the disk."""
        self._writer.close()

    def abandon(self) -> None:
        """Remove a file that is not complete."""
        self._writer.abandon()

    def check(self, checked: Callable[[], None] = lambda: None) -> None:
        """Read the file again, from the disk where that can be had, and compare.

        The same read makes the hash of all tensors that ModelSpec wants in the header.

        Args:
            checked: Called after each tensor.

        Raises:
            DamagedError: Names, shapes, precision or numbers are not those that were written.
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
            # Synced, so these pages can go: what follows is then what the disk holds.
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
    """Whether all numbers are; makes no tensor of the same size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # torch compares none of these
        tensor = tensor.bfloat16()
    low, high = torch.aminmax(tensor)  # NaN if one is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _sum(descriptor: int, place: StoredTensor, add: Callable[[bytes], object]) -> int:
    """Return a tensor's CRC-32, and add its bytes to what all have."""
    checksum = 0
    at, left = place.start, place.elements * place.dtype.itemsize
    while left:
        data = os.pread(descriptor, min(left, _CHUNK_BYTES), at)
        if not data:
            return -1  # shorter than it should be
        checksum = zlib.crc32(data, checksum)
        add(data)
        at, left = at + len(data), left - len(data)
    return checksum
