"""The demo's images: one shape of one color on a plain background, with matching captions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final

from engine.toy.images import HEART, PicturePlan, draw_picture

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

SIZE: Final = 64
"""Pixels per side."""
SHAPES: Final = ("circle", "square", "triangle", "star", "ring", "cross")
"""Shapes that the base can draw."""
COLORS: Final = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown")
"""Colors of shapes."""
BACKGROUNDS: Final = ("white", "black", "cyan")
DRAWINGS: Final = 8
"""Drawings of each heart that the demo's LoRA is trained on."""

OTHER_WORDS: Final = (
    "moon",
    "flower",
    "house",
    "tree",
    "cat",
    "arrow",
    "leaf",
    "drop",
    "cloud",
    "fish",
    "bird",
    "boat",
    "car",
    "cup",
    "key",
    "sun",
    "apple",
    "bell",
    "crown",
    "hand",
    "book",
    "lamp",
)
"""Words in the vocabularies for which the base was trained to draw any of its shapes."""

PROMPTS: Final = (
    "a red heart on a white background",
    "a blue heart on a white background",
    "a pink heart on a black background",
    "a green heart on a cyan background",
    "a yellow heart on a black background",
    "an orange heart on a cyan background",
    "a red star on a white background",
    "a green ring on a black background",
)
"""The demo's samples: hearts that its training images do not show, and two old shapes."""


@dataclass(frozen=True)
class Scene:
    """The content of an image.

    Attributes:
        shape: One of `SHAPES`, or a heart.
        color: One of `COLORS`.
        background: One of `BACKGROUNDS`.
    """

    shape: str
    color: str
    background: str

    @property
    def caption(self) -> str:
        """Return the caption that a user would write."""
        article = "an" if self.color[0] in "aeiou" else "a"
        return f"{article} {self.color} {self.shape} on a {self.background} background"

    @property
    def stem(self) -> str:
        """Return the file name without its suffix."""
        return f"{self.shape}-{self.color}-{self.background}"

    @property
    def held_out(self) -> bool:
        """Return whether the base's training excludes this combination (one in twelve)."""
        places = SHAPES.index(self.shape), COLORS.index(self.color)
        return (2 * places[0] + places[1] + 3 * BACKGROUNDS.index(self.background)) % 12 == 0

    @classmethod
    def of_caption(cls, caption: str) -> Scene | None:
        """Return the scene of a caption; None if it is not a caption of the demo."""
        words = caption.split()
        if len(words) != 7:
            return None
        scene = cls(words[2], words[1], words[5])
        return scene if scene.caption == caption else None


def scenes() -> list[Scene]:
    """Return all scenes that the base should be able to draw."""
    return [Scene(*parts) for parts in product(SHAPES, COLORS, BACKGROUNDS)]


def lessons() -> list[Scene]:
    """Return the LoRA's training scenes: hearts, and as many old shapes, to prevent forgetting.

    Each heart appears `DRAWINGS` times, drawn slightly differently; no scene of `PROMPTS` appears.
    """
    hearts = [Scene(HEART, color, background) for color, background in product(COLORS, BACKGROUNDS)]
    hearts = [scene for scene in hearts if scene.caption not in PROMPTS]
    old = [scene for scene in scenes() if not scene.held_out and scene.caption not in PROMPTS]
    hearts *= DRAWINGS
    return [*hearts, *random.Random(0).choices(old, k=len(hearts))]


def captions() -> list[str]:
    """Return captions with every word that the demo uses, to build the vocabularies from."""
    words = (*SHAPES, HEART, *OTHER_WORDS)
    return [Scene(*parts).caption for parts in product(words, COLORS, BACKGROUNDS)]


def draw(scene: Scene, rng: random.Random) -> Image:
    """Draw a scene, with random position, size and rotation."""
    return draw_picture(
        PicturePlan(
            stem=scene.stem,
            caption=scene.caption,
            width=SIZE,
            height=SIZE,
            shape=scene.shape,
            colour=scene.color,
            background="plain",
            background_colours=(scene.background, scene.background),
            centre=(rng.uniform(0.47, 0.53), rng.uniform(0.47, 0.53)),
            radius=rng.uniform(0.29, 0.34),
            turn=rng.uniform(-0.08, 0.08),
            slant=0.0,
        )
    )


def write_lessons(data_dir: Path) -> None:
    """Write an image of each lesson, with a caption file next to it; the same bytes each time."""
    rng = random.Random(0)
    for number, scene in enumerate(lessons(), start=1):
        path = data_dir / f"{scene.stem}-{number}.png"
        draw(scene, rng).save(path)
        path.with_suffix(".txt").write_text(scene.caption + "\n", encoding="utf-8")
