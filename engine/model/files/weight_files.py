"""Locate the tensors in a model directory's safetensors files, without reading them.

A safetensors file consists of a length (8 bytes, little endian), a JSON header of that length, and
the tensors, each contiguous in row-major order. Rows of a tensor are therefore one byte range.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.values.value_types import BasePrecision

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    # Only for buffers: `engine.model.files.weights` rejects integer parameters.
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# File names used by `save_pretrained` of diffusers and of transformers.
_STANDARD: Final = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "model.safetensors.index.json",
    "model.safetensors",
)
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST_HEADER: Final = 100_000_000  # bytes; the format's own limit
_AGAIN: Final = "download the model again"


@dataclass(frozen=True)
class PackedParts:
    """The tensors needed to unpack a packed weight (`engine.model.files.published_packing`).

    Attributes:
        scheme: The packing, as a value of `base_precision`.
        parts: Its additional tensors: `scale`, and for quantized scales `nested_scale` and
            `nested_codes`.
        nested_block: Number of scales that share a nested scale.
        offset: Added to each quantized scale.
    """

    scheme: BasePrecision
    parts: dict[str, StoredTensor]
    nested_block: int = 0
    offset: float = 0.0


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor on disk.

    Attributes:
        name: Its name in the file.
        file: The file.
        shape: Its shape; if packed, the shape of the unpacked weight.
        dtype: Dtype in the file.
        start: Offset of its first byte in the file.
        packed: How it is packed, if it is.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    packed: PackedParts | None = None

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def row_elements(self) -> int:
        """Return the number of elements per row along dim 0."""
        return torch.Size(self.shape[1:]).numel()

    def read_whole(self) -> torch.Tensor:
        """Read the full tensor into host memory; meant for small ones.

        Raises:
            OSError: The file cannot be read, or ends before the tensor does.
        """
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            content = stream.read(self.elements * self.dtype.itemsize)
        if len(content) < self.elements * self.dtype.itemsize:
            raise OSError(f"{self.file} was truncated")
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return flat.view(self.dtype).view(self.shape)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the location of every tensor of a model saved in one or several safetensors files.

    Raises:
        UserError: There are no safetensors files, or several that do not belong together, or one is
            missing or damaged, or a tensor has an unknown dtype.
    """
    source = _chosen(directory)
    index = _read_index(source) if source.suffix == ".json" else {}
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(index.values())) or [source]:
        for tensor in read_header(file):
            if index.get(tensor.name, file) == file:
                tensors[tensor.name] = tensor
    if lost := sorted(index.keys() - tensors.keys()):
        raise UserError(
            f"{source} lists {lost[0]} in {index[lost[0]].name}, but it is not there", _AGAIN
        )
    return tensors


def _chosen(directory: Path) -> Path:
    """Return the weights file of a directory, or the index of several."""
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise UserError(f"cannot read {directory} ({error.strerror})") from None
    for name in _STANDARD:
        if name in names:
            return directory / name
    indices = sorted(n for n in names if ".safetensors.index." in n and n.endswith(".json"))
    listed = {file.name for name in indices for file in _read_index(directory / name).values()}
    single = sorted(n for n in names if n.endswith(".safetensors") and n not in listed)
    if len(indices) + len(single) == 1:
        return directory / (indices + single)[0]
    if indices or single:
        raise UserError(
            f"{directory} has several sets of weights ({', '.join(indices + single)})",
            "keep one, or name it diffusion_pytorch_model.safetensors; sharded weights need their "
            ".safetensors.index.json",
        )
    if pickled := sorted(n for n in names if n.endswith(_PICKLED)):
        raise UserError(
            f"{directory} has only pickled weights ({pickled[0]}), and unpickling runs any code "
            "in the file",
            "convert them: load with from_pretrained, then save_pretrained",
        )
    if quantised := sorted(n for n in names if n.endswith(".gguf")):
        raise UserError(
            f"{directory} has only GGUF weights ({quantised[0]}); training on them is not "
            "supported",
            "use the model's bf16 weights; base_precision quantizes them as they are read",
        )
    raise UserError(f"{directory} has no .safetensors weights", _AGAIN)


def _read_index(file: Path) -> dict[str, Path]:
    """Return the file of each tensor, checking that all files exist."""
    try:
        names = {str(n): str(f) for n, f in json.loads(file.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error})", _AGAIN) from None
    for name in sorted(set(names.values())):
        if os.path.basename(name) != name:
            raise UserError(f"{file} is damaged (it lists {name}, which is not a file next to it)")
        if not (file.parent / name).is_file():
            raise UserError(f"{file.parent / name} is missing; {file.name} lists it", _AGAIN)
    return {tensor: file.parent / name for tensor, name in names.items()}


def read_header(file: Path) -> list[StoredTensor]:
    """List the tensors of one file.

    Read only the header, with plain reads: pages of a mapped file would count toward this process's
    memory.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            if start == b"version ":
                raise UserError(f"{file} is a Git LFS pointer, not weights", "run `git lfs pull`")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header exceeds the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return [_entry(file, name, header[name], 8 + length, size) for name in header]
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror})", _AGAIN) from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UserError(f"{file} is damaged ({error})", _AGAIN) from None


def _entry(file: Path, name: str, entry: dict[str, Any], base: int, size: int) -> StoredTensor:
    """Parse a header entry, given the offset `base` of the tensor data and the file size `size`."""
    kind = entry["dtype"]
    if kind not in _DTYPES:
        raise UserError(
            f"{file}: {name} is stored as {kind}, which is not supported",
            "supported: float32, bfloat16, float16, float64, unscaled fp8",
        )
    begin, end = (int(offset) for offset in entry["data_offsets"])
    tensor = StoredTensor(
        name, file, tuple(int(n) for n in entry["shape"]), _DTYPES[kind], base + begin
    )
    if end - begin != tensor.elements * tensor.dtype.itemsize or begin < 0:
        raise ValueError(f"{name} has {end - begin} bytes, which does not fit its shape")
    if base + end > size:
        raise ValueError(f"it ends {base + end - size} bytes before {name} does")
    return tensor
