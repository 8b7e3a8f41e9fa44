"""A safetensors file that is compared, once it is on the disk, with what was in memory."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final

import torch

from engine.safetensors_file import SafetensorsWriter, tensor_bytes
from engine.weight_files import read_header
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.exports.source import Fact
    from engine.weight_files import StoredTensor

_CHUNK_BYTES: Final = 16 * 2**20


class DamagedError(RuntimeError):
    """What lies on the disk is not what was written."""


class VerifiedFile:
    """A safetensors file of which every tensor's hash is remembered while it is written.

    Args:
        path: The file.
        facts: Name → dtype and shape of all its tensors.
        metadata: Strings for its header.
    """

    def __init__(self, path: Path, facts: Mapping[str, Fact], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.facts = dict(facts)
        self._hashes: dict[str, bytes] = {}
        self._writer = SafetensorsWriter(path, facts, metadata)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor in the precision that was announced.

        Raises:
            UserError: It holds a number that is not finite, or too large for that precision.
        """
        dtype = self.facts[name][0]
        stored = tensor.to(dtype).contiguous()
        if stored.is_floating_point() and not torch.isfinite(stored).all():
            if torch.isfinite(tensor).all():
                raise UserError(
                    f"{name} holds a number that is too large for float16",
                    "export in bf16 or fp32 (export_dtype, --dtype)",
                )
            raise UserError(
                f"{name} holds numbers that are not finite: the training has diverged",
                "export an earlier checkpoint (fsdp-tui export ID --step N)",
            )
        self._writer.add(name, stored)
        self._hashes[name] = hashlib.sha256(tensor_bytes(stored)).digest()

    def close(self) -> None:
        """Finish the file, and wait until it is on the disk."""
        self._writer.close()

    def abandon(self) -> None:
        """Remove a file that is not complete."""
        self._writer.abandon()

    def check(self, checked: Callable[[], None] = lambda: None) -> None:
        """Read the file again, from the disk where that can be had, and compare.

        Args:
            checked: Called after each tensor.

        Raises:
            DamagedError: Names, shapes, precision or numbers are not those that were written.
        """
        try:
            places = {place.name: place for place in read_header(self.path)}
        except UserError as error:
            raise DamagedError(f"the export cannot be read back: {error.message}") from None
        found = {name: (place.dtype, tuple(place.shape)) for name, place in places.items()}
        if found != self.facts:
            odd = sorted(n for n in found | self.facts if found.get(n) != self.facts.get(n))
            raise DamagedError(f"{self.path} lacks, adds or changes tensors: {odd[:3]}")
        with open(self.path, "rb", buffering=0) as file:
            # Synced, so these pages can go: what follows is then what the disk holds.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for place in sorted(places.values(), key=lambda place: place.start):
                if _hash(file.fileno(), place) != self._hashes[place.name]:
                    raise DamagedError(f"{self.path}: {place.name} differs from memory")
                checked()


def _hash(descriptor: int, place: StoredTensor) -> bytes:
    digest = hashlib.sha256()
    at, left = place.start, place.elements * place.dtype.itemsize
    while left:
        data = os.pread(descriptor, min(left, _CHUNK_BYTES), at)
        if not data:
            break  # shorter than it should be, so the hash differs
        digest.update(data)
        at, left = at + len(data), left - len(data)
    return digest.digest()
