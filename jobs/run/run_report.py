"""What a run said about itself, gathered from its events: strategy, sharding, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs.run.eventlog import EventLog

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir


@dataclass(frozen=True)
class RunReport:
    """Facts of the latest attempt; empty while it has not come so far.

    Attributes:
        strategy: What ran, such as fsdp2.
        reason: Why.
        sharding: The engine's sharding summary: numbers of parameters and bytes.
        measure: What `peaks` counts: `allocated` on GPUs, `rss` on CPU ranks.
        peaks: Phase → the most bytes each rank has taken in it.
        validations: Step and loss on what is held out, the newest few, the last one last.
        warnings: What the run warned about.
    """

    strategy: str = ""
    reason: str = ""
    sharding: dict[str, Any] = field(default_factory=dict)
    measure: str = ""
    peaks: dict[str, list[int]] = field(default_factory=dict)
    validations: tuple[tuple[int, float], ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, log: EventLog) -> RunReport:
        """The report of the events read so far."""
        start, memory = log.notes.get("start", {}), log.notes.get("memory", {})
        peaks = memory.get("peaks")
        return cls(
            strategy=str(start.get("strategy", "")),
            reason=str(start.get("strategy_reason", "")),
            sharding={k: v for k, v in log.notes.get("sharding", {}).items() if k not in _FRAME},
            measure=str(memory.get("measure", "")),
            peaks=_whole(peaks) if isinstance(peaks, dict) else {},
            validations=tuple(log.validations[-_NEWEST:]),
            warnings=tuple(log.warnings),
        )


_FRAME = ("t", "kind")  # what every event has
_NEWEST = 5  # validation losses


def read_report(run_dir: RunDir) -> RunReport:
    """The report of a run directory."""
    return RunReport.of(EventLog(run_dir.events).read_all())


def _whole(peaks: dict[Any, Any]) -> dict[str, list[int]]:
    """The phases of which every rank's number is known."""
    return {
        str(name): numbers
        for name, numbers in peaks.items()
        if isinstance(numbers, list) and numbers and all(isinstance(n, int) for n in numbers)
    }
