"""Captioned images of colored shapes: fast to draw, and with something to learn.

Image `index` depends only on `seed`, `size` and its own index, so the first hundred images of a set
are the same for any length of the set.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (216, 38, 44),
    "orange": (242, 136, 28),
    "yellow": (246, 212, 48),
    "green": (46, 158, 70),
    "cyan": (52, 196, 206),
    "blue": (38, 78, 206),
    "purple": (122, 54, 168),
    "pink": (240, 128, 172),
    "brown": (122, 78, 46),
    "black": (22, 22, 26),
    "grey": (136, 138, 142),
    "white": (246, 246, 242),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "diamond", "hexagon", "crescent")
HEART = "heart"
"""A shape that no toy images contain, for teaching a model something new."""
BACKGROUNDS = ("plain", "gradient", "stripes")

# Width and height in units of the short side. Every fourth image uses the next pair.
OBLONG = ((3, 2), (2, 3), (4, 3), (3, 4))

OVERSAMPLING = 4
"""Factor by which images are drawn larger and then averaged down, for antialiasing."""

_FRAMES = 49  # of a video
_SOUND_RATE = 16_000  # Hz

Colour = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class PicturePlan:
    """All parameters of one image, before it is drawn.

    Attributes:
        stem: File name without its suffix, such as `0001-red-circle`.
        caption: The caption that a user would write.
        width: In pixels.
        height: In pixels.
        shape: One of `SHAPES`, or `HEART`.
        colour: Name of the shape's color.
        background: One of `BACKGROUNDS`.
        background_colours: Names of the background's two colors; a plain one uses the first.
        centre: Center of the shape, as fractions of width and height.
        radius: Radius of the shape, as a fraction of the short side.
        turn: Rotation of the shape, in radians.
        slant: Angle of the background's gradient or stripes, in radians.
    """

    stem: str
    caption: str
    width: int
    height: int
    shape: str
    colour: str
    background: str
    background_colours: tuple[str, str]
    centre: Point
    radius: float
    turn: float
    slant: float


def plan_picture(index: int, *, size: int, seed: int) -> PicturePlan:
    """Choose the content of image `index`.

    Args:
        index: Counted from 0; file names count from 1.
        size: Pixels of the short side.
        seed: Seed of the entire set.
    """
    rng = random.Random(f"{seed}:{index}")
    shape = SHAPES[index % len(SHAPES)]
    colour, first, second = rng.sample(sorted(COLOURS), 3)
    background = rng.choice(BACKGROUNDS)
    where = {
        "plain": _with_article(f"{first} background"),
        "gradient": _with_article(f"{first} to {second} gradient"),
        "stripes": f"{first} and {second} stripes",
    }[background]
    wide, high = OBLONG[index // 4 % len(OBLONG)] if index % 4 == 3 else (1, 1)
    short = min(wide, high)
    return PicturePlan(
        stem=f"{index + 1:04d}-{colour}-{shape}",
        caption=f"{_with_article(colour)} {shape} on {where}",
        width=size * wide // short,
        height=size * high // short,
        shape=shape,
        colour=colour,
        background=background,
        background_colours=(first, second),
        centre=(rng.uniform(0.38, 0.62), rng.uniform(0.38, 0.62)),
        radius=rng.uniform(0.24, 0.36),
        turn=rng.uniform(-0.25, 0.25),
        slant=rng.uniform(0.0, math.pi),
    )


def draw_picture(plan: PicturePlan) -> Image.Image:
    """Draw an RGB image of `plan.width` x `plan.height` pixels."""
    picture, mask = _draw_parts(plan)
    picture.paste(COLOURS[plan.colour], (0, 0), mask)
    return picture.reduce(OVERSAMPLING)


def draw_layers(plan: PicturePlan) -> list[Image.Image]:
    """Draw the same as RGBA layers: the background, and the shape."""
    picture, mask = _draw_parts(plan)
    shape = Image.new("RGBA", picture.size, COLOURS[plan.colour])
    shape.putalpha(mask)
    return [layer.convert("RGBA").reduce(OVERSAMPLING) for layer in (picture, shape)]


def _draw_parts(plan: PicturePlan) -> tuple[Image.Image, Image.Image]:
    """Draw the background and the mask of the shape, several times as large."""
    width, height = plan.width * OVERSAMPLING, plan.height * OVERSAMPLING
    mask = Image.new("L", (width, height))
    radius = plan.radius * min(width, height)
    centre = (plan.centre[0] * width, plan.centre[1] * height)
    _draw_shape(ImageDraw.Draw(mask), plan.shape, centre, radius, plan.turn)
    return _draw_background(plan, width, height), mask


def toy_pictures(count: int, *, size: int, seed: int) -> list[Image.Image]:
    """Return the first `count` images of a set, in memory."""
    return [draw_picture(plan_picture(i, size=size, seed=seed)) for i in range(count)]


def toy_captions(count: int, *, seed: int) -> list[str]:
    """Return the first `count` captions of a set."""
    return [plan_picture(i, size=1, seed=seed).caption for i in range(count)]


def write_pictures(
    data_dir: Path, *, count: int, size: int, seed: int, before: bool = False
) -> None:
    """Write `count` PNG files, each with its caption in a `.txt` file of the same stem.

    Args:
        data_dir: Created if it is missing.
        count: Number of images.
        size: Pixels of the short side; about a quarter are landscape or portrait.
        seed: The same seed gives the same bytes.
        before: Write the source images of edits instead: the same, with gray shapes and without
            captions.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        plan = plan_picture(index, size=size, seed=seed)
        if before:
            grey = draw_picture(replace(plan, colour="grey"))
            grey.save(data_dir / f"{plan.stem}.png", compress_level=1)
            continue
        # Level 1 takes half the time of the default, and files stay under a few kilobytes.
        draw_picture(plan).save(data_dir / f"{plan.stem}.png", compress_level=1)
        (data_dir / f"{plan.stem}.txt").write_text(plan.caption + "\n", encoding="utf-8")


def write_layers(data_dir: Path, *, count: int, size: int, seed: int) -> None:
    """Write the layers of the same images into the folders `1` and `2`, the back first."""
    for index in range(count):
        plan = plan_picture(index, size=size, seed=seed)
        for number, layer in enumerate(draw_layers(plan), start=1):
            (folder := data_dir / str(number)).mkdir(parents=True, exist_ok=True)
            layer.save(folder / f"{plan.stem}.png", compress_level=1)


def makes_videos() -> bool:
    """Return whether PyAV, which writes videos, is installed, with an encoder that we know."""
    from engine.sample.sample_files import video_encoder

    with suppress(OSError):
        return bool(video_encoder())
    return False


def write_videos(
    data_dir: Path,
    *,
    count: int,
    size: int,
    seed: int,
    fps: float,
    sound: bool = False,
    before: bool = False,
) -> None:
    """Write `count` MP4 files in which the shapes of the first images move, with their captions.

    Args:
        data_dir: Created if it is missing.
        count: Number of videos.
        size: Pixels of the short side; sides are even.
        seed: The same seed gives the same frames.
        fps: Frames per second.
        sound: Whether each has a tone, higher from one video to the next.
        before: Write their control videos instead: the same, with gray shapes and without captions
            or sound.
    """
    # torch takes seconds to import, and images do without it.
    import torch

    from engine.families.shared.base import Sound
    from engine.sample.sample_files import write_video

    data_dir.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        plan = plan_picture(index, size=size + size % 2, seed=seed)
        plan = replace(plan, width=plan.width & ~1, colour="grey" if before else plan.colour)
        plan = replace(plan, height=plan.height & ~1)
        frames = [
            draw_picture(replace(plan, centre=(share, plan.centre[1]), turn=math.pi * share))
            for share in (0.3 + 0.4 * number / (_FRAMES - 1) for number in range(_FRAMES))
        ]
        tone = None
        if sound and not before:
            times = torch.arange(round(_FRAMES / fps * _SOUND_RATE)) / _SOUND_RATE
            wave = 0.3 * torch.sin(math.tau * 220 * (index + 1) * times)
            tone = Sound(wave.expand(2, -1), _SOUND_RATE)
        write_video(frames, fps, data_dir / f"{plan.stem}.mp4", tone)
        if not before:
            caption = f"{plan.caption}, moving to the right\n"
            (data_dir / f"{plan.stem}.txt").write_text(caption, encoding="utf-8")


def _with_article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def _draw_background(plan: PicturePlan, width: int, height: int) -> Image.Image:
    """Draw the background: RGB, `width` x `height`."""
    first, second = (COLOURS[name] for name in plan.background_colours)
    picture = Image.new("RGB", (width, height), first)
    if plan.background == "plain":
        return picture
    # Positions run along `slant`, from -reach to +reach, and cover every corner.
    reach = math.hypot(width, height) / 2
    along = (math.cos(plan.slant), math.sin(plan.slant))
    draw = ImageDraw.Draw(picture)
    bands = 64 if plan.background == "gradient" else 8
    for band in range(bands):
        if plan.background == "gradient":
            colour = _mix(first, second, band / (bands - 1))
        elif band % 2:
            colour = second
        else:
            continue
        start, end = ((2 * (band + edge) / bands - 1) * reach for edge in (0, 1))
        draw.polygon(_band((width / 2, height / 2), along, start, end, reach), fill=colour)
    return picture


def _band(centre: Point, along: Point, start: float, end: float, reach: float) -> list[Point]:
    """Return the corners of a band across `along`, from `start` to `end` pixels from `centre`."""
    (x, y), (dx, dy) = centre, along
    return [
        (x + dx * step - dy * side, y + dy * step + dx * side)
        for step, side in ((start, -reach), (start, reach), (end, reach), (end, -reach))
    ]


def _mix(first: Colour, second: Colour, share: float) -> Colour:
    """Return the color at `share` (0 to 1) of the way from `first` to `second`."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, centre: Point, radius: float, turn: float
) -> None:
    """Fill `shape` with 255 in a mask. `radius` is in pixels, `turn` in radians."""
    if shape in ("circle", "ring", "crescent"):
        draw.ellipse(_box(centre, radius), fill=255)
        if shape == "ring":
            draw.ellipse(_box(centre, radius * 0.55), fill=0)
        elif shape == "crescent":
            aside = (centre[0] + radius * math.cos(turn) / 2, centre[1] - radius * math.sin(turn))
            draw.ellipse(_box(aside, radius * 0.8), fill=0)
        return
    draw.polygon(_corners(shape, centre, radius, turn), fill=255)


def _box(centre: Point, radius: float) -> list[float]:
    """Return the square around a circle: left, top, right, bottom."""
    (x, y) = centre
    return [x - radius, y - radius, x + radius, y + radius]


def _corners(shape: str, centre: Point, radius: float, turn: float) -> Sequence[Point]:
    """Return the corners of a shape, starting at the top before rotation; a heart has many."""
    if shape == "cross":
        arm = radius * 0.34
        outline = [
            (-arm, -radius),
            (arm, -radius),
            (arm, -arm),
            (radius, -arm),
            (radius, arm),
            (arm, arm),
            (arm, radius),
            (-arm, radius),
            (-arm, arm),
            (-radius, arm),
            (-radius, -arm),
            (-arm, -arm),
        ]
    elif shape == HEART:
        outline = [
            (radius * math.sin(angle) ** 3, radius * _heart_height(angle))
            for angle in (math.tau * corner / 64 for corner in range(64))
        ]
    else:
        corners, inner = {
            "square": (4, 1.0),
            "diamond": (4, 1.0),
            "triangle": (3, 1.0),
            "hexagon": (6, 1.0),
            "star": (10, 0.42),
        }[shape]
        turn += math.pi / 4 if shape == "square" else 0.0
        outline = []
        for corner in range(corners):
            angle = 2 * math.pi * corner / corners - math.pi / 2
            far = radius * (inner if corner % 2 else 1.0)
            narrow = 0.7 if shape == "diamond" else 1.0
            outline.append((far * narrow * math.cos(angle), far * math.sin(angle)))
    cos, sin = math.cos(turn), math.sin(turn)
    return [(centre[0] + x * cos - y * sin, centre[1] + x * sin + y * cos) for x, y in outline]


def _heart_height(angle: float) -> float:
    """Return how far below its center the outline of a heart of width 2 is, at `angle`."""
    waves = (13, -5, -2, -1)
    return -sum(high * math.cos(n * angle) for n, high in enumerate(waves, start=1)) / 16 - 0.15
