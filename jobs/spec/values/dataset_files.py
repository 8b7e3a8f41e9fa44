"""Which files of a dataset folder are samples, and which are not."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PICTURE_SUFFIXES: Final = frozenset(
    {
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
# Pictures that cannot be read here: named in the report, not passed over.
FOREIGN_SUFFIXES: Final = frozenset(
    {
        ".heic",
        ".heif",
        ".jxl",
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
METADATA: Final = ("metadata.jsonl", "metadata.csv")
# In the order in which they are looked for.
CAPTION_SUFFIXES: Final = (".txt", ".TXT", ".caption")


@dataclass
class Listing:
    """The files below a folder, in a fixed order; hidden ones are passed over.

    Attributes:
        pictures: Files that look like pictures, by their names.
        videos: Files that look like videos.
        foreign: Pictures of formats that cannot be read.
        metadata: `metadata.jsonl` and `metadata.csv` files.
        lonely: Caption files beside which there is nothing of their name.
        folders: Folders with the name of a picture.
        unreadable: Folders that may not be looked into, and why.
        others: What kind of file → count of everything else but caption files.
    """

    pictures: list[Path] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    metadata: list[Path] = field(default_factory=list)
    lonely: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def list_files(root: Path) -> Listing:
    """Look through a folder and all below it; links to folders are followed, once each."""
    found = Listing()
    seen: set[tuple[int, int]] = set()

    def refused(error: OSError) -> None:
        found.unreadable.append((Path(error.filename), error.strerror or str(error)))

    for folder, folders, names in os.walk(root, followlinks=True, onerror=refused):
        try:
            status = os.stat(folder)
        except OSError as error:
            refused(error)
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:  # a link back up
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in names if not name.startswith("."))
        for name in names:
            _sort_in(found, Path(folder, name))
        split = [os.path.splitext(name) for name in names]
        stems = {stem for stem, suffix in split if suffix not in CAPTION_SUFFIXES}
        found.lonely += [
            Path(folder, stem + suffix)
            for stem, suffix in split
            if suffix in CAPTION_SUFFIXES and stem not in stems
        ]
        found.folders += [Path(folder, name) for name in folders if _is_picture(name)]
    found.pictures.sort()
    found.videos.sort()
    return found


def _sort_in(found: Listing, path: Path) -> None:
    suffix = path.suffix.lower()
    if path.name in METADATA:
        found.metadata.append(path)
    elif _is_picture(path.name):
        found.pictures.append(path)
    elif suffix in VIDEO_SUFFIXES:
        found.videos.append(path)
    elif suffix in FOREIGN_SUFFIXES:
        found.foreign.append(path)
    elif path.suffix not in CAPTION_SUFFIXES:
        found.others[f"{suffix} files" if suffix else "files without an extension"] += 1


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES
