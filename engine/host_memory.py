"""How much host memory this process may still take: of the machine, and of its container."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def available_memory(own: Path = _OWN, mounted: Path = _CGROUPS) -> int:
    """Bytes; the least of what the machine and every control group around this process leave.

    Args:
        own: Lists this process's control groups.
        mounted: Where they are, of either version.
    """
    left = [psutil.virtual_memory().available]
    for directory in _groups(own, mounted):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(directory / limit), _number(directory / used)
            if most is not None and now is not None:
                left.append(max(0, most - now + _reclaimable(directory / "memory.stat", cache)))
    return min(left)


def _groups(own: Path, mounted: Path) -> list[Path]:
    """The memory control groups, from the innermost out."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mounted / "memory" if controllers else mounted
        inner = root / path.lstrip("/")
        found += [one for one in (inner, *inner.parents) if one.is_relative_to(root)]
    return found


def _number(file: Path) -> int | None:
    """None where there is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # `max`
        return None


def _reclaimable(file: Path, name: str) -> int:
    """Pages of files that nobody uses at the moment; they count as used."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
        return int(dict(pair for pair in words if len(pair) == 2).get(name, 0))
    except (OSError, ValueError):
        return 0
