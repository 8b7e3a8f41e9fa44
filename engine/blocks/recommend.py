"""Which classes to wrap: the outermost repeated blocks, as long as one of them stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from engine.blocks.walk import Kind
    from jobs.models.blocks.parts import Parts

# What stays in the root: gathering it apart would cost collectives and save nothing that counts.
_LEAST_SHARE: Final = 0.01  # of the model, all modules of a class together
_LEAST_UNIT: Final = 0.05  # of the largest unit, one of them
# Blocks inside of blocks are taken only where that is so much better: they mean more collectives.
_WORTHWHILE: Final = 0.05


def recommend(
    kinds: Mapping[str, Kind], parts: Parts, no_split: Collection[str], repeated: Collection[str]
) -> list[str]:
    """Return the classes to wrap, the best first; no class contains another.

    A set is as good as the share that it wraps times what its largest unit leaves of the model.
    Starting with the outermost candidates, the one with the largest unit is given up for what is
    inside of it, again and again, and the best set met on the way wins: of a UNet whose stages
    hold a third of it each, the blocks of its stages.

    Args:
        kinds: The model's classes.
        parts: What the model is made of.
        no_split: What the model's class says is not to be divided.
        repeated: What it says are its repeated blocks; what holds one is no block then.
    """
    total = parts.total()
    pool = _candidates(kinds, {*no_split, *repeated})
    inner = [kinds[name] for name in pool if name in repeated]
    pool -= {outer for kind in inner for outer in kind.outer if outer not in repeated}
    best: list[str] = []
    quality = 0.0
    while pool:
        # None is outermost where classes hold each other.
        outermost = {name for name in pool if not kinds[name].outer & pool} or pool
        largest = max(sorted(outermost), key=lambda name: kinds[name].each)
        chosen = [
            name
            for name in outermost
            if kinds[name].total >= _LEAST_SHARE * total
            and kinds[name].each >= _LEAST_UNIT * kinds[largest].each
        ]
        coverage = parts.coverage(chosen)
        merit = coverage.share * (1 - coverage.largest / total)
        if merit > quality + (_WORTHWHILE if best else 0.0) and not coverage.nested:
            best, quality = chosen, merit
        pool.discard(largest)
    return sorted(best, key=lambda name: (-score(kinds[name], total), name))


def score(kind: Kind, total: int) -> float:
    """Rate a class by itself: what it wraps, how small a unit is, how many there are."""
    return kind.total / total * (1 - kind.each / total) * kind.count if total else 0.0


def _candidates(kinds: Mapping[str, Kind], listed: Collection[str]) -> set[str]:
    """Classes of modules made of modules that are kept in lists, one after the other."""
    able = [
        kind
        for kind in kinds.values()
        # Of `Sequential`, a name that says nothing, a model has others too.
        if kind.callable and kind.composite and kind.total and kind.name != "Sequential"
    ]
    held = {
        kind.name
        for kind in able
        if kind.repeated > 1 or (kind.repeated == 1 and kind.name in listed)
    }
    named = {kind.name for kind in able if kind.name in listed}
    return held or named or {kind.name for kind in able if kind.count > 1}
