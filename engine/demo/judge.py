"""A small fixed judge of the demo's samples: which shape, in which color, on which background?

Nothing in it is learned: a shape's outline is laid over the outlines of all shapes, and the one
that covers it best is its name, if it covers enough. `python -m engine.demo.judge SAMPLES`
prints how many samples of each step show what their prompts say.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from engine.demo.pictures import SHAPES, Scene, draw
from engine.start.command import OneLineParser
from engine.toy.images import COLOURS, HEART
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


LEAST_COVER: Final = 0.8
"""Area that two outlines share, over the area that either has."""
LEAST_COVER_OF_STARS: Final = 0.7
"""Theirs is mostly edge: being off by a pixel costs more."""
LEAST_CONTRAST: Final = 40.0
"""Between a shape and its background, in RGB."""
GRID: Final = 32
EXAMPLES: Final = 24


def look(picture: Image.Image) -> Scene | None:
    """Recognize the scene in an image; None if it is not a scene of the demo."""
    parts = outline(picture)
    if parts is None:
        return None
    mask, color, background = parts
    cover, shape = max((_cover(mask, example), name) for name, example in _examples())
    if cover < (LEAST_COVER_OF_STARS if shape == "star" else LEAST_COVER):
        return None
    return Scene(shape, _name(color), _name(background))


def outline(picture: Image.Image) -> tuple[Floats, Floats, Floats] | None:
    """Return the shape of an image, apart from where and how large it is.

    Returns:
        How much of each cell is in the shape, `(GRID, GRID)` from 0 to 1, the color of the shape
        and the color of the background, `(3,)`; None if there is no shape.
    """
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    edges = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
    background = np.median(np.concatenate([edge.reshape(-1, 3) for edge in edges]), axis=0)
    far = np.linalg.norm(pixels - background, axis=2)
    most = np.percentile(far, 99)
    if most < LEAST_CONTRAST:
        return None
    color = np.median(pixels[far > 0.6 * most], axis=0)
    contrast = np.linalg.norm(color - background)
    share = np.clip((pixels - background) @ (color - background) / contrast**2, 0, 1)
    rows, columns = np.nonzero(share > 0.5)
    if not len(rows):
        return None
    # A square around the shape, in the middle of it, scaled to the grid.
    middle = (columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2
    half = max(np.ptp(columns) + 1, np.ptp(rows) + 1) / 2 + 1
    box = (middle[0] - half, middle[1] - half, middle[0] + half, middle[1] + half)
    image = Image.fromarray((share * 255).astype(np.uint8))
    grid = image.transform((GRID, GRID), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
    return np.asarray(grid, dtype=np.float64) / 255, color, background


@cache
def _examples() -> list[tuple[str, Any]]:
    """Outlines to compare with: each shape as the demo draws it, some turned."""
    chance = random.Random(0)
    return [
        (shape, parts[0])
        for shape in (*SHAPES, HEART)
        for _ in range(EXAMPLES)
        if (parts := outline(draw(Scene(shape, "red", "white"), chance))) is not None
    ]


def _cover(mask: Floats, other: Floats) -> float:
    return float(np.minimum(mask, other).sum() / np.maximum(mask, other).sum())


def _name(color: Floats) -> str:
    """Return the nearest color that has a name."""
    return min(COLOURS, key=lambda name: float(np.linalg.norm(color - COLOURS[name])))


def judge(samples: Path) -> list[dict[str, int]]:
    """Count what is right among a run's samples.

    Args:
        samples: The run's directory of samples, with images and sidecars in each `step-<n>`.

    Returns:
        For each step, in order: `step`, `hearts` and `others` asked for, and how many of them are
        right, `hearts_right` and `others_right`.
    """
    steps = []
    for directory in samples.glob("step-*"):
        counts: Counter[str] = Counter(step=int(directory.name.removeprefix("step-")))
        for picture in sorted(directory.glob("*.png")):
            facts = read_json(picture.with_suffix(".json")) or {}
            asked = Scene.of_caption(str(facts.get("prompt")))
            if asked is None:
                continue
            kind = "hearts" if asked.shape == HEART else "others"
            with Image.open(picture) as image:
                right = look(image) == asked
            counts.update({kind: 1, f"{kind}_right": right})
        steps.append(dict(counts))
    return sorted(steps, key=lambda counts: counts["step"])


def main(arguments: list[str] | None = None) -> int:
    """Print the counts as JSON."""
    parser = OneLineParser(prog="python -m engine.demo.judge", description=__doc__)
    parser.add_argument("samples", type=Path)
    print(json.dumps(judge(parser.parse_args(arguments).samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
