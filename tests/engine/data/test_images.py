"""Pictures as people have them: the colours they come to, what is said of them, what is refused."""

from __future__ import annotations

import hashlib
import random
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.data.read.images import NOTES, PictureError, decode, inspect_image, to_rgb
from tests.support.images import icc_profiles as icc
from tests.support.images.encoded import (
    chunk,
    exif,
    hollow_png,
    inks,
    paint,
    png,
    saved,
    tiff,
    ycck_jpeg,
)
from tests.support.images.zoo import Specimen, specimens, write_zoo

if TYPE_CHECKING:
    from pathlib import Path

RED, BLUE = (255, 0, 0), (0, 0, 255)
zoo_of_bytes = cache(specimens)


def colour(content: bytes, at: tuple[int, int] = (0, 0)) -> tuple[int, int, int]:
    pixel = decode(content).getpixel(at)
    assert isinstance(pixel, tuple)
    return pixel  # type: ignore[return-value]


def near(found: tuple[int, ...], wanted: tuple[int, ...], within: int = 3) -> bool:
    return all(abs(a - b) <= within for a, b in zip(found, wanted, strict=True))


def refusal(content: bytes) -> str:
    with pytest.raises(PictureError) as caught:
        inspect_image(content)
    return str(caught.value)


@pytest.mark.parametrize("specimen", zoo_of_bytes(), ids=lambda specimen: specimen.kind)
def test_every_kind_of_picture_is_used_or_refused_as_it_should_be(specimen: Specimen) -> None:
    if not specimen.decodes:
        assert 0 < len(refusal(specimen.content)) < 60
        with pytest.raises(PictureError):
            decode(specimen.content)
        return
    seen = inspect_image(specimen.content)
    assert seen.notes == specimen.notes
    assert set(seen.notes) <= set(NOTES)
    assert seen.digest == hashlib.sha256(specimen.content).hexdigest()
    picture = decode(specimen.content)
    assert (picture.mode, picture.size) == ("RGB", (seen.width, seen.height))
    assert picture.info == {}, "no profile and no rotation, which saving would keep"


def test_a_zoo_is_the_same_each_time_and_another_with_another_seed(tmp_path: Path) -> None:
    def contents(name: str, seed: int) -> dict[str, bytes]:
        zoo = write_zoo(tmp_path / name, 100, seed)
        files = {n: zoo.root / n for n in zoo.planted}
        return {n: path.read_bytes() for n, path in files.items() if path.is_file()}

    first = contents("a", 1)
    assert first == contents("b", 1)
    others = set(contents("c", 2).values())
    assert [n for n, content in first.items() if content in others] == [
        n for n, content in first.items() if not content
    ], "only the empty files are alike"


# Where the first pixel of the stored first row is seen, and where the last one of that row is;
# from the table of the Exif standard, which names the side that row 0 and column 0 are on.
_CORNERS = {
    1: ("top left", "top right"),
    2: ("top right", "top left"),
    3: ("bottom right", "bottom left"),
    4: ("bottom left", "bottom right"),
    5: ("top left", "bottom left"),
    6: ("top right", "bottom right"),
    7: ("bottom right", "top right"),
    8: ("bottom left", "top left"),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("JPEG", {"quality": 98})],
)
def test_pictures_are_turned_upright(orientation: int, kind: str, options: dict[str, Any]) -> None:
    stored = Image.new("RGB", (48, 32), "white")
    stored.paste(RED, (0, 0, 16, 16))
    stored.paste(BLUE, (32, 0, 48, 16))
    content = saved(stored, kind, exif=exif(orientation), **options)
    picture = decode(content)
    assert picture.size == ((48, 32) if orientation < 5 else (32, 48))
    assert inspect_image(content).notes == (("rotated",) if orientation > 1 else ())
    right, bottom = picture.width - 5, picture.height - 5
    place = {
        "top left": (4, 4),
        "top right": (right, 4),
        "bottom left": (4, bottom),
        "bottom right": (right, bottom),
    }
    first, last = _CORNERS[orientation]
    assert near(picture.getpixel(place[first]), RED)  # type: ignore[arg-type]
    assert near(picture.getpixel(place[last]), BLUE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stored", "shown"), [(0, 0), (256, 1), (32768, 128), (65535, 255)])
def test_grey_of_16_bits_keeps_its_range(stored: int, shown: int) -> None:
    little, big = struct.pack("<H", stored), struct.pack(">H", stored)
    contents = [
        png(1, 1, 16, 0, big),
        tiff((1, 1), little, {258: (16,), 262: (1,)}),
        saved(Image.frombytes("I;16B", (1, 1), big), "TIFF"),
        b"P5 1 1 65535\n" + big,
    ]
    assert [colour(content) for content in contents] == [(shown,) * 3] * 4
    white_is_zero = tiff((1, 1), little, {258: (16,), 262: (0,)})
    assert colour(white_is_zero) == (255 - shown,) * 3


def test_numbers_without_a_known_white_are_refused() -> None:
    assert to_rgb(Image.new("I", (1, 1), 32768))[0].getpixel((0, 0)) == (128, 128, 128)
    assert refusal(saved(Image.new("I", (1, 1), 70_000), "TIFF")) == "gray values outside 0..65535"
    assert refusal(saved(Image.new("I", (1, 1), -1), "TIFF")) == "gray values outside 0..65535"
    assert colour(saved(Image.new("F", (1, 1), 0.5), "TIFF")) == (128, 128, 128)
    for wrong in (1.01, -0.01, 255.0, float("nan"), float("inf")):
        content = saved(Image.new("F", (1, 1), wrong), "TIFF")
        assert refusal(content) == "float values outside 0..1"


def test_12_bits_reach_white() -> None:
    content = tiff((2, 1), b"\xff\xf8\x00", {258: (12,), 262: (1,)})
    assert [colour(content, (x, 0))[0] for x in (0, 1)] == [255, 128]
    assert inspect_image(content).notes == ("16-bit", "grey")


def test_colours_of_16_bits_lose_their_low_bytes() -> None:
    rows = struct.pack(">3H", 0x80FF, 0xFF00, 0x0001)
    assert colour(png(1, 1, 16, 2, rows)) == (128, 255, 0)
    assert inspect_image(png(1, 1, 16, 2, rows)).notes == ("16-bit",)


def test_cmyk_with_and_without_a_profile() -> None:
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    options: dict[str, Any] = {"quality": 100, "subsampling": 0}
    assert near(colour(saved(cyan, "JPEG", **options)), (0, 255, 255))
    printed = saved(cyan, "JPEG", icc_profile=icc.press_cmyk(), **options)
    assert near(colour(printed), (0, 151, 218), 6), "the cyan of a press, not of a screen"
    assert inspect_image(printed).notes == ("cmyk", "profile")
    broken = saved(cyan, "JPEG", icc_profile=icc.press_cmyk()[:300], **options)
    assert near(colour(broken), (0, 255, 255))
    assert near(colour(saved(cyan, "TIFF")), (0, 255, 255))


def test_ycck_comes_to_the_same_colours_as_cmyk() -> None:
    picture = inks(Image.linear_gradient("L").resize((32, 32)).convert("RGB"))
    picture.paste((200, 30, 90, 10), (0, 0, 16, 32))
    as_cmyk = np.asarray(decode(saved(picture, "TIFF"))).astype(int)
    as_ycck = np.asarray(decode(ycck_jpeg(picture))).astype(int)
    assert np.abs(as_cmyk - as_ycck).mean() < 3


def test_profiles_move_colours_to_srgb() -> None:
    stored = (200, 50, 50)
    picture = Image.new("RGB", (8, 8), stored)

    def with_profile(profile: bytes) -> tuple[int, int, int]:
        return colour(saved(picture, "PNG", icc_profile=profile))

    assert near(with_profile(icc.display_p3()), (218, 24, 40))
    assert near(with_profile(icc.adobe_rgb()), (232, 46, 46))
    p3_grey = saved(Image.new("RGB", (8, 8), (90, 90, 90)), "PNG", icc_profile=icc.display_p3())
    assert near(colour(p3_grey), (90, 90, 90), 1)
    for harmless in (
        icc.srgb_twin(),
        icc.display_p3()[:200],
        b"nonsense",
        icc.press_cmyk(),
        icc.linear_grey(),
    ):
        assert with_profile(harmless) == stored
    grey = saved(Image.new("L", (8, 8), 128), "PNG", icc_profile=icc.linear_grey())
    assert near(colour(grey), (188, 188, 188), 1)


def test_a_profile_holds_for_palettes_and_behind_transparency() -> None:
    palette = Image.new("RGB", (8, 8), (200, 50, 50)).quantize(2)
    assert near(colour(saved(palette, "PNG", icc_profile=icc.display_p3())), (218, 24, 40))
    clear = Image.new("RGBA", (8, 8), (200, 50, 50, 255))
    clear.putpixel((0, 0), (200, 50, 50, 0))
    content = saved(clear, "PNG", icc_profile=icc.display_p3())
    assert colour(content) == (255, 255, 255)
    assert near(colour(content, (1, 1)), (218, 24, 40))
    assert inspect_image(content).notes == ("profile", "transparent")


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    levels = Image.new("RGBA", (3, 1))
    for x, opacity in enumerate((0, 128, 255)):
        levels.putpixel((x, 0), (0, 0, 0, opacity))
    if mode == "PA":
        picture = Image.merge("PA", (Image.new("P", (3, 1)), levels.getchannel("A")))
        picture.putpalette(bytes(768))
    elif mode in ("La", "LA"):
        picture = levels.convert("LA").convert(mode)
    else:
        picture = levels.convert(mode)
    shown, notes = to_rgb(picture)
    assert [shown.getpixel((x, 0))[0] for x in range(3)] == [255, 127, 0]  # type: ignore[index]
    assert "transparent" in notes
    assert "transparent" not in to_rgb(picture.crop((2, 0, 3, 1)))[1], "opaque all over"


@pytest.mark.parametrize(
    ("bits", "kind", "rows", "key"),
    [
        (1, 0, b"\x40", (1,)),
        (2, 0, b"\x18", (1,)),  # levels 0, 1, 2
        (4, 0, b"\x05\xf0", (5,)),
        (8, 0, b"\x00\x20\xff", (0x20,)),
        (16, 0, b"\x00\x00\x12\x34\x12\x35", (0x1234,)),
        (8, 2, b"\x00\x00\x00\x01\x02\x03\x01\x02\x04", (1, 2, 3)),
        (16, 2, b"\0" * 6 + b"\x01\x99\x02\x99\x03\x99" + b"\xff" * 6, (0x199, 0x299, 0x399)),
    ],
)
def test_the_transparent_colour_of_a_png_is_found_at_every_depth(
    bits: int, kind: int, rows: bytes, key: tuple[int, ...]
) -> None:
    transparent = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
    content, without = png(3, 1, bits, kind, rows, transparent), png(3, 1, bits, kind, rows)
    assert colour(content, (1, 0)) == (255, 255, 255)
    assert [colour(content, (x, 0)) for x in (0, 2)] == [colour(without, (x, 0)) for x in (0, 2)]
    assert colour(without, (0, 0)) == (0, 0, 0)
    assert "transparent" in inspect_image(content).notes
    assert "transparent" not in inspect_image(without).notes


def test_lab_and_video_colours_come_out_as_they_went_in() -> None:
    picture = Image.new("RGB", (8, 8), (200, 50, 50))
    for mode in ("LAB", "YCbCr", "HSV"):
        shown, notes = to_rgb(picture.convert(mode))
        assert near(shown.getpixel((0, 0)), (200, 50, 50), 4)  # type: ignore[arg-type]
        assert not notes
    assert near(colour(saved(picture.convert("LAB"), "TIFF")), (200, 50, 50), 4)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_is_used(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), shade) for shade in (RED, BLUE)]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert colour(content) == RED
    assert "animated" in inspect_image(content).notes
    assert "animated" not in inspect_image(saved(frames[0], kind, **options)).notes


def test_damage_behind_the_first_frame_does_no_harm() -> None:
    frames = [Image.new("RGB", (64, 64), shade) for shade in (RED, BLUE)]
    whole = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    first = saved(frames[0], "GIF")
    assert colour(whole[: len(first) + 20]) == RED


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty file"),
        (b"hello", "not an image"),
        (b"\0" * 500, "zeros, not an image"),
        (b"\n<!doctype HTML><html>", "a web page, not an image"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC, which needs pillow-heif"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "a video, not an image"),
        (b"<?xml version='1.0'?>\n<!-- x -->\n<svg width='3'>", "SVG is not supported"),
        (b"8BPS\0\1", "PSD is not supported"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "EPS is not supported"),
        (b"%PDF-1.7", "a PDF, not an image"),
        (b"\xff\xd8", "truncated"),
        (b"GIF89a" + b"\0" * 7 + b";", "damaged, or an unsupported kind of GIF"),
        (
            png(1, 1, 8, 2, bytes(3), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2_000_000)))),
            "its text or profile is too large",
        ),
        (
            tiff((1, 1), bytes(12), {258: (32,) * 3, 262: (2,), 277: (3,), 339: (3,) * 3}),
            "damaged, or an unsupported kind of TIFF",
        ),
    ],
)
def test_a_refusal_says_why(content: bytes, why: str) -> None:
    assert refusal(content).startswith(why)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("GIF", {}),
        ("WEBP", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("JPEG2000", {}),
        ("AVIF", {}),
    ],
)
def test_a_truncated_file_is_called_so_wherever_it_ends(kind: str, options: dict[str, Any]) -> None:
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow has no {kind}")
    content = saved(paint(random.Random(1)), kind, **options)
    for keep in (30, 200, len(content) // 2, len(content) - 40):
        assert refusal(content[:keep]) == "truncated", f"{keep} of {len(content)} bytes"


def test_damage_in_a_compressed_tiff_is_not_reported_twice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    content = bytearray(saved(paint(random.Random(1)), "TIFF", compression="tiff_lzw"))
    content[200:300] = bytes(100)
    assert refusal(bytes(content)).startswith("damaged")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("tags", [b"Exif\0\0garbage!", b"Exif\0\0MM\0*\0\0\0\x08\0\x05\1\x12"])
def test_broken_exif_data_turns_nothing(kind: str, tags: bytes) -> None:
    content = saved(Image.new("RGB", (20, 10), RED), kind, exif=tags)
    assert decode(content).size == (20, 10)
    assert inspect_image(content).notes == ()


def test_bombs_are_refused_before_they_go_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(hollow_png(60_000, 60_000)) == "more than 178 megapixels; downscale it"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert refusal(hollow_png(60_000, 60_000)) == "more than 178 megapixels; downscale it"


def test_a_size_that_the_bytes_cannot_hold_is_refused_before_memory_is_taken() -> None:
    content = hollow_png(12_000, 12_000)
    assert refusal(content) == f"damaged (12000 × 12000 pixels in {len(content)} bytes)"
    blank = saved(Image.new("1", (3000, 3000)), "PNG")  # as dense as a picture can be
    assert decode(blank).size == (3000, 3000)


def test_a_large_picture_is_no_reason_for_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)  # Pillow warns above, refuses above twice
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert inspect_image(saved(Image.new("RGB", (8, 8)), "PNG")).width == 8
    assert said == []


def test_threads_agree() -> None:
    contents = [s.content for s in zoo_of_bytes() if s.decodes] * 3
    alone = [decode(content).tobytes() for content in contents]
    with ThreadPoolExecutor(8) as pool:
        together = [picture.tobytes() for picture in pool.map(decode, contents)]
    assert together == alone


@given(data=st.data())
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_of_any_kind_is_a_picture_error_and_silent(
    data: st.DataObject, capfd: pytest.CaptureFixture[str]
) -> None:
    specimen = data.draw(st.sampled_from(zoo_of_bytes(seed=3)))
    content = bytearray(specimen.content)
    for _ in range(data.draw(st.integers(0, 6), label="flips") if content else 0):
        near_the_start = data.draw(st.booleans())
        last = min(len(content), 200 if near_the_start else len(content)) - 1
        content[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    keep = data.draw(st.integers(0, len(content)) | st.just(len(content)), label="bytes kept")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            seen = inspect_image(bytes(content[:keep]))
        except PictureError as error:
            words, pixels = len(str(error)), 1
        else:
            words, pixels = 1, seen.width * seen.height
    assert 0 < words < 120
    assert pixels > 0
    assert said == []
    assert capfd.readouterr() == ("", "")
