"""Write `docs/noise-levels.md`: which noise levels each family trains on here and elsewhere.

`python tests/bench/noise.py CHECKOUTS` looks up in CHECKOUTS/NAME what `noise_peers.json` says of
each trainer, and writes the page; without CHECKOUTS, it only writes the page. CHECKOUTS holds a
checkout of each trainer, in a folder named as its repository.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine import families
from engine.diffusion.objective import build_objective
from engine.memory.tracing.inputs import CELLS
from jobs.spec.families import FAMILIES
from jobs.spec.families.base import Family as Facts
from jobs.spec.families.base import ShiftLine
from jobs.spec.job_spec import JobSpec
from jobs.spec.noise_levels import sigma_at

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "noise-levels.md"
_PEERS: Final = Path(__file__).with_name("noise_peers.json")
_QUANTILES: Final = 1000
HIGH, MIDDLE = 0.9, 0.5

SCHEDULERS: Final[dict[str, dict[str, Any]]] = {
    "auraflow": {"shift": 1.73},
    "krea2": {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 6400,
    },
    "qwen_image": {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    },
    "minimax_h3": {"shift": 12.0},
    "sana": {"flow_shift": 3.0},
    "sd3": {"shift": 3.0},
    "wan": {"flow_shift": 3.0},
    "wan:2.1-flf2v-14b-720p": {"flow_shift": 16.0},
    "wan:2.2-ti2v-5b": {"flow_shift": 5.0},
}
"""Settings of published schedulers, where training has none of its own; the toys have the same."""

BOUNDARIES: Final = {
    "wan:2.2-t2v-a14b-high": 0.875,
    "wan:2.2-t2v-a14b-low": 0.875,
    "wan:2.2-vace-fun-a14b-high": 0.875,
    "wan:2.2-vace-fun-a14b-low": 0.875,
    "wan:2.2-i2v-a14b-high": 0.9,
    "wan:2.2-i2v-a14b-low": 0.9,
    "wan:2.2-flf2v-a14b-high": 0.9,
    "wan:2.2-flf2v-a14b-low": 0.9,
}
"""The sigmas that part the experts."""

# Width, height and frames that a family was made for, where it is not 1024x1024.
_NATIVE: Final = {
    "ideogram4": (2048, 2048, 1),
    "hunyuanvideo": (1280, 720, 129),
    "hunyuanvideo15": (1280, 720, 121),
    "ltxvideo": (1216, 704, 121),
    "ltx2": (768, 512, 121),
    "minimax_h3": (1344, 768, 124),
    "qwen_image": (1328, 1328, 1),
    "wan": (832, 480, 81),
}


@dataclass(frozen=True)
class Shares:
    """How much of what is drawn lies where.

    Attributes:
        high: The share above sigma 0.9.
        low: The share below sigma 0.5.
    """

    high: float
    low: float

    def __str__(self) -> str:
        return f"{self.high * 100:.0f} %, {self.low * 100:.0f} %"


def flavours() -> list[tuple[str, str]]:
    """Return every family of flow matching with each of its flavours."""
    return [
        (name, flavour)
        for name, facts in FAMILIES.items()
        if facts.objective == "flow"
        for flavour in facts.flavours
    ]


def sizes(family: str) -> tuple[tuple[int, int, int], ...]:
    """Return widths, heights and frames: of a small image, a large one, and the native size."""
    return (512, 512, 1), (1024, 1024, 1), _NATIVE.get(family, (1024, 1024, 1))


def tokens(family: str, flavour: str, size: tuple[int, int, int]) -> int:
    """Return the denoiser's tokens of a sample of this size."""
    facts, (width, height, frames) = FAMILIES[family], size
    step = _token_side(facts, flavour)
    return (width // step) * (height // step) * _latent_frames(family, frames)


def _token_side(facts: Facts, flavour: str) -> int:
    """Return the pixels of a token; a model that makes layers has sides of other multiples."""
    return facts.latent_step if facts.makes_layers(flavour) else facts.latent_step_of(flavour)


@cache
def shares_of(family: str, flavour: str, size: tuple[int, int, int]) -> Shares:
    """Return the shares of what a job draws that sets nothing but its model.

    Args:
        family: One of flow matching.
        flavour: Of this family.
        size: Width and height in pixels, and frames.
    """
    spec = JobSpec(model_family=family, model_flavour=flavour)
    full = f"{family}:{flavour}"
    index = {"boundary_ratio": BOUNDARIES[full]} if full in BOUNDARIES else {}
    index |= {"is_distilled": True} if full == "krea2:turbo" else {}
    schedule = SCHEDULERS.get(full, SCHEDULERS.get(family, {}))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "scheduler").mkdir()
        (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(schedule))
        (root / "model_index.json").write_text(json.dumps(index))
        loaded = families.load(family, flavour, root)
        objective = build_objective(spec, loaded, root)
    width, height, frames = size
    step = _token_side(FAMILIES[family], flavour)
    count = _latent_frames(family, frames)
    cells = 2 if loaded.tokens_of(2, 2) == 1 else 1  # latents that make a token, on a side
    latents = torch.empty(
        (1, 1, count, height // step * cells, width // step * cells),
        device="meta",
    )
    return _shares(lambda quantile: objective.level_at(quantile, latents))


def _latent_frames(family: str, frames: int) -> int:
    return CELLS[family].latents(frames) if FAMILIES[family].frame_step else 1


def _shares(level_at: Any) -> Shares:
    levels = [level_at((number + 0.5) / _QUANTILES) for number in range(_QUANTILES)]
    return Shares(
        sum(level > HIGH for level in levels) / len(levels),
        sum(level < MIDDLE for level in levels) / len(levels),
    )


def peers() -> list[dict[str, Any]]:
    """Return what other trainers draw: a mapping for each, as the file has them."""
    entries: list[dict[str, Any]] = json.loads(_PEERS.read_text(encoding="utf-8"))
    return entries


def missing(checkouts: Path) -> list[str]:
    """Return the facts that the trainers' checkouts do not bear out."""
    lines = []
    for entry in peers():
        file = checkouts / entry["repo"].partition("/")[2] / entry["file"]
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if entry["text"] not in text:
            lines.append(f"{entry['repo']}: {entry['file']} does not have {entry['text']!r}")
    return lines


def page() -> str:
    """Return the page's text."""
    return _HEAD + "\n".join(_ours()) + _BETWEEN + "\n".join(_theirs()) + "\n"


def _ours() -> list[str]:
    """A row for the flavours of a family that draw alike."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, flavour in flavours():
        spec = JobSpec(model_family=family, model_flavour=flavour)
        cells = [str(shares_of(family, flavour, size)) for size in sizes(family)]
        width, height, frames = sizes(family)[-1]
        native = f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")
        key = (family, f"`{spec.timestep_sampling}`", *cells, native)
        rows.setdefault(key, []).append(flavour)
    several = {family for family, *_ in rows if sum(key[0] == family for key in rows) > 1}
    return [
        f"| {FAMILIES[family].title}{_named(names) if family in several else ''} | "
        + " | ".join(cells)
        + " |"
        for (family, *cells), names in rows.items()
    ]


def _named(names: list[str]) -> str:
    return ": " + ", ".join(f"`{name}`" for name in names)


def _theirs() -> list[str]:
    rows = []
    for family in dict.fromkeys(family for family, _ in flavours()):
        for entry in peers():
            if family in entry["families"]:
                rows.append(f"| {FAMILIES[family].title} | {_row(family, entry)} |")
    return rows


def peers_draw(family: str, entry: dict[str, Any]) -> tuple[str, Shares]:
    """Return what a trainer draws for a family at its native size: in words, and its shares.

    Args:
        family: One of the entry's.
        entry: Of `peers`. "line" is a `ShiftLine`, which "extrapolate" follows beyond its points;
            "uniform" is the share of draws that are even instead, "deviation" that of the logit.
    """
    count = tokens(family, next(iter(FAMILIES[family].flavours)), sizes(family)[-1])
    shift, by = entry.get("shift", 1.0), ""
    if "line" in entry:
        line = ShiftLine(*entry["line"])
        beyond = entry.get("extrapolate", False)
        shift = line.at(count, extrapolate=beyond)
        by = f", by tokens: {line.low:g} at {line.few:,} to {line.high:g} at {line.many:,}"
        by += " and beyond" if beyond else ""
    drawn = f"`{entry['how']}`" + (f", {shift:.3g}{by}" if shift != 1 else "")
    deviation = entry.get("deviation", 1.0)
    drawn += f", with a deviation of {deviation:g}" if deviation != 1 else ""
    shares = _shares(
        lambda quantile: sigma_at(quantile, entry["how"], shift=shift, deviation=deviation)
    )
    if even := entry.get("uniform", 0.0):
        drawn += f"; {even * 100:.0f} % `uniform`"
        shares = Shares(
            (1 - even) * shares.high + even * (1 - HIGH), (1 - even) * shares.low + even * MIDDLE
        )
    return drawn, shares


def _row(family: str, entry: dict[str, Any]) -> str:
    drawn, shares = peers_draw(family, entry)
    note = f" ({entry['note']})" if "note" in entry else ""
    source = f"`{entry['file']}` of {entry['repo']}{note}"
    return f"{entry['peer']} | {drawn} | {shares} | {source}"


_HEAD: Final = """# Noise levels of each family

The sigmas a job draws when it sets only its model, and what other trainers draw.
[A script](../tests/bench/README.md) makes this page, and looks up each fact about another trainer
in its checkout. [Noise levels](training.md#noise-levels) explains the terms and the choices.

## Here

The share of draws above sigma 0.9, which decide the composition, and the share below 0.5, which
decide detail.

| family | draws | 512x512 | 1024x1024 | native size | native size is |
|---|---|---|---|---|---|
"""
_BETWEEN: Final = """

Wan 2.2's experts draw only the sigmas that they are for.

## Elsewhere

By default, or as the trainer's guide or preset for the family has it; at the native size. Numbers
are shifts.

| family | trainer | draws | above 0.9, below 0.5 | source |
|---|---|---|---|---|
"""


def main() -> int:
    """Check the facts if there are checkouts, and write the page.

    Returns:
        The exit status: 1 if a fact is not borne out.
    """
    wrong = missing(Path(sys.argv[1])) if len(sys.argv) > 1 else []
    for line in wrong:
        print(line)
    if not wrong:
        PAGE.write_text(page(), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
