"""Convert the pixel values of any image mode to 8-bit sRGB on white."""

from __future__ import annotations

import io
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from PIL import Image

if TYPE_CHECKING:
    from PIL.ImageCms import ImageCmsProfile, ImageCmsTransform

_PROFILE_SPACES: Final = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
_SAME_COLOUR: Final = 2  # of 255: a profile that moves no color further than this is sRGB


class RangeError(ValueError):
    """Numbers that do not say which of them are black and white."""


def to_rgb(
    picture: Image.Image, bits: int = 8, *, white_is_zero: bool = False
) -> tuple[Image.Image, set[str]]:
    """Convert a loaded image of any mode to 8-bit RGB; return it with notes about the conversion.

    Args:
        picture: Its `info` may hold a profile and a transparent color.
        bits: Bits per channel as stored; Pillow's mode does not always tell.
        white_is_zero: The numbers count from white. Pillow turns that round for 8 bits and
            fewer, so it is heeded only for more.

    Raises:
        RangeError: Gray values beyond the range that their type is read with.
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
        white = Image.new("RGB", picture.size, "white")
        picture = Image.composite(picture, white, opacity)
    return picture, notes


def opacity_of(picture: Image.Image) -> Image.Image | None:
    """Return the alpha channel of a loaded image; None where it is opaque all over."""
    return _split_opacity(picture)[1]


def _split_opacity(picture: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the image without its alpha channel, and that channel unless it is opaque all over."""
    if picture.mode in ("P", "PA"):
        picture = picture.convert("RGBA")
    elif picture.mode in ("La", "RGBa"):  # colors are stored multiplied by their opacity
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
    """Gray of more than 8 bits in 8; Pillow's own conversion turns all but the darkest white."""
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
    if not (values.min() >= 0.0 and values.max() <= 1.0):  # so phrased, it catches NaN
        raise RangeError("float values outside 0..1")
    if white_is_zero:
        values = 1.0 - values
    return Image.fromarray(np.rint(values * 255.0).astype(np.uint8))


@lru_cache(maxsize=32)
def _to_srgb(profile: bytes, mode: str) -> ImageCmsTransform | None:
    """Return the transform to sRGB of images of a mode with this profile.

    Returns:
        None where there is nothing to do: the profile is broken, belongs to images of another mode,
        or is sRGB, as most are under one name or another.
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
    except Exception:  # lcms and Pillow have a dozen ways to say that a profile is broken
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
    """Return colors all over the cube, and grays: enough to see whether a profile has an effect."""
    steps = range(0, 256, 51)
    cube = [bytes((r, g, b)) for r in steps for g in steps for b in steps]
    greys = [bytes((v, v, v)) for v in range(256)]
    return Image.frombytes("RGB", (len(cube) + len(greys), 1), b"".join(cube + greys))
