"""Decoded images, small enough to keep some of them."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

_MOST: Final = 48 << 20  # bytes of pixels
_LONGEST: Final = 120_000_000  # pixels; a larger file is no sample


class BrokenPictureError(Exception):
    """A file that is no image, or not yet a whole one."""


class Thumbnails:
    """The images used last; safe to use from several threads."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[Path, float, int], Image] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def cached(self, path: Path, time: float, longest: int) -> Image | None:
        """Return an image that needs no decoding."""
        with self._lock:
            image = self._kept.get((path, time, longest))
            if image is not None:
                self._kept.move_to_end((path, time, longest))
            return image

    def load(self, path: Path, time: float, longest: int) -> Image:
        """Decode an image, its longer side at most so long.

        Args:
            path: The file.
            time: When it was written; another time is another image.
            longest: In pixels.

        Raises:
            BrokenPictureError: It cannot be decoded; says why.
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
    """Return an image in RGB, its longer side at most so long.

    Raises:
        BrokenPictureError: It cannot be decoded; says why.
    """
    from PIL import Image, UnidentifiedImageError  # only who looks at images waits for it

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
