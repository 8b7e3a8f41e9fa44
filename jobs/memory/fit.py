"""A prediction against a GPU, or against the machine's memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from jobs.machine.gpu import foreign_users

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from jobs.machine.devices import Gpu
    from jobs.memory.predicted import Predicted


class Verdict(StrEnum):
    """Whether something fits, in words."""

    FITS = "fits"
    TIGHT = "tight"
    TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class Room:
    """Memory of one device, in bytes.

    Attributes:
        name: What people call it.
        total: All of it.
        held: What others hold of it, and keep.
        passing: What others hold now and the job waits for.
        gpu: Its index; None for what is no GPU of this machine.
    """

    name: str
    total: int
    held: int = 0
    passing: int = 0
    gpu: int | None = None

    @property
    def free(self) -> int:
        """What a job can have."""
        return max(0, self.total - self.held)


@dataclass(frozen=True)
class Fit:
    """How a prediction fits on a device, in bytes.

    Attributes:
        low: What it needs at least.
        high: What it needs at most.
        room: The device.
    """

    low: int
    high: int
    room: Room

    @property
    def verdict(self) -> Verdict:
        """It fits for sure if all of the band does, and does not if nothing of it does."""
        if self.high <= self.room.free:
            return Verdict.FITS
        return Verdict.TIGHT if self.low <= self.room.free else Verdict.TOO_LARGE

    @property
    def spare(self) -> int:
        """Head-room over the most that it needs; negative where that does not fit."""
        return self.room.free - self.high


def fit_of(predicted: Predicted, room: Room, *, on_gpus: bool, factor: float = 1.0) -> Fit:
    """Hold a prediction against a room.

    Args:
        predicted: Of one rank.
        room: A GPU, or the machine where the ranks run on its CPU.
        on_gpus: Which of the two.
        factor: How much more than predicted runs took on this machine; widens the band upwards.
    """
    if on_gpus:
        low, high = predicted.device
        return Fit(low, round(high * max(1.0, factor)), room)
    needed = predicted.host.get("machine") or predicted.reserved[1] * predicted.ranks
    return Fit(needed, needed, room)


def worst(fits: Iterable[Fit]) -> Fit:
    """Of the same need on several devices, where it is tightest, or has to wait for others."""
    return min(fits, key=lambda fit: (fit.spare, -fit.room.passing))


def room_of(
    gpu: Gpu, ours: Collection[int], claims: Mapping[str, int], *, shares: bool = False
) -> Room:
    """Compute what a GPU has for a job that starts there.

    Args:
        gpu: One look at it.
        ours: Pids of our jobs' processes.
        claims: UUID → the job of ours that holds it; ours are waited for.
        shares: Whether the job starts beside others; else it waits for those that compute there.
    """
    used = gpu.memory_used or 0
    if gpu.uuid in claims:
        # In a container pids may be the host's: of a GPU that we hold, only known strangers count.
        strangers = (
            process for process in gpu.processes if process.pid not in ours and process.command
        )
        used = min(used, sum(process.memory or 0 for process in strangers))
    waits = not shares and bool(foreign_users([gpu], ours, ()))
    held, passing = (0, used) if waits else (used, 0)
    return Room(f"GPU {gpu.index}", gpu.memory_total, held, passing, gpu.index)
