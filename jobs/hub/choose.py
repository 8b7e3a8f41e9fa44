"""Which files of a repository a job reads. Pure: names in, names out."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from jobs.models.weight_variants import variant_of
from jobs.spec.values.dataset_files import (
    CAPTION_SUFFIXES,
    METADATA,
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from jobs.spec.values.hub_names import HubName

# Read at the top of a repository: what the model is, and under which license.
_TOP: Final = ("model_index.json", "config.json", "README.md", "LICENSE*", "NOTICE*")
_WEIGHTS: Final = (".safetensors", ".bin")
# Weights of other libraries, and what is no part of a pipeline.
_NEVER: Final = (
    *("*.onnx*", "*.pb", "*.msgpack", "*.h5", "*.ckpt", "*.pt", "*.pth", "*.gguf", "*.tflite"),
    *("openvino*", "flax_*", "*.ot", "*.mlmodel*", "*.xml"),
    *("*.png", "*.jpg", "*.jpeg", "*.webp", "*.gif", "*.mp4"),
)
_TABLES: Final = (".parquet", ".arrow", ".tar")
_OF_SAVED_TABLES: Final = ("state.json", "dataset_dict.json", "dataset_info.json")
_NOTES: Final = ("README.md", "LICENSE*")


def choose(name: HubName, files: Iterable[str], parts: Collection[str] = ()) -> list[str]:
    """The files to fetch.

    Args:
        name: What they are files of.
        files: Paths of all files in the repository.
        parts: Folders of the pipeline, if its model_index.json was read; otherwise every folder
            with a config or a tokenizer counts as a part.
    """
    paths = sorted(path for path in files if not path.startswith("."))
    if name.kind == "dataset":
        return _of_dataset(name, paths)
    folders = {str(PurePosixPath(path).parent) for path in paths} - {"."}
    if "model_index.json" not in paths:
        folders = {"."} if "config.json" in paths else set()
    elif parts:
        folders &= set(parts)
    chosen = [path for path in paths if "/" not in path and _is_any(path, _TOP)]
    for folder in sorted(folders):
        inside = [path for path in paths if str(PurePosixPath(path).parent) == folder]
        chosen += _of_part(inside)
    return sorted(set(chosen))


def _of_part(files: list[str]) -> list[str]:
    """A folder's files without copies in other precisions, formats or libraries."""
    kept = [path for path in files if not _is_any(PurePosixPath(path).name, _NEVER)]
    names = {path: PurePosixPath(path).name for path in kept}
    plain = [path for path in kept if variant_of(names[path]) is None]
    # Where there is only a variant, the check of the model reports what is missing.
    if any(path.endswith(_WEIGHTS) for path in plain):
        kept = plain
    if any(path.endswith(".safetensors") for path in kept):
        kept = [path for path in kept if ".bin" not in names[path]]
    return kept


def _of_dataset(name: HubName, files: list[str]) -> list[str]:
    inside = [
        path for path in files if not name.folder or path.startswith(f"{name.folder.rstrip('/')}/")
    ]
    suffixes = {*_TABLES, *PICTURE_SUFFIXES, *VIDEO_SUFFIXES, *CAPTION_SUFFIXES}
    chosen = [
        path
        for path in inside
        if PurePosixPath(path).suffix.lower() in suffixes
        or PurePosixPath(path).name in (*METADATA, *_OF_SAVED_TABLES)
    ]
    return sorted({*chosen, *(path for path in files if _is_any(path, _NOTES))})


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
