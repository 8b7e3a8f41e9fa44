"""How much host memory this process may still take: of the machine, and of its container."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from jobs.machine.cgroups import CGROUPS, OWN, memory_rooms

if TYPE_CHECKING:
    from pathlib import Path


def available_memory(own: Path = OWN, mounted: Path = CGROUPS) -> int:
    """Bytes; the least of what the machine and every control group around this process leave.

    Args:
        own: Lists this process's control groups.
        mounted: Where they are, of either version.
    """
    rooms = [left for left, _ in memory_rooms(own, mounted)]
    return min([psutil.virtual_memory().available, *rooms])
