"""A folder of captioned pictures such as people have: every format, and everything wrong.

`write_zoo` writes it and says what it planted; `specimens` gives the bytes alone. The same seed
gives the same bytes.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from tests.support.images import icc_profiles as icc
from tests.support.images.encoded import (
    chunk,
    exif,
    grey16,
    hollow_png,
    inks,
    paint,
    png,
    saved,
    see_through,
    tiff,
    wide,
    without_adobe_marker,
    ycck_jpeg,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Maker = Callable[[Image.Image, random.Random], bytes]

CAPTIONS: Final = ("plain", "missing", "empty", "blank", "bom", "lines", "utf-16", "latin-1")
_BROKEN_EXIF: Final = b"Exif\0\0MM\0*\0\0\1\0" + b"\7" * 9
Image.init()  # all formats: whether this Pillow can write AVIF is asked below
_NO_FILES: Final = ("folder", "broken link")


@dataclass(frozen=True)
class Specimen:
    """A kind of picture as bytes, and the suffix it goes by."""

    kind: str
    suffix: str
    content: bytes
    decodes: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Planted:
    """One picture of the zoo.

    Args:
        kind: What was planted.
        decodes: The picture can be used.
        notes: What should be said about it, if it can.
        caption: How its caption is kept: one of `CAPTIONS`.
        text: What the caption says, without the white space around it; None if there is none, or
            it is not UTF-8.
    """

    kind: str
    decodes: bool
    notes: tuple[str, ...] = ()
    caption: str = "plain"
    text: str | None = None

    @property
    def usable(self) -> bool:
        """Picture and caption can be read; the caption may be empty."""
        return self.decodes and self.text is not None


@dataclass(frozen=True)
class Zoo:
    """What lies under `root`, by relative name."""

    root: Path
    planted: dict[str, Planted]


def write_zoo(root: Path, count: int, seed: int = 0) -> Zoo:
    """Write `count` pictures, captions beside them; each kind comes once before any comes twice.

    Two kinds are no files: a folder called like a picture, and a dangling link.
    """
    planted: dict[str, Planted] = {}
    folders = [root, root / "deep" / "er", root / "with space", root / "ünïcode"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        stem = rng.choice(folders) / f"{number:05d}"
        index = number % (len(_KINDS) + len(_NO_FILES))
        if index < len(_KINDS):
            specimen = _specimen(index, rng)
            path = stem.with_suffix(specimen.suffix)
            path.write_bytes(specimen.content)
            animal = Planted(specimen.kind, specimen.decodes, specimen.notes)
        else:
            animal = Planted(_NO_FILES[index - len(_KINDS)], decodes=False)
            path = stem.with_suffix(".png")
            if animal.kind == "folder":
                path.mkdir()
            else:
                path.symlink_to(root / "nowhere.png")
        how = "plain" if rng.random() < 0.8 else rng.choice(CAPTIONS)
        text = _write_caption(path, how, f"{animal.kind}, number {number}")
        planted[path.relative_to(root).as_posix()] = replace(animal, caption=how, text=text)
    return Zoo(root, planted)


def specimens(seed: int = 0) -> list[Specimen]:
    """One of each kind that is a file."""
    return [_specimen(i, random.Random(seed * 1_000_003 + i)) for i in range(len(_KINDS))]


def _specimen(index: int, rng: random.Random) -> Specimen:
    kind, suffix, notes, make = _KINDS[index]
    content = make(paint(rng), rng)
    words = () if notes is None else tuple(sorted(notes.split()))
    return Specimen(kind, suffix, content, notes is not None, words)


def _write_caption(picture: Path, how: str, text: str) -> str | None:
    """Write a caption beside the picture, and return what it says to one who reads UTF-8."""
    contents: dict[str, tuple[bytes | None, str | None]] = {
        "plain": (text.encode(), text),
        "missing": (None, None),
        "empty": (b"", ""),
        "blank": (b" \n\n", ""),
        "bom": (b"\xef\xbb\xbf" + text.encode(), text),
        "lines": (
            f"{text}\nand a second line\n\nand a last one\n".encode(),
            f"{text}\nand a second line\n\nand a last one",
        ),
        "utf-16": (text.encode("utf-16"), None),
        "latin-1": (f"{text}, très grand".encode("latin-1"), None),
    }
    content, says = contents[how]
    if content is not None:
        picture.with_suffix(".txt").write_bytes(content)
    return says


def _jpeg(picture: Image.Image, **options: Any) -> bytes:
    return saved(picture, "JPEG", **{"quality": 90, "subsampling": 0, **options})


def _png(picture: Image.Image, **options: Any) -> bytes:
    return saved(picture, "PNG", compress_level=1, **options)


def _turned(picture: Image.Image) -> list[Image.Image]:
    return [picture.transpose(Image.Transpose.ROTATE_180), picture.rotate(20)]


def _cut(content: bytes, rng: random.Random) -> bytes:
    """The beginning, never more than four fifths."""
    return content[: rng.randint(1, len(content) * 4 // 5)]


def _half_zeros(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes(len(content) - half)


def _palette(picture: Image.Image, colours: int = 32) -> Image.Image:
    return picture.quantize(colours, Image.Quantize.FASTOCTREE)


def _float_tiff(picture: Image.Image, low: float, high: float) -> bytes:
    values = np.linspace(low, high, picture.width * picture.height, dtype=np.float32)
    return saved(Image.fromarray(values.reshape(picture.height, picture.width)), "TIFF")


def _wide_rgb_tiff(picture: Image.Image) -> bytes:
    tags = {258: (16, 16, 16), 262: (2,), 277: (3,)}
    return tiff(picture.size, wide(picture, "<"), tags)


def _grey_tiff_from_white(picture: Image.Image) -> bytes:
    return tiff(picture.size, wide(picture.convert("L"), "<"), {258: (16,), 262: (0,)})


def _transparent_colour(picture: Image.Image) -> bytes:
    """An RGB PNG whose first pixel's colour is said to be transparent."""
    key = struct.pack(">3H", *np.asarray(picture)[0, 0])
    return png(*picture.size, 8, 2, picture.tobytes(), chunk(b"tRNS", key))


def _bomb_bmp(picture: Image.Image) -> bytes:
    content = saved(picture, "BMP")
    return content[:18] + struct.pack("<ii", 50_000, 50_000) + content[26:]


def _words(text: str) -> Maker:
    return lambda picture, rng: f"{text}<!-- {rng.random()} -->".encode()


# Kind, suffix, the notes that are expected (None: it cannot be used), and how it is made.
_KINDS: Final[list[tuple[str, str, str | None, Maker]]] = [
    ("plain jpeg", ".jpg", "", lambda p, r: _jpeg(p)),
    ("plain png", ".png", "", lambda p, r: _png(p)),
    ("plain webp", ".webp", "", lambda p, r: saved(p, "WEBP", quality=90, method=0)),
    ("truncated jpeg", ".jpg", None, lambda p, r: _cut(_jpeg(p), r)),
    ("cmyk jpeg", ".jpg", "cmyk", lambda p, r: _jpeg(inks(p))),
    ("16-bit grey png", ".png", "16-bit grey", lambda p, r: _png(grey16(p))),
    ("rgba png", ".png", "transparent", lambda p, r: _png(see_through(p, "RGBA"))),
    (
        "animated gif",
        ".gif",
        "animated palette",
        lambda p, r: saved(
            _palette(p), "GIF", save_all=True, append_images=[_palette(q) for q in _turned(p)]
        ),
    ),
    *(
        (
            f"exif {value} jpeg",
            ".jpg",
            "rotated" if value > 1 else "",
            lambda p, r, value=value: _jpeg(p, exif=exif(value)),
        )
        for value in range(1, 9)
    ),
    ("exif 6 png", ".png", "rotated", lambda p, r: _png(p, exif=exif(6))),
    ("exif 8 webp", ".webp", "rotated", lambda p, r: saved(p, "WEBP", method=0, exif=exif(8))),
    ("exif 6 tiff", ".tif", "rotated", lambda p, r: saved(p, "TIFF", exif=exif(6))),
    ("broken exif jpeg", ".jpg", "", lambda p, r: _jpeg(p, exif=_BROKEN_EXIF)),
    ("progressive jpeg", ".jpeg", "", lambda p, r: _jpeg(p, progressive=True)),
    ("grey jpeg", ".JPG", "grey", lambda p, r: _jpeg(p.convert("L"))),
    (
        "cmyk jpeg with profile",
        ".jpg",
        "cmyk profile",
        lambda p, r: _jpeg(inks(p), icc_profile=icc.press_cmyk()),
    ),
    (
        "cmyk jpeg with broken profile",
        ".jpg",
        "cmyk",
        lambda p, r: _jpeg(inks(p), icc_profile=b"not a profile" * 20),
    ),
    (
        "cmyk jpeg without adobe marker",
        ".jpg",
        "cmyk",
        lambda p, r: without_adobe_marker(_jpeg(inks(p))),
    ),
    ("ycck jpeg", ".jpg", "cmyk", lambda p, r: ycck_jpeg(inks(p))),
    ("p3 jpeg", ".jpg", "profile", lambda p, r: _jpeg(p, icc_profile=icc.display_p3())),
    ("p3 png", ".png", "profile", lambda p, r: _png(p, icc_profile=icc.display_p3())),
    (
        "p3 webp",
        ".webp",
        "profile",
        lambda p, r: saved(p, "WEBP", lossless=True, method=0, icc_profile=icc.display_p3()),
    ),
    ("adobe rgb jpeg", ".jpg", "profile", lambda p, r: _jpeg(p, icc_profile=icc.adobe_rgb())),
    ("srgb jpeg", ".jpg", "", lambda p, r: _jpeg(p, icc_profile=icc.srgb_twin())),
    (
        "grey jpeg with profile",
        ".jpg",
        "grey profile",
        lambda p, r: _jpeg(p.convert("L"), icc_profile=icc.linear_grey()),
    ),
    (
        "grey jpeg with rgb profile",
        ".jpg",
        "grey",
        lambda p, r: _jpeg(p.convert("L"), icc_profile=icc.display_p3()),
    ),
    ("rgb jpeg with cmyk profile", ".jpg", "", lambda p, r: _jpeg(p, icc_profile=icc.press_cmyk())),
    (
        "palette png with p3 profile",
        ".png",
        "palette profile",
        lambda p, r: _png(_palette(p), icc_profile=icc.display_p3()),
    ),
    (
        "stereo jpeg",
        ".jpg",
        "",
        lambda p, r: saved(p, "MPO", save_all=True, append_images=_turned(p)[:1]),
    ),
    ("1-bit png", ".png", "grey", lambda p, r: _png(p.convert("1"))),
    ("grey png", ".png", "grey", lambda p, r: _png(p.convert("L"))),
    ("grey alpha png", ".png", "grey transparent", lambda p, r: _png(see_through(p, "LA"))),
    ("opaque rgba png", ".png", "", lambda p, r: _png(p.convert("RGBA"))),
    ("palette png", ".png", "palette", lambda p, r: _png(_palette(p))),
    (
        "palette png with alpha",
        ".png",
        "palette transparent",
        lambda p, r: _png(_palette(p), transparency=bytes(range(0, 256, 8))),
    ),
    ("png with transparent colour", ".png", "transparent", lambda p, r: _transparent_colour(p)),
    ("16-bit rgb png", ".png", "16-bit", lambda p, r: png(*p.size, 16, 2, wide(p, ">"))),
    (
        "interlaced apng",
        ".png",
        "animated",
        lambda p, r: _png(p, save_all=True, append_images=_turned(p), duration=50),
    ),
    (
        "animated webp",
        ".webp",
        "animated",
        lambda p, r: saved(p, "WEBP", save_all=True, append_images=_turned(p), method=0),
    ),
    (
        "rgba webp",
        ".webp",
        "transparent",
        lambda p, r: saved(see_through(p, "RGBA"), "WEBP", method=0),
    ),
    ("gif", ".gif", "palette", lambda p, r: saved(_palette(p), "GIF")),
    (
        "gif with transparency",
        ".gif",
        "palette transparent",
        lambda p, r: saved(_palette(p), "GIF", transparency=_palette(p).getpixel((0, 0))),
    ),
    ("bmp", ".bmp", "", lambda p, r: saved(p, "BMP")),
    ("palette bmp", ".bmp", "palette", lambda p, r: saved(_palette(p), "BMP")),
    ("tiff", ".tif", "", lambda p, r: saved(p, "TIFF")),
    ("lzw tiff", ".tiff", "", lambda p, r: saved(p, "TIFF", compression="tiff_lzw")),
    ("cmyk tiff", ".tif", "cmyk", lambda p, r: saved(inks(p), "TIFF")),
    (
        "lab tiff",
        ".tif",
        "",
        lambda p, r: saved(Image.frombytes("LAB", p.size, p.tobytes()), "TIFF"),
    ),
    ("16-bit grey tiff", ".tif", "16-bit grey", lambda p, r: saved(grey16(p), "TIFF")),
    (
        "16-bit grey tiff, big-endian",
        ".tif",
        "16-bit grey",
        lambda p, r: saved(grey16(p, "I;16B"), "TIFF"),
    ),
    ("16-bit grey tiff from white", ".tif", "16-bit grey", lambda p, r: _grey_tiff_from_white(p)),
    ("16-bit rgb tiff", ".tif", "16-bit", lambda p, r: _wide_rgb_tiff(p)),
    ("float tiff", ".tif", "float grey", lambda p, r: _float_tiff(p, r.random() / 4, 1.0)),
    ("float tiff up to 255", ".tif", None, lambda p, r: _float_tiff(p, r.random(), 255.0)),
    (
        "tiff of several pages",
        ".tif",
        "animated",
        lambda p, r: saved(p, "TIFF", save_all=True, append_images=_turned(p)),
    ),
    (
        "16-bit pgm",
        ".pgm",
        "16-bit grey",
        lambda p, r: b"P5 %d %d 65535 " % p.size + wide(p.convert("L"), ">"),
    ),
    ("jpeg 2000", ".jp2", "", lambda p, r: saved(p, "JPEG2000")),
    *(
        [("avif", ".avif", "", lambda p, r: saved(p, "AVIF", speed=10, max_threads=1))]
        if "AVIF" in Image.SAVE
        else []
    ),
    ("jpeg called png", ".png", "", lambda p, r: _jpeg(p)),
    ("webp called jpg", ".jpg", "", lambda p, r: saved(p, "WEBP", method=0)),
    ("gif called jpg", ".jpg", "palette", lambda p, r: saved(_palette(p), "GIF")),
    ("1x1 png", ".png", "", lambda p, r: _png(p.resize((1, 1)))),
    ("40:1 jpeg", ".jpg", "", lambda p, r: _jpeg(paint(r, 1600, 40))),
    ("1:40 png", ".png", "", lambda p, r: _png(paint(r, 12, 480))),
    ("empty file", ".png", None, lambda p, r: b""),
    ("text called png", ".png", None, _words("not an image")),
    ("web page called jpg", ".jpg", None, _words("<!DOCTYPE html>\n<html><body>404</body></html>")),
    ("git lfs pointer", ".png", None, _words("version https://git-lfs.github.com/spec/v1\noid ")),
    ("noise called jpg", ".jpg", None, lambda p, r: b"\1" + r.randbytes(3000)),
    ("zeros called jpg", ".jpg", None, lambda p, r: bytes(r.randint(1000, 5000))),
    ("jpeg half zeros", ".jpg", None, lambda p, r: _half_zeros(_jpeg(p))),
    ("png half zeros", ".png", None, lambda p, r: _half_zeros(_png(p))),
    ("truncated progressive jpeg", ".jpg", None, lambda p, r: _cut(_jpeg(p, progressive=True), r)),
    ("truncated png", ".png", None, lambda p, r: _cut(_png(p), r)),
    ("truncated webp", ".webp", None, lambda p, r: _cut(saved(p, "WEBP", method=0), r)),
    ("truncated bmp", ".bmp", None, lambda p, r: _cut(saved(p, "BMP"), r)),
    ("truncated gif", ".gif", None, lambda p, r: _cut(saved(_palette(p), "GIF"), r)),
    ("truncated tiff", ".tif", None, lambda p, r: _cut(saved(p, "TIFF"), r)),
    ("bomb png", ".png", None, lambda p, r: hollow_png(r.randint(20_000, 60_000), 20_000)),
    ("bomb bmp", ".bmp", None, lambda p, r: _bomb_bmp(p)),
    (
        "huge png without pixels",
        ".png",
        None,
        lambda p, r: hollow_png(r.randint(9_000, 13_000), 12_000),
    ),
    ("heic", ".heic", None, lambda p, r: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + r.randbytes(500)),
    ("svg", ".svg", None, _words('<?xml version="1.0"?>\n<svg xmlns="x"><rect/></svg>')),
    ("psd", ".psd", None, lambda p, r: b"8BPS\0\1" + bytes(6) + b"\0\3" + r.randbytes(500)),
]
