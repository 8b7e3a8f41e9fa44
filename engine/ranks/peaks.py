"""The most memory each phase of a run has taken on this rank."""

from __future__ import annotations

import resource
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")


class Peaks:
    """Measures phases, one after another.

    On a GPU it is what torch's allocator held at most; on CPU ranks the largest resident set of
    the process, which the kernel counts and lets a process reset.

    Attributes:
        phases: Phase → bytes, the largest of all its runs.
        doing: The phase that runs, or that has failed; else None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0
        self.phases: dict[str, int] = {}
        self.doing: str | None = None

    @property
    def measure(self) -> str:
        """What is counted: `allocated` on a GPU, `rss` on CPU ranks."""
        return "allocated" if self._device.type == "cuda" else "rss"

    @contextmanager
    def phase(self, name: str, *, measured: bool = True) -> Iterator[None]:
        """Measure what happens within, or only name it; phases must not be nested."""
        self.doing = name
        if measured:
            self._reset()
        try:
            yield
            self.doing = None
        finally:
            if measured:
                self.phases[name] = max(self.phases.get(name, 0), self._peak())

    def memory(self) -> dict[str, int | None]:
        """Bytes that torch holds on this rank's GPU now and at most; empty on CPU."""
        if self._device.type != "cuda":
            return {}
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "peak": max(self._highest, torch.cuda.max_memory_allocated(self._device)),
        }

    def _reset(self) -> None:
        if self._device.type == "cuda":
            self._highest = max(self._highest, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # not allowed in some containers: then the peak is the run's
                _CLEAR.write_text("5")  # resets the high-water mark of the resident set

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError, ValueError, IndexError):
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
