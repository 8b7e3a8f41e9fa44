"""Where a model is on this machine, and how large it is."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Final

from jobs.errors import SpecError
from jobs.models.damaged_weights import DamagedError, read_header
from jobs.paths import exists, expand
from jobs.untrusted.files import LARGEST_JSON, read_regular

GGUF_HINT: Final = (
    "GGUF files are not read; use the model's bf16 weights, which base_precision: int8 or nf4 packs"
)
_HUB_ID: Final = re.compile(r"^[\w.-]+/[\w.-]+$")


def find_model(name_or_path: str) -> Path:
    """A local model directory, or the snapshot of a hub id in the local cache.

    Raises:
        SpecError: Neither exists.
    """
    path = expand(name_or_path)
    if exists(path) and path.is_dir():
        return path
    if exists(path):
        raise SpecError(
            f"{path} is a file, not a model directory",
            GGUF_HINT if path.suffix == ".gguf" else None,
        )
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
            total += sum(math.prod(one["shape"]) for one in read_header(path)[0].values())
    except (
        DamagedError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None
    return total or None
