"""Classify the files of a dataset folder: samples, masks, captions, others."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# Formats that Pillow reads with the help of a package: the module, and the package's name.
_HELPERS: Final = {
    **dict.fromkeys((".heic", ".heif", ".hif"), ("pillow_heif", "pillow-heif")),
    ".jxl": ("pillow_jxl", "pillow-jxl-plugin"),
}
READ_WITH_HELP: Final = frozenset(_HELPERS)
PICTURE_SUFFIXES: Final = frozenset(
    {suffix for suffix, (module, _) in _HELPERS.items() if find_spec(module)}
    | {
        ".png",
        ".jpg",
        ".jpeg",
        ".jfif",
        ".webp",
        ".bmp",
        ".tif",
        ".tiff",
        ".gif",
        ".avif",
        ".jp2",
        ".ppm",
        ".pgm",
        ".pnm",
        ".qoi",
    }
)
VIDEO_SUFFIXES: Final = frozenset({".mp4", ".mov", ".webm", ".mkv", ".avi", ".m4v"})
# Images that cannot be read: reported instead of silently skipped.
FOREIGN_SUFFIXES: Final = (
    frozenset(
        {
            *_HELPERS,
            ".svg",
            ".psd",
            ".exr",
            ".hdr",
            ".raw",
            ".dng",
            ".cr2",
            ".cr3",
            ".nef",
            ".arw",
            ".ico",
            ".tga",
        }
    )
    - PICTURE_SUFFIXES
)
# Metadata files of the imagefolder layout and of kohya's scripts.
METADATA: Final = (
    "metadata.jsonl",
    "metadata.csv",
    "metadata.parquet",
    "meta_cap.json",
    "meta_clean.json",
    "meta_lat.json",
)
# In search order.
CAPTION_SUFFIXES: Final = (".txt", ".TXT", ".caption", ".json")


_MASK: Final = re.compile(r"(?P<stem>.+)[-_]mask(?:label)?")  # OneTrainer writes `-masklabel`


def masked_stem(stem: str) -> str | None:
    """Return the stem of the image to which a mask belongs, judging by the mask's name.

    None if the name is not a mask's.
    """
    match = _MASK.fullmatch(stem)
    return match["stem"] if match else None


def without_masks(pictures: list[Path], folder: Path | None) -> list[Path]:
    """Drop images that are named as masks of neighboring images or are in the masks' folder."""
    pictures = [path for path in pictures if folder not in path.parents]
    stems = {path.with_suffix("") for path in pictures}

    def is_mask(path: Path) -> bool:
        stem = masked_stem(path.stem)
        return stem is not None and path.with_name(stem) in stems

    return [path for path in pictures if not is_mask(path)]


@dataclass
class Listing:
    """The files below a folder, in a fixed order, without hidden ones.

    Attributes:
        pictures: Files with names of images.
        videos: Files with names of videos.
        foreign: Images of unsupported formats.
        metadata: Files with captions of many images (`METADATA`).
        lonely: Caption files without an image or video of the same name.
        folders: Folders with the name of an image.
        renamed: Caption files with non-ASCII names, by `same_name` of their paths: macOS encodes
            accents differently from other systems.
        unreadable: Folders that cannot be read, and why.
        others: Kind of file → count, for everything but caption files.
    """

    pictures: list[Path] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    metadata: list[Path] = field(default_factory=list)
    lonely: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    renamed: dict[str, Path] = field(default_factory=dict)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def list_files(root: Path) -> Listing:
    """List a folder recursively, following links to folders, each folder once."""
    listing = Listing()
    seen: set[tuple[int, int]] = set()

    def refused(error: OSError) -> None:
        listing.unreadable.append((Path(error.filename), error.strerror or str(error)))

    for folder, folders, names in os.walk(root, followlinks=True, onerror=refused):
        try:
            status = os.stat(folder)
        except OSError as error:
            refused(error)
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in names if not name.startswith("."))
        for name in names:
            _sort_in(listing, Path(folder, name))
        _match_captions(listing, folder, names)
        listing.folders += [Path(folder, name) for name in folders if _is_picture(name)]
    listing.pictures.sort()
    listing.videos.sort()
    return listing


def same_name(path: Path | str) -> str:
    """Normalize the accents in a path (NFC)."""
    return unicodedata.normalize("NFC", os.fspath(path))


def foreign_problem(path: Path) -> str:
    """Return why a file of an unsupported format cannot be used, and a remedy."""
    suffix = path.suffix.lower()
    if suffix in _HELPERS:
        package = _HELPERS[suffix][1]
        return f"{suffix} images need a package that is not installed; pip install {package}"
    return f"{suffix} images cannot be read"


def _match_captions(listing: Listing, folder: str, names: list[str]) -> None:
    """Find a folder's caption files without a partner, and those with non-ASCII names."""
    split = [os.path.splitext(name) for name in names if name not in METADATA]
    stems = {same_name(stem) for stem, suffix in split if suffix not in CAPTION_SUFFIXES}
    for stem, suffix in split:
        if suffix not in CAPTION_SUFFIXES:
            continue
        path = Path(folder, stem + suffix)
        if same_name(stem) not in stems:
            if suffix == ".json":  # most likely the settings of a tool
                listing.others[".json files"] += 1
            else:
                listing.lonely.append(path)
        elif not stem.isascii():
            listing.renamed[same_name(path)] = path


def _sort_in(listing: Listing, path: Path) -> None:
    suffix = path.suffix.lower()
    if path.name in METADATA:
        listing.metadata.append(path)
    elif _is_picture(path.name):
        listing.pictures.append(path)
    elif suffix in VIDEO_SUFFIXES:
        listing.videos.append(path)
    elif suffix in FOREIGN_SUFFIXES:
        listing.foreign.append(path)
    elif path.suffix not in CAPTION_SUFFIXES:
        listing.others[f"{suffix} files" if suffix else "files without an extension"] += 1


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES
