"""Write a safetensors file tensor by tensor, never holding more than one of them.

`safetensors.torch.save_file` takes all tensors at once, so a model gathered from its ranks, or read
from a checkpoint, would have to fit into host memory. `weight_files` describes and reads the
format.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Facts = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # name → dtype and shape

# Every dtype that torch and safetensors share, with the format's name for it.
DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT: Final = 8  # bytes; alignment of the tensor data, for mapping the file
_CHUNK_BYTES: Final = 64 * 2**20  # per write; Linux writes at most 2 GiB at once


class SafetensorsWriter:
    """A safetensors file being written: the header first, then each tensor as it is added.

    As a context manager, it closes the file, or removes it after an exception.

    Args:
        path: The file. An existing file is overwritten at once, so pass a temporary name.
        facts: Dtype and shape of every tensor that will be added by name, in any order.
        metadata: Strings for the header's `__metadata__`.

    Raises:
        UserError: The format does not support a dtype.
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, facts: Facts, metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._facts = {name: (dtype, tuple(shape)) for name, (dtype, shape) in facts.items()}
        header, self._places = _layout(self._facts, metadata)
        self._missing = set(self._facts)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            _write(self._file, memoryview(header), 0)
        except BaseException:
            self.abandon()
            raise

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor. Tensors may come in any order, each once.

        Args:
            name: One of the names in `facts`.
            tensor: With the dtype and shape given in `facts`; on any device, not a DTensor.

        Raises:
            ValueError: It differs from `facts`, or was added before.
            OSError: The file cannot be written.
        """
        if name not in self._missing:
            what = "was added before" if name in self._facts else "is not announced"
            raise ValueError(f"{name} {what} in {self._path}")
        dtype, shape = self._facts[name]
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {dtype} {shape}"
            )
        _write(self._file, tensor_bytes(tensor), self._places[name])
        self._missing.discard(name)

    def close(self) -> None:
        """Finish the file and sync it to disk. Syncing its directory is up to the caller.

        Raises:
            ValueError: Tensors are missing; the file is removed.
            OSError: The file cannot be written; it is removed.
        """
        if self._file < 0:
            return
        try:
            if self._missing:
                some = sorted(self._missing)[:3]
                raise ValueError(
                    f"{self._path} lacks {len(self._missing)} tensors, among them {', '.join(some)}"
                )
            os.fsync(self._file)
        except BaseException:
            self.abandon()
            raise
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, or remove the file after an exception."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Remove the file unless it is finished."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._path.unlink(missing_ok=True)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes as safetensors stores them (row-major; this machine's byte order).

    A contiguous tensor on the CPU is not copied.
    """
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8).numpy().data


def _layout(
    facts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """Return the header bytes, and the offset of each tensor's first byte in the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    at = 0
    # Put wide dtypes first, as safetensors itself does, so that every tensor is aligned to its own
    # width.
    for name in sorted(facts, key=lambda name: (-facts[name][0].itemsize, name)):
        dtype, shape = facts[name]
        if dtype not in DTYPE_NAMES:
            raise UserError(f"{name} is {dtype}, which safetensors does not support")
        end = at + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        offsets[name] = at
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: begin + offset for name, offset in offsets.items()},
    )


def _write(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done : done + _CHUNK_BYTES], at + done)
