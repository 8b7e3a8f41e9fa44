"""What is told of a model's blocks and of a choice among them, in words. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.spellings import nearest
from tui.data.words import some
from tui.format import size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs.blocks import BlockClass, Detection

RECOMMENDED: Final = "★"
NO_SPLIT: Final = "no-split"
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_MUCH: Final = 0.5  # of a model in one unit or in the root: sharding then saves little


@dataclass(frozen=True)
class Model:
    """The model of a job, as its form names it.

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
    """A number of parameters: `11.9 B`, `141.6 M`, `512`."""
    for unit, name in _UNITS:
        if count >= unit * 0.9995:  # what would be rounded up to 1000
            return f"{count / unit:.{1 if count < 999.5 * unit else 0}f} {name}"
    return str(count)


def share(part: float) -> str:
    """`97.8%`; never 100 or 0 while something is missing or there."""
    if 0 < part < 0.001:
        return "<0.1%"
    if 0.999 < part < 1:
        return ">99.9%"
    return f"{part:.1%}" if 0 < part < 1 else f"{part:.0%}"


def headline(found: Detection, model: Model) -> str:
    """What was looked at."""
    parts = [found.model_class, f"{parameters(found.total_params)} parameters", str(model)]
    if not model.path and found.pretrained_model:
        parts.append(found.pretrained_model)
    return " · ".join(filter(None, parts)) + (" · looked at before" if found.cached else "")


def outcome(found: Detection, chosen: Sequence[str], ranks: int) -> str:
    """What wrapping these classes does, in bytes of the stored weights.

    Args:
        found: The model.
        chosen: The classes.
        ranks: Of the job, as far as its form says.
    """
    if not chosen:
        return "nothing is checked: the field stays blank, and the family's own blocks are wrapped"
    does, width = found.coverage(chosen), found.dtype_bytes
    each = -(-found.total_params // ranks) * width
    return " · ".join((
        f"wraps {share(does.share)} in {some(does.units, 'unit')}",
        f"largest unit {size(does.largest * width)}",
        f"root {size(does.root * width)} gathered on each rank",
        f"{size(each)} a rank on {ranks} ranks" if ranks > 1 else f"{size(each)} on the one rank",
    ))  # fmt: skip


def cautions(found: Detection, chosen: Sequence[str]) -> list[str]:
    """What may not be as one thinks, a sentence each."""
    does = found.coverage(chosen)
    listed = {one.class_name for one in found.classes}
    told = [missing(name, listed) for name in does.unknown]
    told += [
        f"{name} is chosen too, though it is not repeated; a leaves it out"
        for name in chosen
        if name not in listed and name not in does.unknown
    ]
    told += [
        f"nested: {inner} lies inside {outer}, which then gathers only what is left of it"
        for outer, inner in does.nested
    ]
    if does.units and does.largest > _MUCH * found.total_params:
        told.append(
            "one unit holds more than half of the model, and each rank gathers it whole; choose "
            "smaller blocks"
        )
    elif does.units and does.share < _MUCH:
        told.append(
            f"{share(1 - does.share)} of the model stays in the root, which each rank holds whole "
            "during a step; choose blocks that hold more"
        )
    return told


def missing(name: str, known: Collection[str]) -> str:
    """That a model has no such class, and what may have been meant."""
    spelled = {one.lower(): one for one in known}
    best = nearest(name, spelled)
    meant = f'; did you mean "{spelled[best]}"?' if best else ""
    return f"the model has no {name}, which the field names{meant}"


def about(one: BlockClass, dtype_bytes: int) -> str:
    """What is known of a class besides its row."""
    facts = [
        f"each {parameters(one.params_each)} parameters, {size(one.params_each * dtype_bytes)}"
    ]
    facts += [f"{RECOMMENDED} recommended"] if one.recommended else []
    lists = [
        name
        for named, name in (
            (one.in_no_split_modules, "_no_split_modules"),
            (one.in_repeated_blocks, "_repeated_blocks"),
        )
        if named
    ]
    facts += [f"in {', '.join(lists)}"] if lists else []
    return " · ".join(facts)


def paths(one: BlockClass) -> str:
    """Where the first ones are."""
    return ", ".join(one.sample_paths) + (", …" if one.count > len(one.sample_paths) else "")
