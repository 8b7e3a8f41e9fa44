"""The toy that tests train, where they do not ask for a family's own."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from engine.toy import write_toy
from engine.toy.families.flux import FluxSizes, build_transformer

if TYPE_CHECKING:
    from pathlib import Path


def write_small_toy(root: Path, pictures: int) -> None:
    """Write FLUX.1's toy with a block of each kind and one more: what takes time is their number.

    Args:
        root: An empty directory; gets `model` and `data`.
        pictures: How many.
    """
    transformer = write_toy(root, "flux", pictures=pictures, size=64).model / "transformer"
    shutil.rmtree(transformer)
    sizes = FluxSizes(layers=1, single_layers=2)
    build_transformer(sizes, seed=0).save_pretrained(transformer)
