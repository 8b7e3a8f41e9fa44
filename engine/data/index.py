"""What the dataset holds: every usable picture with its caption, size and content hash."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from PIL import Image, UnidentifiedImageError

from jobs.errors import UserError
from jobs.pictures import list_pictures
from jobs.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_EXIF_ORIENTATION: Final = 0x0112
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})  # orientations that swap width and height


@dataclass(frozen=True)
class Sample:
    """A picture to train on. `width` and `height` in pixels, as displayed."""

    path: str
    caption: str
    width: int
    height: int
    digest: str


@dataclass(frozen=True)
class DataIndex:
    """All samples in a fixed order, and what was left out and why."""

    root: str
    samples: list[Sample]
    skipped: list[tuple[str, str]]

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> DataIndex:
        data = read_json(path)
        if data is None:
            raise RuntimeError(f"{path} is missing or damaged")
        return cls(
            data["root"],
            [Sample(**sample) for sample in data["samples"]],
            [(name, why) for name, why in data["skipped"]],
        )


def build_index(root: Path, progress: Callable[[int], None] = lambda done: None) -> DataIndex:
    """Look at every picture once.

    Args:
        root: The dataset folder.
        progress: Called with the number of pictures done.

    Raises:
        UserError: Nothing usable is left.
    """
    samples: list[Sample] = []
    skipped: list[tuple[str, str]] = []
    pictures = list_pictures(root)
    with ThreadPoolExecutor(max_workers=8) as pool:  # reading and hashing release the GIL
        for done, outcome in enumerate(pool.map(_look_at, pictures), start=1):
            if isinstance(outcome, Sample):
                samples.append(outcome)
            else:
                skipped.append((str(pictures[done - 1].relative_to(root)), outcome))
            progress(done)
    if not samples:
        name, why = skipped[0] if skipped else ("no file", "0 pictures")
        raise UserError(f"no usable picture in {root}", f"{name}: {why}")
    return DataIndex(str(root), samples, skipped)


def open_picture(path: str) -> Image.Image:
    """The picture as displayed, in RGB; transparent parts become white."""
    from PIL import ImageOps

    with Image.open(path) as file:
        picture = ImageOps.exif_transpose(file)
        if "A" in picture.getbands() or "transparency" in picture.info:
            rgba = picture.convert("RGBA")
            white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, rgba).convert("RGB")
        return picture.convert("RGB")


def _look_at(path: Path) -> Sample | str:
    """The sample, or why the picture is left out."""
    caption_file = path.with_suffix(".txt")
    try:
        caption = caption_file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "no caption file"
    except (OSError, UnicodeDecodeError) as error:
        return f"caption cannot be read ({error})"
    try:
        content = path.read_bytes()
        with Image.open(path) as picture:
            width, height = picture.size
            if picture.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS:
                width, height = height, width
            picture.load()
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
        return f"cannot be read ({error})"
    return Sample(str(path), caption, width, height, hashlib.sha256(content).hexdigest())
