"""Where a model is on this machine, and how large it is."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Final

from jobs.errors import SpecError
from jobs.paths import exists, expand
from jobs.untrusted.files import LARGEST_JSON, read_regular

_HUB_ID: Final = re.compile(r"^[\w.-]+/[\w.-]+$")

_LONGEST_HEADER: Final = 100 << 20  # bytes; what safetensors itself allows


def find_model(name_or_path: str) -> Path:
    """A local model directory, or the snapshot of a hub id in the local cache.

    Raises:
        SpecError: Neither exists.
    """
    path = expand(name_or_path)
    if exists(path) and path.is_dir():
        return path
    if exists(path):
        raise SpecError(f"{path} is a file, not a model directory")
    if _HUB_ID.match(name_or_path) and not name_or_path.startswith("."):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name_or_path, local_files_only=True))
        except (LocalEntryNotFoundError, OSError, ValueError):
            raise SpecError(
                f"no such model: {name_or_path} is neither a directory nor in the hub cache",
                f"check the path, or run `hf download {name_or_path}` first",
            ) from None
    raise SpecError(f"no such model directory: {name_or_path}")


def count_parameters(component: Path) -> int | None:
    """Elements of all tensors in a component's safetensors files; None when that cannot be told.

    Reads only the files' headers: 8 bytes with the length of a JSON object, and that object.
    """
    indices = sorted(component.glob("*.safetensors.index.json"))
    total = 0
    try:
        if indices:
            listed = set(json.loads(read_regular(indices[0], LARGEST_JSON))["weight_map"].values())
            files = [component / name for name in sorted(listed)]
        else:
            files = sorted(component.glob("*.safetensors"))[:1]
        for path in files:
            if not path.is_file():
                return None
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, _LONGEST_HEADER)))
            total += sum(
                math.prod(tensor["shape"])
                for name, tensor in header.items()
                if name != "__metadata__"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return None
    return total or None
