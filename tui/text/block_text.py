"""Describe a model's blocks and the chosen ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.spec.values.spellings import nearest
from tui.text.cache_text import listed
from tui.text.data_text import some
from tui.text.format import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.models.blocks import BlockClass, Detection

RECOMMENDED: Final = "★"
NO_SPLIT: Final = "no-split"
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_MANY: Final = 2  # times the number of units that the recommended classes make
_MUCH: Final = 0.5  # of a model in one unit or in the root, which makes sharding ineffective


@dataclass(frozen=True)
class Model:
    """The model of a job as the form names it.

    Attributes:
        family: `model_family`.
        flavour: `model_flavour`.
        path: `pretrained_model_name_or_path`: a directory, or a hub id in the local cache.
    """

    family: str | None
    flavour: str | None
    path: str | None

    def __str__(self) -> str:
        return " · ".join(
            filter(None, [" ".join(filter(None, [self.family, self.flavour])), self.path])
        )


def parameters(count: int) -> str:
    """Return a number of parameters: `11.9 B`, `141.6 M`, `512`."""
    for unit, name in _UNITS:
        if count >= unit * 0.9995:  # such counts would be rounded up to 1000
            return f"{count / unit:.{1 if count < 999.5 * unit else 0}f} {name}"
    return str(count)


def share(part: float) -> str:
    """Return `97.8%`; never 100 or 0 unless exact."""
    if 0 < part < 0.001:
        return "<0.1%"
    if 0.999 < part < 1:
        return ">99.9%"
    return f"{part:.1%}" if 0 < part < 1 else f"{part:.0%}"


def headline(detection: Detection, model: Model) -> str:
    """Return the model class, its size and the source of its config."""
    parts = [detection.model_class, f"{parameters(detection.total_params)} parameters", str(model)]
    if not model.path and detection.pretrained_model:
        parts.append(detection.pretrained_model)
    return " · ".join(filter(None, parts)) + (" · cached" if detection.cached else "")


def outcome(detection: Detection, chosen: Sequence[str], ranks: int) -> str:
    """Describe the effect of wrapping these classes, in bytes of the stored weights.

    Args:
        detection: The model.
        chosen: The wrapped classes.
        ranks: Number of ranks, if the form sets it.
    """
    if not (kept := usable(detection, chosen)):
        return "nothing checked: the field stays blank and the family's blocks are wrapped"
    does, width = detection.coverage(kept), detection.dtype_bytes
    each = -(-detection.total_params // ranks) * width
    return " · ".join(
        (
            f"wraps {share(does.share)} in {some(does.units, 'unit')}",
            f"largest unit {size(does.largest * width)}",
            f"root {size(does.root * width)} gathered on each rank",
            f"{size(each)} per rank on {ranks} ranks" if ranks > 1 else f"{size(each)} on 1 rank",
        )
    )


def cautions(detection: Detection, chosen: Sequence[str]) -> list[str]:
    """Return a warning for each choice that is probably unintended."""
    kept = usable(detection, chosen)
    does = detection.coverage(kept)
    shown = {block.class_name for block in detection.classes}
    warnings = [unusable(detection, name) for name in chosen if name not in kept]
    warnings += [
        f"{name} is checked but not repeated; a unchecks it" for name in kept if name not in shown
    ]
    around: dict[str, list[str]] = {}
    for outer, inner in does.nested:
        around.setdefault(inner, []).append(outer)
    warnings += [
        f"nested: {inner} is inside {listed(outer)}; only the rest of the outer class is its own "
        "unit"
        for inner, outer in around.items()
    ]
    if does.units and does.largest > _MUCH * detection.total_params:
        warnings.append(
            "one unit holds more than half of the model and each rank gathers all of it; choose "
            "smaller blocks"
        )
    elif does.units and does.share < _MUCH:
        warnings.append(
            f"{share(1 - does.share)} of the model stays in the root, which each rank holds in "
            "full during a step; choose larger blocks"
        )
    usual = detection.coverage(detection.recommended).units
    if usual and does.units > _MANY * usual:
        warnings.append(
            f"{does.units} units ({usual} with the recommended blocks): each is gathered "
            "separately, and many small ones are slow"
        )
    return warnings


def usable(detection: Detection, chosen: Sequence[str]) -> list[str]:
    """Return those of the classes that can be units of this model."""
    *inner, _ = detection.parts.parts  # the root is the last
    present = {part.class_name for part in inner} - set(detection.parts.containers)
    return [name for name in chosen if name in present]


def unusable(detection: Detection, name: str) -> str:
    """Return why a class in the field cannot be a unit, and the nearest valid name."""
    if name == detection.model_class:
        return f"{name}, named in the field, is the full model and is ignored"
    if name in detection.parts.containers:
        return f"{name}, named in the field, has no forward method and is ignored"
    spelled = {block.class_name.lower(): block.class_name for block in detection.classes}
    best = nearest(name, spelled)
    meant = f'; did you mean "{spelled[best]}"?' if best else ""
    return f"the model has no {name}, named in the field{meant}"


def about(block: BlockClass, dtype_bytes: int) -> str:
    """Describe a block class beyond its row of the table."""
    facts = [
        f"each {parameters(block.params_each)} parameters, {size(block.params_each * dtype_bytes)}"
    ]
    facts += [f"{RECOMMENDED} recommended"] if block.recommended else []
    lists = [
        name
        for named, name in (
            (block.in_no_split_modules, "_no_split_modules"),
            (block.in_repeated_blocks, "_repeated_blocks"),
        )
        if named
    ]
    facts += [f"in {', '.join(lists)}"] if lists else []
    return " · ".join(facts)


def paths(block: BlockClass) -> str:
    """Return the paths of the first blocks."""
    return ", ".join(block.sample_paths) + (", …" if block.count > len(block.sample_paths) else "")
