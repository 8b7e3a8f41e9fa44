"""A glance at a job's images, as few files and bytes as will do: what of them cannot be used?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.paths import expand
from jobs.preflight.conditioning import samples_in, tell_missing
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES, list_files
from jobs.spec.values.datasets import datasets_of, fallback_caption, find_layout

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import InputKeys

MOST: Final = 500  # images of a folder that are read, evenly spread
_WORTH_TELLING: Final = 0.2  # of them; a few odd ones are in every dataset
_HEAD: Final = 12  # bytes
# How files of images begin: PNG, JPEG, GIF, BMP, TIFF twice, WebP, PNM, QOI, JPEG 2000, and JPEG XL
# twice.
_BEGINNINGS: Final = (
    *(b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM", b"II*\0", b"MM\0*"),
    *(b"RIFF", b"P", b"qoif", b"\0\0\0\x0cjP", b"\xff\x0a", b"\0\0\0\x0cJXL"),
)


def find_unusable(spec: InputKeys) -> list[str]:
    """List which images would be skipped, a sentence for each reason and folder.

    Raises:
        OSError: A folder cannot be read.
    """
    sentences = []
    for dataset in datasets_of(spec):
        root, default = expand(dataset.path), fallback_caption(spec, dataset)
        if find_layout(root) != "folder":
            continue
        files = list_files(root)
        pictures, alone = samples_in(spec, dataset, files)
        sentences += tell_missing(dataset, pictures, alone)
        total = len(pictures)
        seen = pictures[:: -(-total // MOST) or 1]
        broken = sum(not _is_image(path) for path in seen)
        bare = 0
        if not files.metadata and spec.missing_captions == "skip" and not default:
            bare = sum(not _has_caption(path) for path in seen)
        for count, what in ((broken, "not readable"), (bare, "no caption")):
            if seen and count >= max(1, _WORTH_TELLING * len(seen)):
                exact = f"{count} of {total} images"
                share = f"about {count / len(seen):.0%} of {total:,} images"
                which = exact if len(seen) == total else share
                sentences.append(f"{which} in {root}: {what}, will be skipped.")
    return sentences


def _is_image(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return head.startswith(_BEGINNINGS) or head[4:8] == b"ftyp"


def _has_caption(path: Path) -> bool:
    return any(path.with_suffix(suffix).is_file() for suffix in CAPTION_SUFFIXES)
