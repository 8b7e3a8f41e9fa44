"""Images of any common format, decoded to what a screen would show.

An image comes as bytes: the content of a file, or a cell of a table. However it is stored, the
result is 8-bit RGB, upright, in sRGB, on white where it was transparent. What cannot be decoded
completely raises `PictureError`; nothing else is raised, and nothing is printed.

Only formats that say in their first bytes what they are, and that a library decodes, are read.
Pillow would also guess (TGA) and start a program (EPS), which a folder of downloads does not
deserve.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import logging
import re
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from PIL import Image, ImageFile, _imaging

from engine.data.read.colors import RangeError, opacity_of, to_rgb
from engine.data.read.unreadable import (
    LARGE_PIXELS,
    MOST_PIXELS,
    PIXELS_PER_BYTE,
    TOO_MANY_PIXELS,
    why_unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DECODER: Final = 1  # part of cache keys: increment it when the output of `decode` changes

NOTES: Final[dict[str, str]] = {
    "16-bit": "more than 8 bits per channel, reduced to 8",
    "animated": "several frames or pages, only the first used",
    "cmyk": "CMYK, converted to RGB",
    "float": "floating point, scaled from 0..1",
    "grey": "grayscale, converted to RGB",
    "palette": "palette of up to 256 colors, converted to RGB",
    "profile": "converted to sRGB with the embedded profile",
    "rotated": "rotated or flipped by its orientation tag",
    "transparent": "transparent, placed on white",
}

_FORMATS: Final = (
    "AVIF",
    "BMP",
    "GIF",
    "HEIF",
    "JPEG",
    "JPEG2000",
    "JXL",
    "PNG",
    "PPM",
    "QOI",
    "TIFF",
    "WEBP",
)
_ORIENTATION: Final = 0x0112  # this and the next two are tags of Exif and TIFF
_BITS_PER_SAMPLE: Final = 0x0102
_PHOTOMETRIC: Final = 0x0106
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PictureError(Exception):
    """Why an image cannot be used, in a few words."""


@dataclass(frozen=True)
class Look:
    """Facts about an image, read by decoding it.

    Args:
        width: In pixels, as displayed.
        height: In pixels, as displayed.
        digest: SHA-256 of the content, in hexadecimal.
        notes: Keys of `NOTES`, sorted: what was done to read it that users may want to know.
    """

    width: int
    height: int
    digest: str
    notes: tuple[str, ...]


def look(content: bytes) -> Look:
    """Decode an image once, completely, as `decode` does, and report its facts.

    Raises:
        PictureError: It cannot be used; `decode` would raise the same.
    """
    picture, notes = _displayed(content)
    digest = hashlib.sha256(content).hexdigest()
    return Look(picture.width, picture.height, digest, tuple(sorted(notes)))


def decode(content: bytes) -> Image.Image:
    """Return the image in 8-bit RGB, as displayed; of several frames, the first.

    It no longer has a profile or an orientation, so that a saved copy looks the same.

    Raises:
        PictureError: It cannot be used. Damage after the first frame does no harm.
    """
    picture, _ = _displayed(content)
    if isinstance(picture, ImageFile.ImageFile):  # was RGB as stored: leave its file behind
        picture = picture.copy()
    picture.info = {}
    return picture


def decode_opacity(content: bytes) -> Image.Image | None:
    """Return the alpha channel, as displayed, 8-bit; None where all is opaque.

    Raises:
        PictureError: The image cannot be used; `decode` would raise the same.
    """
    _displayed(content)  # refuses
    with Image.open(io.BytesIO(content), formats=_formats()) as file:
        tags: Mapping[int, object] = getattr(file, "tag_v2", {})
        bits = _bits(file, tags, content)
        file.load()
        _correct_transparent_colour(file, bits)
        opacity = opacity_of(file)
        orientation = _orientation(file) if file.format != "TIFF" else None
        if opacity is not None and orientation in _UPRIGHT:
            opacity = opacity.transpose(_UPRIGHT[orientation])
        return opacity


def _displayed(content: bytes) -> tuple[Image.Image, set[str]]:
    """Read an image as displayed, with its notes; raise one kind of error for all of Pillow's."""
    if not content:
        raise PictureError("empty file")
    _silence_pillow()
    try:
        with Image.open(io.BytesIO(content), formats=_formats()) as file:
            return _read(file, content)
    except (PictureError, RangeError) as error:
        raise PictureError(str(error)) from None
    except Exception as error:  # readers raise nearly anything when the bytes are damaged
        raise PictureError(why_unreadable(error, content)) from error


def _read(file: ImageFile.ImageFile, content: bytes) -> tuple[Image.Image, set[str]]:
    if file.width < 1 or file.height < 1:
        raise PictureError("no pixels")
    if file.width * file.height > MOST_PIXELS:  # Pillow's own limit can be switched off
        raise PictureError(TOO_MANY_PIXELS)
    if file.width * file.height > max(LARGE_PIXELS, PIXELS_PER_BYTE * len(content)):
        size = f"{file.width} × {file.height} pixels in {len(content)} bytes"
        raise PictureError(f"damaged ({size})")  # before memory for all of them is taken
    notes = {"animated"} if _has_more_frames(file) else set()
    tags: Mapping[int, object] = getattr(file, "tag_v2", {})  # of a TIFF
    bits = _bits(file, tags, content)
    orientation = tags.get(_ORIENTATION)
    file.load()
    _correct_transparent_colour(file, bits)
    picture, done = to_rgb(file, bits, white_is_zero=tags.get(_PHOTOMETRIC) == 0)
    if file.format != "TIFF":  # which Pillow turns upright when it loads it
        orientation = _orientation(file)
        if orientation in _UPRIGHT:
            picture = picture.transpose(_UPRIGHT[orientation])
    if orientation in _UPRIGHT:
        notes.add("rotated")
    return picture, notes | done


def _has_more_frames(file: ImageFile.ImageFile) -> bool:
    if file.format == "MPO":  # the other eye of a stereo camera, or a preview
        return False
    try:
        return bool(getattr(file, "is_animated", False))
    except Exception:  # damage behind the first frame
        return False


def _bits(file: ImageFile.ImageFile, tags: Mapping[int, object], content: bytes) -> int:
    """Bits per channel as stored, where the format keeps them in sight."""
    if file.format == "PNG":
        return content[24]  # in the header, which comes first in every PNG
    bits = tags.get(_BITS_PER_SAMPLE)
    return max(bits) if isinstance(bits, tuple) and bits else 8


def _correct_transparent_colour(file: ImageFile.ImageFile, bits: int) -> None:
    """Convert a PNG's transparent color from stored bits to the 8 bits that Pillow compares."""
    colour = file.info.get("transparency")
    if file.format != "PNG":
        return
    if file.mode == "RGB" and isinstance(colour, tuple):
        file.info["transparency"] = tuple(v >> 8 if bits == 16 else v & 255 for v in colour)
    elif file.mode in ("1", "L") and isinstance(colour, int):
        top = (1 << bits) - 1
        file.info["transparency"] = (colour & top) * 255 // top


def _orientation(file: ImageFile.ImageFile) -> int | None:
    try:
        orientation = file.getexif().get(_ORIENTATION)
    except Exception:  # damaged Exif data: viewers show the image as stored
        return None
    return orientation if isinstance(orientation, int) else None


@cache
def _formats() -> tuple[str, ...]:
    Image.init()  # 65 ms, once
    # Separate packages, each of which adds a format.
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    with contextlib.suppress(ImportError):
        import pillow_jxl  # noqa: F401
    return tuple(name for name in _FORMATS if name in Image.OPEN)


_QUIET: Final = threading.Lock()
_PILLOW: Final = re.compile(r"PIL\.")


def _silence_pillow() -> None:
    """Keep Pillow's complaints about odd files off the screen: errors and notes say it better.

    `warnings.catch_warnings` would be tidier, but it is not safe in threads; so the filter stays.
    It is checked for each image because others (a test runner) restore their own filters.
    """
    _silence_libtiff()
    with _QUIET:
        if not any(action == "ignore" and m == _PILLOW for action, _, _, m, _ in warnings.filters):
            warnings.filterwarnings("ignore", module=_PILLOW.pattern)
        logging.getLogger("PIL").setLevel(logging.CRITICAL)


@cache
def _silence_libtiff() -> None:
    """libtiff writes to standard error by itself, and Pillow (13) has no switch for that."""
    imaging = ctypes.CDLL(_imaging.__file__)  # also finds the symbols of linked libraries
    with contextlib.suppress(AttributeError):  # a Pillow without libtiff
        imaging.TIFFSetErrorHandler(None)
