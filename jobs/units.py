"""Format numbers for users. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def size(count: float) -> str:
    """Format bytes with a unit: `610 MiB`, `1.2 GiB`, `140 GiB`."""
    value, unit = float(min(count, 1e300)), "B"  # a damaged file may contain any number of digits
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit[0] in "GT" and value < 100 else f"{value:.0f} {unit}"


def gpus(count: int) -> str:
    """Format a number of GPUs: `1 GPU`, `8 GPUs`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def ranges(numbers: Iterable[int]) -> str:
    """Format indices, joining runs of three or more: `0-3,6`."""
    indices = sorted(set(numbers))
    if len(indices) <= 2:
        return ",".join(map(str, indices))
    parts: list[str] = []
    start = 0
    for end in range(1, len(indices) + 1):
        if end < len(indices) and indices[end] == indices[end - 1] + 1:
            continue
        run = indices[start:end]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
        start = end
    return ",".join(parts)


def ordinal(number: int) -> str:
    """Return `1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"


def named_counts(names: Mapping[str, Sequence[str]]) -> str:
    """Count names by kind, as in `5 new (a.png, b.png, c.png, …), 1 gone (d.png)`; "" for none."""
    return ", ".join(
        f"{len(each):,} {kind} ({', '.join(each[:3])}{', …' if len(each) > 3 else ''})"
        for kind, each in names.items()
        if each
    )
