"""Decode images of any common format to what a screen would show.

An image comes as bytes: the content of a file, or a cell of a table. However it is stored, the
result is 8-bit RGB, upright, in sRGB, with transparency on white. An image that cannot be decoded
completely raises `PictureError`; nothing else is raised, and nothing is printed.

Only formats that identify themselves by their first bytes and that a library decodes are read.
Pillow would also guess (TGA) and start a program (EPS), which is unsafe for a folder of downloads.
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
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Literal

from PIL import Image, ImageFile, UnidentifiedImageError, _imaging

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.ImageCms import ImageCmsProfile, ImageCmsTransform


# -- unreadable -----------------------------------------------------------------------------
# Explain to the user why bytes are not a usable image.


MOST_PIXELS: Final = 178_956_970  # Pillow's own limit: 512 MiB as RGB
LARGE_PIXELS: Final = 4_000_000  # up to here, a wrong size in the header is harmless
PIXELS_PER_BYTE: Final = 10_000  # deflate packs at most 8,256 one-bit pixels into a byte
TOO_MANY_PIXELS: Final = f"more than {MOST_PIXELS // 1_000_000} megapixels; downscale it"

_READ: Final = (  # first bytes of the supported formats
    (re.compile(rb"\x89PNG"), "PNG"),
    (re.compile(rb"\xff\xd8"), "JPEG"),
    (re.compile(rb"GIF8"), "GIF"),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "WebP"),
    (re.compile(rb"BM.{4}\0{4}", re.DOTALL), "BMP"),
    (re.compile(rb"II[*+]\0|MM\0[*+]"), "TIFF"),
    (re.compile(rb".{4}ftypavi[fs]", re.DOTALL), "AVIF"),
    (re.compile(rb".{4}jP {2}|\xff\x4f\xff\x51", re.DOTALL), "JPEG 2000"),
    (re.compile(rb"qoif"), "QOI"),
    (re.compile(rb"P[1-7fF]\s"), "PPM"),
)
_FOREIGN: Final = (  # other contents of files named like images
    (re.compile(rb".{4}ftyp(hei|hev|mif|msf)", re.DOTALL), "HEIC, which needs pillow-heif"),
    (re.compile(rb"\xff\x0a|.{4}JXL ", re.DOTALL), "JPEG XL, which needs pillow-jxl-plugin"),
    (re.compile(rb"8BPS"), "PSD is not supported"),
    (re.compile(rb"\xc5\xd0\xd3\xc6|%!PS"), "EPS is not supported"),
    (re.compile(rb"\0\0[\1\2]\0[^\0]\0"), "ICO is not supported"),
    (re.compile(rb"%PDF"), "a PDF, not an image"),
    (re.compile(rb".{4}ftyp|\x1a\x45\xdf\xa3|RIFF.{4}AVI ", re.DOTALL), "a video, not an image"),
    (
        re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body)", re.IGNORECASE),
        "a web page, not an image",
    ),
    (re.compile(rb"[^\0]{0,1000}<svg[\s>]", re.DOTALL), "SVG is not supported"),
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer, not the image itself"),
    (re.compile(rb"\0{16}"), "zeros, not an image"),
)


def why_unreadable(error: Exception, content: bytes) -> str:
    """Return, in a few words, why Pillow failed to read the content with this error."""
    if isinstance(error, Image.DecompressionBombError):
        return TOO_MANY_PIXELS
    if isinstance(error, MemoryError):
        return "needs more memory than available"
    kind = next((name for begins, name in _READ if begins.match(content)), None)
    if kind is None:
        foreign = (what for begins, what in _FOREIGN if begins.match(content))
        return next(foreign, "not an image")
    says = str(error).lower()
    if "decompressed data too large" in says:  # Pillow's guard against metadata bombs
        return "its text or profile is too large"
    if "truncated" in says or _breaks_off(content, kind):
        return "truncated"
    if isinstance(error, UnidentifiedImageError):
        return f"damaged, or an unsupported kind of {kind}"
    return f"damaged ({str(error)[:80] or type(error).__name__})"


def _breaks_off(content: bytes, kind: str) -> bool:
    """Return whether the end is missing, if the format shows that without decoding."""
    size = len(content)
    match kind:
        case "PNG":
            return b"IEND" not in content
        case "JPEG":
            return b"\xff\xd9" not in content
        case "GIF":
            return not content.rstrip(b"\0").endswith(b";")
        case "WebP":
            return int.from_bytes(content[4:8], "little") + 8 > size
        case "TIFF":
            order: Literal["little", "big"] = "little" if content[:1] == b"I" else "big"
            at = int.from_bytes(content[4:8], order)  # the directory: a count, entries, a link
            return at + 6 + 12 * int.from_bytes(content[at : at + 2], order) > size
        case "AVIF" | "JPEG 2000":  # a chain of boxes, each starting with its length
            at = 0
            while at + 8 <= size and (length := int.from_bytes(content[at : at + 4], "big")) >= 8:
                at += length
            return at > size
    return False


# -- colors ---------------------------------------------------------------------------------
# Convert the pixel values of any image mode to 8-bit sRGB on white.


_PROFILE_SPACES: Final = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
_SAME_COLOUR: Final = 2  # of 255: a profile that moves no color by more than this counts as sRGB


class RangeError(ValueError):
    """Pixel values whose range of black to white is unknown."""


def to_rgb(
    picture: Image.Image, bits: int = 8, *, white_is_zero: bool = False, alpha: bool = False
) -> tuple[Image.Image, set[str]]:
    """Convert a loaded image of any mode to 8-bit RGB; return it with notes about the conversion.

    Args:
        picture: Its `info` may hold a profile and a transparent color.
        bits: Bits per channel as stored, which Pillow's mode does not always show.
        white_is_zero: Whether 0 means white. Pillow already inverts images of up to 8 bits, so this
            only applies to more.
        alpha: Return RGBA, instead of transparent parts on white.

    Raises:
        RangeError: Gray values exceed the range of their type.
    """
    notes = {"16-bit"} if bits > 8 and picture.mode != "F" else set()
    profile = picture.info.get("icc_profile")
    if picture.mode in ("P", "PA"):
        notes.add("palette")
    elif picture.mode == "CMYK":
        notes.add("cmyk")
    elif picture.mode == "F":
        notes |= {"float", "grey"}
        picture = _from_floats(picture, white_is_zero)
    elif picture.mode.startswith("I"):
        notes |= {"16-bit", "grey"}
        picture = _from_integers(picture, bits, white_is_zero)
    elif picture.mode in ("1", "L", "LA", "La"):
        notes.add("grey")
    if picture.mode == "1":
        picture = picture.convert("L")
    picture, opacity = _split_opacity(picture)
    to_srgb = _to_srgb(profile, picture.mode) if isinstance(profile, bytes) else None
    if to_srgb is not None:
        notes.add("profile")
        picture = to_srgb.apply(picture)
    elif picture.mode != "RGB":
        picture = picture.convert("RGB")
    if opacity is not None:
        notes.add("transparent")
        if not alpha:
            white = Image.new("RGB", picture.size, "white")
            picture = Image.composite(picture, white, opacity)
    if alpha:
        picture = picture.convert("RGBA")
        if opacity is not None:
            picture.putalpha(opacity)
    return picture, notes


def opacity_of(picture: Image.Image) -> Image.Image | None:
    """Return the alpha channel of a loaded image; None if it is fully opaque."""
    return _split_opacity(picture)[1]


def _split_opacity(picture: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the image without its alpha channel, and that channel unless it is fully opaque."""
    if picture.mode in ("P", "PA"):
        picture = picture.convert("RGBA")
    elif picture.mode in ("La", "RGBa"):  # colors are premultiplied by their alpha
        picture = picture.convert(picture.mode.upper())
    elif picture.mode == "L" and "transparency" in picture.info:
        picture = picture.convert("LA")
    elif picture.mode == "RGB" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if picture.mode not in ("LA", "RGBA"):
        return picture, None
    opacity = picture.getchannel("A")
    lowest, _ = opacity.getextrema()
    return picture.convert(picture.mode[:-1]), opacity if lowest != 255 else None


def _from_integers(picture: Image.Image, bits: int, white_is_zero: bool) -> Image.Image:
    """Convert gray of more than 8 bits to 8; Pillow's own conversion clips most values to white."""
    import numpy as np  # 80 ms, and few images need it

    top = 4095 if bits == 12 else 65535
    stored = np.asarray(picture)
    if stored.dtype.itemsize > 2 and (stored.min() < 0 or stored.max() > top):
        raise RangeError(f"gray values outside 0..{top}")
    values = stored.astype(np.uint32)
    grey = (values * 255 + top // 2) // top
    if white_is_zero:
        grey = 255 - grey
    result = Image.fromarray(grey.astype(np.uint8))
    result.info = {key: v for key, v in picture.info.items() if key != "transparency"}
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        opacity = np.where(values == transparent, 0, 255).astype(np.uint8)
        result.putalpha(Image.fromarray(opacity))
    return result


def _from_floats(picture: Image.Image, white_is_zero: bool) -> Image.Image:
    import numpy as np

    values = np.asarray(picture)
    if not (values.min() >= 0.0 and values.max() <= 1.0):  # this form also catches NaN
        raise RangeError("float values outside 0..1")
    if white_is_zero:
        values = 1.0 - values
    return Image.fromarray(np.rint(values * 255.0).astype(np.uint8))


@lru_cache(maxsize=32)
def _to_srgb(profile: bytes, mode: str) -> ImageCmsTransform | None:
    """Return the transform to sRGB for images of a mode with this profile.

    Returns:
        None if no conversion is needed or possible: the profile is broken, belongs to images of
        another mode, or is equivalent to sRGB, as most are.
    """
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _PROFILE_SPACES.get(mode):
            return None
        transform = ImageCms.buildTransform(
            source,
            _srgb(),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        return None if mode in ("L", "RGB") and _changes_nothing(transform, mode) else transform
    except Exception:  # lcms and Pillow raise many exceptions for a broken profile
        return None


def _changes_nothing(transform: ImageCmsTransform, mode: str) -> bool:
    before = _ramp().convert(mode)
    after = transform.apply(before).tobytes()
    pairs = zip(before.convert("RGB").tobytes(), after, strict=True)
    return max(abs(a - b) for a, b in pairs) <= _SAME_COLOUR


@cache
def _srgb() -> ImageCmsProfile:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


@cache
def _ramp() -> Image.Image:
    """Return enough colors and grays to see whether a profile has an effect."""
    steps = range(0, 256, 51)
    cube = [bytes((r, g, b)) for r in steps for g in steps for b in steps]
    greys = [bytes((v, v, v)) for v in range(256)]
    return Image.frombytes("RGB", (len(cube) + len(greys), 1), b"".join(cube + greys))


# -- images ---------------------------------------------------------------------------------


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
_ORIENTATION: Final = 0x0112  # this and the next two are Exif and TIFF tags
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
    """The reason why an image cannot be used, in a few words."""


@dataclass(frozen=True)
class ImageFacts:
    """Facts about an image, read by decoding it.

    Args:
        width: In pixels, as displayed.
        height: In pixels, as displayed.
        digest: SHA-256 of the content, in hexadecimal.
        notes: Sorted keys of `NOTES`: conversions that users may want to know about.
    """

    width: int
    height: int
    digest: str
    notes: tuple[str, ...]


def inspect_image(content: bytes) -> ImageFacts:
    """Decode an image completely, as `decode` does, and report its facts.

    Raises:
        PictureError: The image cannot be used; `decode` would raise the same.
    """
    picture, notes = _displayed(content)
    digest = hashlib.sha256(content).hexdigest()
    return ImageFacts(picture.width, picture.height, digest, tuple(sorted(notes)))


def decode(content: bytes, *, alpha: bool = False) -> Image.Image:
    """Return the image in 8-bit RGB, as displayed; for several frames, the first.

    The result has no profile and no orientation tag, so that a saved copy looks the same.

    Args:
        content: Of the file.
        alpha: Return RGBA, instead of transparent parts on white.

    Raises:
        PictureError: The image cannot be used. Damage after the first frame is ignored.
    """
    picture, _ = _displayed(content, alpha=alpha)
    if isinstance(picture, ImageFile.ImageFile):  # was RGB as stored: detach it from its file
        picture = picture.copy()
    picture.info = {}
    return picture


def decode_opacity(content: bytes) -> Image.Image | None:
    """Return the alpha channel, as displayed, 8-bit; None if the image is fully opaque.

    Raises:
        PictureError: The image cannot be used; `decode` would raise the same.
    """
    _displayed(content)  # raises if the image is unusable
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


def _displayed(content: bytes, *, alpha: bool = False) -> tuple[Image.Image, set[str]]:
    """Read an image as displayed, with its notes, turning all of Pillow's errors into one type."""
    if not content:
        raise PictureError("empty file")
    _silence_pillow()
    try:
        with Image.open(io.BytesIO(content), formats=_formats()) as file:
            return _read(file, content, alpha=alpha)
    except (PictureError, RangeError) as error:
        raise PictureError(str(error)) from None
    except Exception as error:  # readers raise almost anything on damaged bytes
        raise PictureError(why_unreadable(error, content)) from error


def _read(
    file: ImageFile.ImageFile, content: bytes, *, alpha: bool
) -> tuple[Image.Image, set[str]]:
    if file.width < 1 or file.height < 1:
        raise PictureError("no pixels")
    if file.width * file.height > MOST_PIXELS:  # Pillow's own limit can be disabled
        raise PictureError(TOO_MANY_PIXELS)
    if file.width * file.height > max(LARGE_PIXELS, PIXELS_PER_BYTE * len(content)):
        size = f"{file.width} × {file.height} pixels in {len(content)} bytes"
        raise PictureError(f"damaged ({size})")  # raise before allocating memory for all pixels
    notes = {"animated"} if _has_more_frames(file) else set()
    tags: Mapping[int, object] = getattr(file, "tag_v2", {})  # for TIFF
    bits = _bits(file, tags, content)
    orientation = tags.get(_ORIENTATION)
    file.load()
    _correct_transparent_colour(file, bits)
    white_is_zero = tags.get(_PHOTOMETRIC) == 0
    picture, done = to_rgb(file, bits, white_is_zero=white_is_zero, alpha=alpha)
    if file.format != "TIFF":  # Pillow rotates TIFF files itself on loading
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
    except Exception:  # damage after the first frame
        return False


def _bits(file: ImageFile.ImageFile, tags: Mapping[int, object], content: bytes) -> int:
    """Return the bits per channel as stored, or 8 if the format does not expose them."""
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
    # Optional packages, each of which registers a format.
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    with contextlib.suppress(ImportError):
        import pillow_jxl  # noqa: F401
    return tuple(name for name in _FORMATS if name in Image.OPEN)


_QUIET: Final = threading.Lock()
_PILLOW: Final = re.compile(r"PIL\.")


def _silence_pillow() -> None:
    """Suppress Pillow's warnings about unusual files; our errors and notes are clearer.

    `warnings.catch_warnings` would be cleaner, but it is not thread-safe, so the filter is global.
    It is checked for every image because other code (a test runner) may restore its own filters.
    """
    _silence_libtiff()
    with _QUIET:
        if not any(action == "ignore" and m == _PILLOW for action, _, _, m, _ in warnings.filters):
            warnings.filterwarnings("ignore", module=_PILLOW.pattern)
        logging.getLogger("PIL").setLevel(logging.CRITICAL)


@cache
def _silence_libtiff() -> None:
    """Suppress libtiff's own output to standard error, which Pillow (13) cannot disable."""
    imaging = ctypes.CDLL(_imaging.__file__)  # also finds symbols of linked libraries
    with contextlib.suppress(AttributeError):  # a Pillow without libtiff
        imaging.TIFFSetErrorHandler(None)
