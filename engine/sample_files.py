"""A sampled picture on the disk: a PNG, and beside it a JSON file with what it was made from."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from PIL.PngImagePlugin import PngInfo

from jobs.rundir import write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from PIL import Image


def sample_name(number: int) -> str:
    """The file of a job's prompt with this number."""
    return f"{number:02d}.png"


def write_sample(picture: Image.Image, facts: Mapping[str, Any], path: Path) -> None:
    """Write both files; each is replaced as a whole.

    Args:
        picture: The picture.
        facts: JSON values; `prompt`, `negative_prompt`, `steps`, `guidance`, `seed`, `size`, …
        path: Of the picture; the other file has the suffix `.json`.
    """
    notes = PngInfo()
    notes.add_itxt("parameters", _in_words(facts))
    aside = path.with_name(f".{path.name}.tmp")
    try:
        picture.save(aside, format="PNG", pnginfo=notes)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    write_atomic(path.with_suffix(".json"), json.dumps(facts, ensure_ascii=False) + "\n")


def _in_words(facts: Mapping[str, Any]) -> str:
    """The facts as picture viewers know them from web interfaces: prompt, negative prompt, rest."""
    named = {
        "Steps": facts["steps"],
        "CFG scale": facts["true_cfg_scale"],
        "Distilled CFG Scale": facts["guidance"],
        "Seed": facts["seed"],
        "Size": "x".join(map(str, facts["size"])),
        "Model": facts["family"],
        "Training step": facts["step"],
    }
    lines = [facts["prompt"]]
    if facts["negative_prompt"] is not None:
        lines.append(f"Negative prompt: {facts['negative_prompt']}")
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in named.items())])
