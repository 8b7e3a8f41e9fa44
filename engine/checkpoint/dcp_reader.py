"""Read checkpoints of `torch.distributed.checkpoint` without running code that is in their files.

Torch unpickles the index (`.metadata`) and everything besides tensors as it is, so that a
checkpoint from elsewhere could do anything (true of torch 2.13). Here the index may name only the
classes that torch writes into one, and the rest is read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from jobs.errors import UserError
from jobs.untrusted.files import read_regular
from jobs.untrusted.pickles import check_pickle

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

INDEX: Final = ".metadata"
_LARGEST: Final = 1 << 30  # bytes of it; about 150 for each tensor of each rank
_IN_AN_INDEX: Final = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class Reader(FileSystemReader):
    """Torch's reader with a safe index, which is read once for all loads.

    Args:
        path: The directory of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._directory = path
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            UserError: It is damaged, or has more in it than torch writes.
        """
        if self._index is None:
            self._index = read_index(self._directory)
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


class Planner(DefaultLoadPlanner):
    """Torch's planner, which unpickles nothing but tensors, numbers, texts and their lists."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put what is no tensor, such as a number of the optimizer's, in its place."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:  # a damaged pickle raises anything
            what = " ".join(str(error).split())
            unsafe = next(iter(re.findall(r"GLOBAL (\S+)", what)), None)
            why = f"it would run {unsafe}" if unsafe else what[:200]
            raise UserError(
                f"{name} of the checkpoint cannot be read ({why})", "choose another checkpoint"
            ) from None
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def read_index(directory: Path) -> Metadata:
    """Read what a checkpoint holds, and in which of its files.

    Raises:
        OSError: There is no index.
        UserError: It is damaged, or has more in it than torch writes.
    """
    path = directory / INDEX
    data = read_regular(path, _LARGEST)
    try:
        check_pickle(data)
        index = _Index(io.BytesIO(data)).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
        for place in (index.storage_data or {}).values():
            name = place.relative_path
            if name != Path(name).name or name in ("", "..") or place.transform_descriptors:
                raise pickle.UnpicklingError(f"it names the file {name!r:.80}")
    except Exception as error:  # a damaged pickle raises anything
        why = str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read ({why})", "choose another checkpoint") from None
    return index


def _path(*parts: object) -> Path:
    """Build a path from strings only: nested paths could double in length with every ten bytes."""
    if not all(isinstance(part, str) for part in parts):
        raise pickle.UnpicklingError("it has a path that is not made of texts")
    return Path(*parts)  # type: ignore[arg-type]


class _Index(pickle.Unpickler):
    """Knows the classes that torch writes into an index, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _IN_AN_INDEX.get(module, ()):
            return _path if name == "PosixPath" else super().find_class(module, name)
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it would run {module}.{name}")
