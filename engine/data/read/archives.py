"""WebDataset archives: tar files of images and captions with equal names, unpacked once.

Each archive is read from front to back into a folder of the cache, which is complete or absent;
from then on it is read like any other folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from engine.data.read.folders import Entry, Source, read_folder
from jobs.errors import DiskFullError
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES, PICTURE_SUFFIXES, VIDEO_SUFFIXES
from jobs.untrusted.files import LARGEST_PICTURE

if TYPE_CHECKING:
    from jobs.spec.values.datasets import Dataset

# Of an archive's own size, what its files may take: images do not shrink, and text does by ten.
_LARGEST_RATIO: Final = 100
_ANYWAY: Final = 1 << 30  # bytes that any archive may have
_WANTED: Final = PICTURE_SUFFIXES | VIDEO_SUFFIXES | {name.lower() for name in CAPTION_SUFFIXES}


def read_archives(dataset: Dataset, cache: Path, *, videos: bool) -> Source:
    """Read the archives of a dataset; unpack those that are new.

    Args:
        dataset: Its `path` is a folder of tar files.
        cache: Where to unpack them.
        videos: Whether the model trains on videos.

    Raises:
        DiskFullError: The cache has no room for them.
        UserError: A metadata file in one cannot be read.
    """
    root = Path(dataset.path)
    entries: list[Entry] = []
    others: Counter[str] = Counter()
    for archive in sorted(root.rglob("*.tar")):
        name = str(archive.relative_to(root))
        try:
            folder = _unpacked(archive, cache / "webdataset")
        except (tarfile.TarError, EOFError) as error:
            entries.append(Entry(name, archive, problem=f"a damaged archive ({error})"))
            continue
        except OSError as error:
            if error.filename and str(error.filename).startswith(str(cache)):
                raise DiskFullError(
                    f"cannot unpack {archive} into {cache} ({error.strerror})",
                    "free space, or set cache_dir to another directory",
                ) from None
            why = error.strerror or error
            entries.append(Entry(name, archive, problem=f"cannot be read ({why})"))
            continue
        source = read_folder(dataset.model_copy(update={"path": str(folder)}), videos=videos)
        entries += [replace(entry, name=f"{name}/{entry.name}") for entry in source.entries]
        others += source.others
    return Source(entries, others)


def _unpacked(archive: Path, cache: Path) -> Path:
    """Return the folder with an archive's files; a changed archive gets a new folder."""
    status = archive.stat()
    facts = f"{archive.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    folder = cache / hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()[:24]
    if folder.is_dir():
        return folder
    aside = cache / f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        aside.mkdir(parents=True)
        left = _ANYWAY + _LARGEST_RATIO * status.st_size
        with tarfile.open(archive, "r|*") as stream:  # never goes back, as slow disks like it
            for member in stream:
                left -= member.size
                if left < 0:  # compressed so highly that reading or skipping it takes hours
                    ratio = f"{_LARGEST_RATIO} times its own size"
                    raise tarfile.ReadError(f"its files take more than {ratio}")
                place = _place(member)
                if place is not None and (content := stream.extractfile(member)) is not None:
                    target = aside / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with content, open(target, "wb") as file:
                        shutil.copyfileobj(content, file)
        try:
            os.rename(aside, folder)
        except OSError:  # another job was quicker
            if not folder.is_dir():
                raise
        return folder
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _place(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Return a member's path below the folder; None if it is not a sample, or would be outside."""
    path = PurePosixPath(member.name)
    parts = [part for part in path.parts if part != "."]
    if not member.isfile() or member.size > LARGEST_PICTURE or path.is_absolute():
        return None
    if ".." in parts or path.suffix.lower() not in _WANTED:
        return None
    return PurePosixPath(*parts)
