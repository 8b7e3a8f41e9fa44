"""Whether a safetensors file is whole, by its header and its size alone."""

from __future__ import annotations

import json
import math
import stat
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

LONGEST_HEADER: Final = 100_000_000  # bytes; the format's own limit
BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class DamagedError(Exception):
    """A file is no whole safetensors file; says why, in a few words."""


def find_damage(path: Path) -> str | None:
    """Say what is wrong with a file in a few words; None where nothing is."""
    try:
        return _wrong_with(*read_header(path))
    except DamagedError as error:
        return str(error)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a file's tensors by name, and how many bytes it has for them.

    Raises:
        DamagedError: It cannot be read.
    """
    header, room = _read(path)
    header.pop("__metadata__", None)
    return header, room


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a file's header.

    Raises:
        DamagedError: It cannot be read.
    """
    metadata = _read(path)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _read(path: Path) -> tuple[dict[str, Any], int]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
        with open(path, "rb") as file:
            start = file.read(8)
            room = status.st_size - 8
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(room, LONGEST_HEADER):
                raise DamagedError("it is truncated, or not a safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise DamagedError(f"it cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise DamagedError("its header is damaged") from None
    if not isinstance(header, dict):
        raise DamagedError("its header is damaged")
    return header, room - length


def elements_of(entry: Any) -> int:
    """Elements of the tensor that an entry of a header describes.

    Raises:
        DamagedError: The entry gives no shape of sizes.
    """
    return math.prod(shape_of(entry))


def shape_of(entry: Any) -> tuple[int, ...]:
    """Return the shape of the tensor that an entry of a header describes.

    Raises:
        DamagedError: The entry gives no shape of sizes. (A product of what else stands there can
            take any amount of memory: `"a"` times 10^9.)
    """
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise DamagedError("its header is damaged")
    return tuple(shape)


def _wrong_with(header: dict[str, Any], room: int) -> str | None:
    """Describe what is wrong with the tensors of a file that has `room` bytes for them."""
    spans = []
    for name, tensor in header.items():
        try:
            begin, end = tensor["data_offsets"]
            elements, bits = elements_of(tensor), BITS.get(tensor["dtype"])
            sound = all(isinstance(offset, int) and offset >= 0 for offset in (begin, end))
        except (DamagedError, TypeError, KeyError, ValueError):
            sound = False
        if not sound or begin > end:
            return f"its header is damaged at {name[:80]!r}"
        if bits is not None and elements * bits > (end - begin) * 8:
            return f"{name[:80]!r} has fewer bytes than its shape needs"
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin < at:
            return f"{name[:80]!r} overlaps another tensor"
        at = end
    return f"it is truncated: {room} of {at} bytes" if at > room else None
