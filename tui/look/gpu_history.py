"""How busy and how full each GPU was in the last minutes, for graphs. Knows no clock."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.machine.devices import Gpu

EVERY: Final = 2.0  # seconds of a column; a line is sent again whenever a column is added
_COLUMNS: Final = 240  # eight minutes


class History:
    """Averages of what the driver says. One thread adds; what is shown is replaced, not changed."""

    def __init__(self) -> None:
        self.shown: dict[str, tuple[int | None, ...]] = {}
        self.filled: dict[str, tuple[int | None, ...]] = {}  # percent of the memory in use
        self._columns: dict[str, deque[int | None]] = {}
        self._memory: dict[str, deque[int | None]] = {}
        self._seen: dict[str, list[int]] = {}  # of the column that is being filled
        self._until = 0.0

    def add(self, now: float, gpus: Sequence[Gpu]) -> None:
        """Add a sample of each GPU. Every two seconds their average becomes a column."""
        for gpu in gpus:
            seen = self._seen.setdefault(gpu.uuid, [])
            if gpu.utilisation is not None:
                seen.append(gpu.utilisation)
        if now < self._until:
            return
        self._until = now + EVERY - 0.25  # looks come a little early and late
        for uuid, seen in self._seen.items():
            columns = self._columns.setdefault(uuid, deque(maxlen=_COLUMNS))
            columns.append(round(sum(seen) / len(seen)) if seen else None)
            seen.clear()
        for gpu in gpus:
            full = self._memory.setdefault(gpu.uuid, deque(maxlen=_COLUMNS))
            readable = gpu.memory_used is not None and gpu.memory_total
            full.append(
                round(100 * (gpu.memory_used or 0) / gpu.memory_total) if readable else None
            )
        self.shown = {gpu.uuid: tuple(self._columns[gpu.uuid]) for gpu in gpus}
        self.filled = {gpu.uuid: tuple(self._memory[gpu.uuid]) for gpu in gpus}
