"""Which classes to wrap: the outermost repeated blocks, as long as one of them stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from engine.blocks.walk import Kind
    from jobs.block_parts import Parts

# Classes with less of the model than this stay in the root: gathering them apart costs a
# collective each and saves nothing that counts.
_LEAST_SHARE: Final = 0.01
# Blocks inside of blocks are taken only where that is so much better: they mean more collectives.
_WORTHWHILE: Final = 0.05


def recommend(kinds: Mapping[str, Kind], parts: Parts, listed: Collection[str]) -> list[str]:
    """The set of classes to wrap; none is inside of another.

    A set is as good as the share that it wraps times what its largest unit leaves of the model.
    Begun with the outermost candidates, the one with the largest unit is given up for what is
    inside of it, again and again, and the best set met on the way wins: of a UNet whose stages
    hold a third each, their blocks.

    Args:
        kinds: The model's classes.
        parts: What the model is made of.
        listed: Classes that the model's own class lists as blocks.
    """
    total = parts.total()
    pool = _candidates(kinds, listed)
    best: list[str] = []
    quality = 0.0
    while pool:
        outermost = [name for name in pool if not kinds[name].outer & pool]
        chosen = [name for name in outermost if kinds[name].total >= _LEAST_SHARE * total]
        coverage = parts.coverage(chosen)
        found = coverage.share * (1 - coverage.largest / total)
        if found > quality + (_WORTHWHILE if best else 0.0):
            best, quality = chosen, found
        # None is outermost where classes hold each other.
        pool.discard(max(sorted(outermost or pool), key=lambda name: kinds[name].each))
    return sorted(best, key=lambda name: score(kinds[name], total), reverse=True)


def score(kind: Kind, total: int) -> float:
    """How well a class alone would do: what it wraps, how small a unit is, how many there are."""
    return kind.total / total * (1 - kind.each / total) * kind.count if total else 0.0


def _candidates(kinds: Mapping[str, Kind], listed: Collection[str]) -> set[str]:
    """Classes of modules made of modules that are kept in lists, one after the other."""
    able = [kind for kind in kinds.values() if kind.callable and kind.composite and kind.total]
    held = {
        kind.name
        for kind in able
        if kind.repeated > 1 or (kind.repeated == 1 and kind.name in listed)
    }
    named = {kind.name for kind in able if kind.name in listed}
    return held or named or {kind.name for kind in able if kind.count > 1}
