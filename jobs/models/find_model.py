"""Where a model is on this machine, and how large it is."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.models.damaged_weights import DamagedError, read_header, shape_of
from jobs.paths import exists, expand
from jobs.spec.values.hub_names import HubName
from jobs.untrusted.files import LARGEST_JSON, read_regular

if TYPE_CHECKING:
    from pathlib import Path

GGUF_HINT: Final = (
    "GGUF files are not read; use the model's bf16 weights, which base_precision: int8 or nf4 packs"
)


def find_model(name_or_path: str) -> Path:
    """Return a local model directory, or the snapshot of a hub id in the local cache.

    A hub id may have a revision: `ORG/NAME@REVISION`.

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
    if (name := HubName.read("model", name_or_path)) is not None:
        if (snapshot := name.find()) is not None:
            return snapshot
        raise SpecError(
            f"no such model: {name_or_path} is neither a directory nor in the hub cache",
            f"check the path, or run `fsdp-tui fetch {name_or_path}` first",
        )
    raise SpecError(f"no such model directory: {name_or_path}")


def count_parameters(component: Path) -> int | None:
    """Elements of all tensors in a component's safetensors files; None when that is unknown."""
    shapes = read_shapes(component) or {}
    return sum(map(math.prod, shapes.values())) or None


def read_shapes(component: Path) -> dict[str, tuple[int, ...]] | None:
    """Name → shape of all tensors in a component's safetensors files; None when that is unknown.

    Reads only the files' headers: 8 bytes with the length of a JSON object, and that object.
    """
    indices = sorted(component.glob("*.safetensors.index.json"))
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        if indices:
            listed = set(json.loads(read_regular(indices[0], LARGEST_JSON))["weight_map"].values())
            files = [component / name for name in sorted(listed)]
        else:
            files = sorted(component.glob("*.safetensors"))[:1]
        for path in files:
            shapes |= {name: shape_of(entry) for name, entry in read_header(path)[0].items()}
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
    return shapes or None
