"""Pictures as bytes: what Pillow writes, and by hand what it does not."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageChops

if TYPE_CHECKING:
    import random


def paint(rng: random.Random, width: int = 0, height: int = 0) -> Image.Image:
    """Soft patches of strong colours, no two alike; 48 to 160 pixels where no size is given."""
    size = (width or rng.randint(48, 160), height or rng.randint(48, 160))
    patches = rng.randbytes(5 * 4 * 3)
    return Image.frombytes("RGB", (5, 4), patches).resize(size, Image.Resampling.BILINEAR)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    """What Pillow writes."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def inks(picture: Image.Image) -> Image.Image:
    """The picture in CMYK, with a black of its own, not the empty one that Pillow makes."""
    cyan, magenta, yellow, _ = picture.convert("CMYK").split()
    return Image.merge("CMYK", (cyan, magenta, yellow, cyan.point([v // 4 for v in range(256)])))


def grey16(picture: Image.Image, mode: str = "I;16") -> Image.Image:
    order = ">" if mode == "I;16B" else "<"
    return Image.frombytes(mode, picture.size, wide(picture.convert("L"), order))


def wide(picture: Image.Image, order: str) -> bytes:
    """Samples of 8 bits in 16, most significant byte first if `order` is `>`."""
    return (np.asarray(picture).astype(f"{order}u2") * 257).tobytes()


def see_through(picture: Image.Image, mode: str) -> Image.Image:
    """The picture in a mode with alpha: clear at one edge, opaque at the other."""
    ramp = Image.linear_gradient("L").resize(picture.size)
    picture = picture.convert(mode[:-1])
    picture.putalpha(ramp)
    return picture


def ycck_jpeg(picture: Image.Image) -> bytes:
    """A CMYK picture as Photoshop stores it: C, M and Y turned into luma and chroma."""
    cyan, magenta, yellow, black = picture.split()
    luma = Image.merge("RGB", (cyan, magenta, yellow)).convert("YCbCr").split()
    # Pillow stores the complement of what it is given, and an Adobe marker that says CMYK.
    given = [ImageChops.invert(channel) for channel in luma]
    content = saved(Image.merge("CMYK", (*given, black)), "JPEG", quality=95, subsampling=0)
    at = content.index(b"Adobe") + 11
    return content[:at] + b"\2" + content[at + 1 :]


def without_adobe_marker(jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xee")
    (length,) = struct.unpack(">H", jpeg[at + 2 : at + 4])
    return jpeg[:at] + jpeg[at + 2 + length :]


def png(width: int, height: int, bits: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG from raw rows (without filter bytes); `extra` are whole chunks before the pixels."""
    stride = len(rows) // height
    lines = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(lines, 1))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


def hollow_png(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds one pixel."""
    content = png(1, 1, 8, 2, bytes(3))
    header = chunk(b"IHDR", struct.pack(">II", width, height) + content[24:29])
    return content[:8] + header + content[33:]


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tiff(size: tuple[int, int], strip: bytes, tags: dict[int, tuple[int, ...]]) -> bytes:
    """A little-endian TIFF of one uncompressed strip; all tags that are given are SHORT."""
    width, height = size
    shorts = {256: (width,), 257: (height,), 259: (1,), 277: (1,), 278: (height,), **tags}
    longs = {273: 8, 279: len(strip)}  # where the strip is, and its length
    at = 8 + len(strip)
    beyond = at + 2 + 12 * (len(shorts) + len(longs)) + 4
    directory, far = struct.pack("<H", len(shorts) + len(longs)), b""
    for tag in sorted({**shorts, **longs}):
        if tag in longs:
            directory += struct.pack("<HHII", tag, 4, 1, longs[tag])
            continue
        data = struct.pack(f"<{len(shorts[tag])}H", *shorts[tag])
        if len(data) > 4:
            data, far = struct.pack("<I", beyond + len(far)), far + data
        directory += struct.pack("<HHI", tag, 3, len(shorts[tag])) + data.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", at) + strip + directory + bytes(4) + far
