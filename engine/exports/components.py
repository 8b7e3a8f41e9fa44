"""What a whole pipeline has besides its trained transformer: taken from the base model."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.models.weight_variants import variant_of
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

INDEX: Final = "model_index.json"

_FICLONE: Final = 0x40049409  # ioctl: share the blocks of another file until one of them is written
_LARGE: Final = 2**20  # bytes; smaller files are copied
# Other spellings of the same weights, which hub repositories carry along.
_FOREIGN: Final = (
    ".bin",
    ".msgpack",
    ".h5",
    ".onnx",
    ".onnx_data",
    ".pb",
    ".ckpt",
    ".pt",
    ".pth",
    ".gguf",
)
_FOREIGN_NAMES: Final = ("openvino_",)
# They look at finished images, and often are not downloaded; a checker needs its extractor.
_CHECKS: Final[tuple[str, ...]] = ("safety_checker", "feature_extractor")


@dataclass(frozen=True)
class Copy:
    """A file to take over: where it is, links of a hub cache followed, and its relative name."""

    source: Path
    name: str


def read_index(root: Path) -> dict[str, Any]:
    """Return a model's index.

    Raises:
        UserError: It cannot be read, or names a component that is no folder of the model.
    """
    index = read_json(root / INDEX)
    if index is None:
        raise UserError(f"{root} has no readable {INDEX}", "download the model again")
    for name in components_of(index):
        if name in ("", ".", "..") or "/" in name:  # files would be copied to anywhere
            raise UserError(f"{root}/{INDEX}: {name} is no folder of the model")
    return index


def files_of(root: Path, index: Mapping[str, Any], trained: str) -> list[Copy]:
    """Return the files of a pipeline that training does not change, and the trained part's config.

    Args:
        root: The base model.
        index: Its index.
        trained: The name of the part that is trained.

    Raises:
        UserError: A component that the index names is missing, and pipelines need it.
    """
    copies = [Copy((root / INDEX).resolve(), INDEX)]
    copies += [
        Copy(path.resolve(), path.name)
        for path in sorted(root.iterdir())
        if path.name.upper().startswith(("LICENSE", "NOTICE")) and path.is_file()
    ]
    absent = absent_checks(root, index)
    for name in components_of(index):
        if name in absent:
            continue
        if not (root / name).is_dir():
            raise UserError(f"{root} lacks {name}, listed in its {INDEX}", "download it again")
        paths = [path for path in sorted((root / name).rglob("*")) if path.is_file()]
        if name == trained:
            paths = [
                path for path in paths if path.suffix == ".json" and ".index." not in path.name
            ]
        elif any(p.suffix == ".safetensors" and variant_of(p.name) is None for p in paths):
            paths = [path for path in paths if not _is_another_copy(path)]
        copies += [Copy(path.resolve(), str(path.relative_to(root))) for path in paths]
    return copies


def _is_another_copy(path: Path) -> bool:
    """Whether a file is for what does not load plain safetensors files."""
    return (
        path.suffix in _FOREIGN
        or path.name.startswith(_FOREIGN_NAMES)
        or variant_of(path.name) is not None
    )


def components_of(index: Mapping[str, Any]) -> list[str]:
    """List the components that a model index names as present."""
    return [
        name
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[0] is not None
    ]


def absent_checks(root: Path, index: Mapping[str, Any]) -> list[str]:
    """Parts that a model's index names, that are missing, and that pipelines do without."""
    named = components_of(index)
    absent = [name for name in _CHECKS if name in named and not (root / name).is_dir()]
    return [] if "safety_checker" in named and "safety_checker" not in absent else absent


def write_index_without(names: Iterable[str], index: Mapping[str, Any], directory: Path) -> None:
    """Write into the index of an export that it has no such parts.

    Args:
        names: From `absent_checks`.
        index: The base model's.
        directory: The export.
    """
    changed = {**index, **{name: [None, None] for name in names}}
    if "requires_safety_checker" in changed:
        changed["requires_safety_checker"] = False
    (directory / INDEX).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def bytes_to_copy(files: Iterable[Copy], beside: Path) -> int:
    """Bytes that the files take beside a directory; linked files take none."""
    device = beside.stat().st_dev
    sizes = [copy.source.stat() for copy in files]
    return sum(s.st_size for s in sizes if s.st_dev != device or s.st_size < _LARGE)


def take_over(copy: Copy, directory: Path) -> None:
    """Put a file into the export: cheaply where the file system can, and compared if copied.

    Raises:
        OSError: It could not be written, or is not what it was copied from.
    """
    target = directory / copy.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if copy.source.stat().st_size >= _LARGE and (
        _clone(copy.source, target) or _link(copy, target)
    ):
        return
    shutil.copyfile(copy.source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if not filecmp.cmp(copy.source, target, shallow=False):
        raise OSError(errno.EIO, "it differs from its source", str(target))


def _clone(source: Path, target: Path) -> bool:
    """Share blocks: as cheap as a link, and a change of one file leaves the other alone."""
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            cloned = False
        else:
            cloned = True
    if not cloned:
        target.unlink()
    return cloned


def _link(copy: Copy, target: Path) -> bool:
    try:
        os.link(copy.source, target)
    except OSError:  # another file system, or a file that is not ours to link
        return False
    return True
