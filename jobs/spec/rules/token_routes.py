"""Routes around blocks for some of an image's tokens (TREAD): the key `tread`. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.spec.families import FAMILIES
from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.values.value_types import ROUTE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import RecipeKeys

Route = tuple[int, int, float]
"""First and last block, counted from 0, and the share of the image's tokens that skips both and all
in between."""


def routes_of(tread: Mapping[str, float], blocks: int) -> list[Route]:
    """Return the routes of a job in a model with this many blocks, in the order of forward.

    Raises:
        SpecError: A route is empty or outside of the model, or two of them overlap.
    """
    routes = []
    for text, share in tread.items():
        first, last = (end + blocks if end < 0 else end for end in _ends(text))
        if not 0 <= first <= last < blocks:
            raise SpecError(
                f"tread: {text} is no range of the model's {blocks} blocks",
                f"the first block is 0, the last one {blocks - 1} or -1",
            )
        routes.append((first, last, share))
    routes.sort()
    for before, after in pairwise(routes):
        if after[0] <= before[1]:
            raise SpecError(
                f"tread: {_named(before)} and {_named(after)} overlap, of the model's {blocks} "
                "blocks",
                f"let the second one begin at {before[1] + 1}",
            )
    return routes


def _ends(text: str) -> tuple[int, int]:
    first, last = ROUTE.fullmatch(text).groups()  # type: ignore[union-attr]  # it was read as one
    return int(first), int(last)


def _named(route: Route) -> str:
    return f"{route[0]}..{route[1]}"


def _tread(spec: RecipeKeys) -> Conflict | None:
    if not spec.tread:
        return None
    family = FAMILIES.get(spec.model_family)
    if family is not None and (why := family.not_routed_of(spec.model_flavour)):
        flavour = "" if family.not_routed else f" {spec.model_flavour}"
        return Conflict(
            "tread", f"tread does not support {family.title}{flavour}: {why}; remove it"
        )
    if spec.context_parallel_size > 1:
        return Conflict(
            "tread",
            "tread is not supported with context parallelism, whose ranks have a part of the "
            "tokens each; set context_parallel_size: 1, or remove tread",
        )
    return None


ROUTE_RULES: Final = (_tread,)
