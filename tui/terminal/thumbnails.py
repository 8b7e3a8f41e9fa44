"""Images small enough to cache, and images as characters."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final

from rich.color import Color
from rich.segment import Segment
from rich.style import Style

from jobs.spec.data_tool import STRIP_GAP

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image


# -- strips ---------------------------------------------------------------------------------
# Images as characters: some of a bucket's samples in half blocks, two pixels to a character.
#
# True-color half blocks work over tmux and SSH, unlike graphics protocols. We render them
# ourselves to send less: similar neighbors share an escape sequence, which saves two thirds
# of the bytes of a smooth image (a noisy
# one: 6 %).


_SPACE: Final = 2  # columns between images
_LEAST: Final = 12  # pixels of an image's longer side below which it is unrecognizable
# Above 0.5 favors fewer and larger images, below it more and smaller ones.
_SIZE_COUNTS: Final = 0.65
_ALIKE: Final = 8  # difference in each channel, out of 255, that is invisible


@dataclass(frozen=True)
class Grid:
    """The layout of a page of images.

    Attributes:
        columns: Images per row.
        rows: Images per column.
        width: Columns of each image.
        height: Pixel height of each; even, as a line has two.
    """

    columns: int
    rows: int
    width: int
    height: int

    @property
    def room(self) -> int:
        return self.columns * self.rows


def find_grid(count: int, aspect: float, columns: int, lines: int) -> Grid | None:
    """Return the best layout: as many images as possible that are still recognizable.

    Args:
        count: Number of images.
        aspect: Width by height of each.
        columns: Width of the area.
        lines: Height of the area.

    Returns:
        None if not even one fits.
    """
    best, most = None, 0.0
    for across in range(1, count + 1):
        for down in range(1, -(-count // across) + 1):
            widest = (columns - (across - 1) * _SPACE) // across
            highest = (lines - (down - 1)) // down * 2  # an empty line between
            height = min(highest, round(widest / aspect)) // 2 * 2
            width = min(widest, round(height * aspect))
            if max(width, height) < _LEAST or min(width, height) < 2:
                continue
            shown = min(count, across * down) * (width * height) ** _SIZE_COUNTS
            if shown > most:
                best, most = Grid(across, down, width, height), shown
    return best


def pictures_of(strip: bytes, aspect: float) -> list[Image]:
    """Cut a strip into its images.

    Args:
        strip: A PNG: images of one size in a row, with gaps around them but not above.
        aspect: Width by height of each.
    """
    from PIL import Image  # imported on demand

    with Image.open(io.BytesIO(strip)) as file:
        row = file.convert("RGB")
    height = row.height - STRIP_GAP
    count = max(1, round((row.width - STRIP_GAP) / (height * aspect + STRIP_GAP)))
    each = (row.width - STRIP_GAP) // count
    return [
        row.crop((left, 0, left + each - STRIP_GAP, height))
        for left in range(STRIP_GAP, STRIP_GAP + count * each, each)
    ]


def draw(
    pictures: list[Image], grid: Grid, columns: int, background: tuple[int, int, int]
) -> list[list[Segment]]:
    """Return lines of segments, each `columns` wide; images beyond the grid are skipped."""
    from PIL import Image

    used = -(-min(len(pictures), grid.room) // grid.columns)
    height = used * (grid.height + 2) - 2
    canvas = Image.new("RGB", (columns, height), background)
    for number, picture in enumerate(pictures[: grid.room]):
        row, column = divmod(number, grid.columns)
        small = picture.resize((grid.width, grid.height), Image.Resampling.BOX)
        canvas.paste(small, (column * (grid.width + _SPACE), row * (grid.height + 2)))
    return [_line(canvas, y) for y in range(0, height, 2)]


def _line(canvas: Image, y: int) -> list[Segment]:
    """Return two rows of pixels as a line; similar neighbors share a segment."""
    pixels = canvas.crop((0, y, canvas.width, y + 2)).tobytes()
    half = canvas.width * 3
    runs: list[tuple[int, bytes, bytes]] = []
    for at in range(0, half, 3):
        upper, lower = pixels[at : at + 3], pixels[half + at : half + at + 3]
        if _alike(upper, lower):  # one color is half an escape sequence
            lower = upper
        count, *before = runs[-1] if runs else (0, b"", b"")
        if count and _alike(before[0], upper) and _alike(before[1], lower):
            runs[-1] = (count + 1, before[0], before[1])
        else:
            runs.append((1, upper, lower))
    return [_segment(*run) for run in runs]


def _alike(first: bytes, other: bytes) -> bool:
    return all(abs(a - b) <= _ALIKE for a, b in zip(first, other, strict=True))


def _segment(count: int, upper: bytes, lower: bytes) -> Segment:
    below = Color.from_rgb(*lower)
    if upper == lower:
        return Segment(" " * count, Style(bgcolor=below))
    return Segment("▀" * count, Style(color=Color.from_rgb(*upper), bgcolor=below))


# -- thumbnails -----------------------------------------------------------------------------
# A cache of decoded images.


_MOST: Final = 48 << 20  # bytes of pixels
_LONGEST: Final = 120_000_000  # pixels; a larger file is no sample


class BrokenPictureError(Exception):
    """The file is no image, or incomplete."""


class Thumbnails:
    """A thread-safe cache of the images used last."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[Path, float, int], Image] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def cached(self, path: Path, time: float, longest: int) -> Image | None:
        """Return an image if it is cached."""
        with self._lock:
            image = self._kept.get((path, time, longest))
            if image is not None:
                self._kept.move_to_end((path, time, longest))
            return image

    def load(self, path: Path, time: float, longest: int) -> Image:
        """Decode an image, scaled down to a longer side of at most `longest`.

        Args:
            path: The file.
            time: When it was written; another time means another image.
            longest: In pixels.

        Raises:
            BrokenPictureError: It cannot be decoded; has the reason.
        """
        if (image := self.cached(path, time, longest)) is not None:
            return image
        image = decode(path, longest)
        with self._lock:
            if (path, time, longest) not in self._kept:  # another thread may have been faster
                self._kept[path, time, longest] = image
                self._bytes += _bytes(image)
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= _bytes(self._kept.popitem(last=False)[1])
        return image


def decode(path: Path, longest: int) -> Image:
    """Return an image in RGB, scaled down to a longer side of at most `longest`.

    Raises:
        BrokenPictureError: It cannot be decoded; has the reason.
    """
    from PIL import Image, UnidentifiedImageError  # imported on demand

    try:
        with Image.open(path) as file:
            if file.width * file.height > _LONGEST:
                raise BrokenPictureError(f"too large: {file.width}×{file.height} pixels")
            file.thumbnail((longest, longest))
            return file.convert("RGB")
    except FileNotFoundError:
        raise BrokenPictureError("gone") from None
    except UnidentifiedImageError:
        raise BrokenPictureError("broken: not an image, or incomplete") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BrokenPictureError(f"broken: {error}") from None


def _bytes(image: Image) -> int:
    return image.width * image.height * 3
