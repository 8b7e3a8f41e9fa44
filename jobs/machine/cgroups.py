"""Read the memory limits of the cgroups around this process (a container, a batch system)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
_FILES: Final = (  # limit, usage and reclaimable part, for cgroup v2 and v1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_rooms(own: Path = OWN, mounted: Path = CGROUPS) -> list[tuple[int, int]]:
    """Return `(bytes left, limit)` of every cgroup that limits memory, innermost first.

    Args:
        own: The file that lists this process's cgroups.
        mounted: Mount point of the cgroup file system, v1 or v2.
    """
    rooms = []
    for group in _groups(own, mounted):
        for limit, used, cache in _FILES:
            most, now = _number(group / limit), _number(group / used)
            if most is not None and now is not None:
                left = most - now + _reclaimable(group / "memory.stat", cache)
                rooms.append((max(0, left), most))
    return rooms


def _groups(own: Path, mounted: Path) -> Iterator[Path]:
    """Yield the memory cgroups, innermost first."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mounted / "memory" if controllers else mounted
        inner = root / path.lstrip("/")
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(root))


def _number(file: Path) -> int | None:
    """Read a number; None if there is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # `max`
        return None


def _reclaimable(file: Path, name: str) -> int:
    """Return the bytes of inactive file pages, which count as used but can be reclaimed."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
        return int(dict(pair for pair in words if len(pair) == 2).get(name, 0))
    except (OSError, ValueError):
        return 0
