"""Why bytes are not an image that can be used, in words for the user who has the file."""

from __future__ import annotations

import re
from typing import Final, Literal

from PIL import Image, UnidentifiedImageError

MOST_PIXELS: Final = 178_956_970  # where Pillow stops too: 512 MiB as RGB
LARGE_PIXELS: Final = 4_000_000  # up to here a wrong size does no harm
PIXELS_PER_BYTE: Final = 10_000  # deflate packs at most 8,256 pixels of one bit into a byte
TOO_MANY_PIXELS: Final = f"more than {MOST_PIXELS // 1_000_000} megapixels; downscale it"

_READ: Final = (  # how the formats begin that are read
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
    """In few words, why Pillow gave up on the content with this error."""
    if isinstance(error, Image.DecompressionBombError):
        return TOO_MANY_PIXELS
    if isinstance(error, MemoryError):
        return "needs more memory than available"
    kind = next((name for begins, name in _READ if begins.match(content)), None)
    if kind is None:
        foreign = (what for begins, what in _FOREIGN if begins.match(content))
        return next(foreign, "not an image")
    says = str(error).lower()
    if "decompressed data too large" in says:  # Pillow's guard against bombs in metadata
        return "its text or profile is too large"
    if "truncated" in says or _breaks_off(content, kind):
        return "truncated"
    if isinstance(error, UnidentifiedImageError):
        return f"damaged, or an unsupported kind of {kind}"
    return f"damaged ({str(error)[:80] or type(error).__name__})"


def _breaks_off(content: bytes, kind: str) -> bool:
    """Whether the end is missing, as far as the format shows without decoding."""
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
        case "AVIF" | "JPEG 2000":  # a chain of boxes, each beginning with its length
            at = 0
            while at + 8 <= size and (length := int.from_bytes(content[at : at + 4], "big")) >= 8:
                at += length
            return at > size
    return False
