"""What a run said about itself, gathered from its events: strategy, sharding, memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jobs.run.eventlog import STEP_LINE, EventLog
from jobs.run.events import Memory, Sharding, Start, Validation, Warned

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir

_E = TypeVar("_E", Start, Memory)


@dataclass(frozen=True)
class RunReport:
    """Facts of the latest attempt; empty while it has not come so far.

    Attributes:
        strategy: What ran, such as fsdp2.
        reason: Why.
        global_batch: Samples per optimizer step.
        accumulation: Forwards of a rank in one.
        sharding: The engine's sharding summary: numbers of parameters and bytes.
        measure: What `peaks` counts: `allocated` on GPUs, `rss` on CPU ranks.
        peaks: Phase → the most bytes each rank has taken in it.
        validations: Step and loss on what is held out, the newest few, the last one last.
        warnings: What the run warned about, the newest of very many.
    """

    strategy: str = ""
    reason: str = ""
    global_batch: int | None = None
    accumulation: int | None = None
    sharding: dict[str, Any] = field(default_factory=dict)
    measure: str = ""
    peaks: dict[str, list[int]] = field(default_factory=dict)
    validations: tuple[tuple[int, float], ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, log: EventLog) -> RunReport:
        """Return the report of the events read so far."""
        start, memory = _read(Start, log), _read(Memory, log)
        return cls(
            strategy=start.strategy,
            reason=start.strategy_reason,
            global_batch=start.global_batch,
            accumulation=start.accumulation,
            sharding={k: v for k, v in log.notes.get(Sharding.kind, {}).items() if k not in _FRAME},
            measure=memory.measure,
            peaks=_whole(memory.peaks),
            validations=tuple(log.validations[-_NEWEST:]),
            warnings=tuple(log.warnings[-_MOST_WARNINGS:]),
        )


_FRAME = ("t", "kind")  # what every event has
_NEWEST: Final = 5  # validation losses
_MOST_WARNINGS: Final = 500
_MOST_VALIDATIONS: Final = 5000  # a resume takes back some of them
_REPORTED: Final = {event.kind for event in (Start, Sharding, Memory, Validation, Warned)}


class ReportLog(EventLog):
    """Only what a report is made of: its size does not grow with the stream.

    It can be saved as text, and resumed from there.
    """

    @classmethod
    def begin(cls, run_dir: RunDir, kept: str = "") -> ReportLog:
        """Where `to_json` left off; at the beginning where nothing, or nothing usable, was kept."""
        try:
            state = json.loads(kept)
            return cls(
                run_dir.events,
                notes={str(kind): dict(note) for kind, note in state["notes"].items()},
                validations=[(int(step), float(loss)) for step, loss in state["validations"]],
                warnings=[str(text) for text in state["warnings"]],
                passed_over=STEP_LINE,
                _offset=int(state["offset"]),
                _inode=int(state["inode"]),
            )
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            return cls(run_dir.events, passed_over=STEP_LINE)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(
            {
                "offset": self._offset,
                "inode": self._inode,
                "notes": self.notes,
                "validations": self.validations,
                "warnings": self.warnings,
            }
        )

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._offset

    def _take(self, event: dict[str, Any]) -> None:
        if str(event.get("kind")) not in _REPORTED:
            return
        super()._take(event)
        del self.warnings[:-_MOST_WARNINGS], self.validations[:-_MOST_VALIDATIONS]


def read_report(run_dir: RunDir) -> RunReport:
    """Return the report of a run directory."""
    return RunReport.of(ReportLog.begin(run_dir).read_all())


def _read(kind: type[_E], log: EventLog) -> _E:
    """Read the newest event of a kind; an empty one if none can be read."""
    try:
        return kind.read(log.notes.get(kind.kind, {}))
    except (TypeError, ValueError, OverflowError):
        return kind()


def _whole(peaks: dict[Any, Any]) -> dict[str, list[int]]:
    """Return the phases of which every rank's number is known."""
    return {
        str(name): numbers
        for name, numbers in peaks.items()
        if isinstance(numbers, list) and numbers and all(isinstance(n, int) for n in numbers)
    }
