"""Read a run's event stream as it grows: steps, phases, and why it ended."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from jobs.run.events import (
    Checkpoint,
    End,
    Memory,
    PhaseEvent,
    Sample,
    Scores,
    Sharding,
    Start,
    Step,
    Validation,
    Warned,
)
from jobs.run.judging import LOSS, TITLES, UNMEASURED, Measurements
from jobs.untrusted.text import harmless_value

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.run.rundir import RunDir


_PACE_WINDOW: Final = 20  # steps
_FIRST_READ: Final = 16 << 10  # bytes of the first read from the end of the file
_READ_GROWTH: Final = 8  # factor by which each further read is larger
_LONG_AGO: Final = 8 << 20  # bytes from the end, in which phases are looked for
_LATEST: Final = 6  # phases of a kind that are remembered
_LONG_STEP: Final = 3.0  # times the median, as which a longer step counts
_LONG_PHASE: Final = 2.0  # the same of a phase
# `jobs.run.rundir.event` begins lines like this; any other line is decoded.
STEP_LINE: Final = re.compile(rb'\{"t": [0-9.e+]+, "kind": "step"')
_BEGINS: Final = rb'\{"t": [0-9.e+]+, "kind": "'
_NO_NEWS_OF_STEPS: Final = re.compile(_BEGINS + rb'(?!step"|start"|phase"|checkpoint")')
_NO_NEWS_OF_PHASES: Final = re.compile(
    _BEGINS + rb'(?:(?!start"|phase"|checkpoint")|phase", "name": "\w+", "state": "progress")'
)


@dataclass(frozen=True)
class Phase:
    """What the ranks are doing outside of steps.

    Attributes:
        name: A key of `jobs.run.rundir.PHASES`.
        done: Completed units.
        total: All units; None if unknown.
        finished: Whether the phase has ended.
        t: Time of the latest event, in Unix seconds.
        seconds_left: Estimated remaining seconds.
        ranks: Completed units per rank, for work shared between ranks.
        since: When it began, in Unix seconds; 0 if unknown.
    """

    name: str
    done: int = 0
    total: int | None = None
    finished: bool = False
    t: float = 0.0
    seconds_left: float | None = None
    ranks: tuple[int, ...] = ()
    since: float = 0.0


@dataclass
class EventLog:
    """The events so far. `poll` reads only what was appended since the last call.

    After a resume from an earlier checkpoint the steps since then are repeated. Those of the later
    attempt replace them, also in `validations` (step and loss) and `scores` (step and scores).

    Lines that `passed_over` matches are read but not decoded.

    `took` has the seconds of the latest phases by their name, and of whole saves, which may be
    written behind training, as `checkpoint`.
    """

    path: Path
    steps: list[Step] = field(default_factory=list)
    phase: Phase | None = None
    end_reason: str | None = None
    checkpoints: list[int] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    scores: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed_over: re.Pattern[bytes] | None = None
    behind: bool = False  # whether the last poll left data unread
    took: dict[str, deque[float]] = field(default_factory=dict)
    _step_to_step: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_PACE_WINDOW)
    )
    _first_step: tuple[float, float] | None = (
        None  # of the attempt: it warms up, and counts only while alone
    )
    _offset: int = 0
    _inode: int = 0

    def poll(self, limit: int = 8 << 20) -> bool:
        """Read up to `limit` new bytes; return whether anything changed."""
        try:
            with open(self.path, "rb") as file:
                self._notice_replacement(file.fileno())
                file.seek(self._offset)
                data = file.read(limit)
        except OSError:
            return False
        end = data.rfind(b"\n") + 1  # a partial last line is read again later
        if end == 0 and len(data) >= limit:  # an endless line is not ours; skip it
            end = len(data)
        self._offset += end
        self.behind = len(data) >= limit
        skips = self.passed_over
        for line in data[:end].splitlines():
            # A parser uses the last "kind" of a line, and a damaged line may have several.
            if skips is not None and skips.match(line) and line.count(b'"kind"') == 1:
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                # Characters that could control a terminal are escaped in JSON, or outside of ASCII.
                plain = b"\\" not in line and line.isascii()
                self._consume(event if plain else harmless_value(event))
        return end > 0

    def read_all(self) -> Self:
        """Poll until there is nothing new."""
        while self.poll():
            pass
        return self

    @property
    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    def measured(self, by: str = "") -> Measurements:
        """Return what the run's checkpoints are judged by, or the measurements of a criterion."""
        by = by or _read(Start, self).best_by
        if by not in TITLES or by == LOSS:
            return Measurements(tuple(self.validations))
        values = ((step, scores[by]) for step, scores in self.scores if by in scores)
        return Measurements(tuple(values), by)

    def seconds_per_step(self, window: int = _PACE_WINDOW) -> float | None:
        """Return the median wall time of the latest steps; None if there are none."""
        recent = sorted(s.seconds for s in self.steps[-window:] if s.seconds is not None)
        return recent[len(recent) // 2] if recent else None

    def step_to_step(self) -> float | None:
        """Return the mean seconds from a step to the next, without the phases between them.

        Unlike the median of `seconds_per_step` it adds up to the time of many steps: whatever a
        loop does between them is in it, and where samples differ in size, each counts as it is.
        """
        recent = self._step_to_step or ([] if self._first_step is None else [self._first_step])
        # The larger one: a simulated run may report all of its steps at once.
        return max(map(_mean, zip(*recent, strict=True)), default=None)

    def usual_seconds(self, phase: str) -> float | None:
        """Return the mean of the latest phases of a kind; one that took very long counts as less.

        The first, which warms up, counts only while it is alone.
        """
        latest = list(self.took.get(phase, ()))
        return _mean(latest[1:] or latest, _LONG_PHASE) if latest else None

    def _notice_replacement(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        if (self._inode and stat.st_ino != self._inode) or stat.st_size < self._offset:
            # The file was replaced: start over.
            self.__init__(self.path, passed_over=self.passed_over)  # type: ignore[misc]
        self._inode = stat.st_ino

    def _consume(self, event: dict[str, Any]) -> None:
        try:
            match event.get("kind"):
                case Step.kind:
                    self._take_step(Step.read(event))
                case PhaseEvent.kind:
                    self._take_phase(PhaseEvent.read(event))
                case Start.kind:
                    self.end_reason = None
                    self.notes[Start.kind] = event
                    resumed = Start.read(event).step
                    self.steps = [s for s in self.steps if s.step <= resumed]
                    self._step_to_step.clear()
                    self._first_step = None
                    self.validations = [v for v in self.validations if v[0] <= resumed]
                    self.scores = [s for s in self.scores if s[0] <= resumed]
                case End.kind:
                    self.end_reason = End.read(event).reason
                    self.phase = None
                case Checkpoint.kind:
                    saved = Checkpoint.read(event)
                    self.checkpoints.append(saved.step)
                    self._remember(Checkpoint.kind, saved.seconds)
                case Sample.kind:
                    self.samples.append(event)
                case Validation.kind:
                    measured = Validation.read(event)
                    _put(self.validations, measured.step, measured.loss)
                case Scores.kind:
                    scored = Scores.read(event)
                    _put(self.scores, scored.step, scored.values())
                case Warned.kind:
                    self.warnings.append(Warned.read(event).message)
                case str() as kind:
                    self.notes[kind] = event
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # written by another version

    def _remember(self, phase: str, seconds: float | None) -> None:
        if seconds is not None and 0 <= seconds < math.inf:
            self.took.setdefault(phase, deque(maxlen=_LATEST)).append(seconds)

    def _time(self, step: Step) -> None:
        """Remember how long a step took: by itself, and since the one before.

        After a phase, by itself.
        """
        before, own = self.last, step.seconds
        follows = before is not None and before.step == step.step - 1 and self.phase is None
        between = step.t - before.t if before is not None and follows else own
        if own is None or between is None or not (0 <= own < math.inf and 0 <= between < math.inf):
            return
        if self._first_step is None:
            self._first_step = own, between
        else:
            self._step_to_step.append((own, between))

    def _take_step(self, step: Step) -> None:
        self._time(step)
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
        self.steps.append(step)
        self.phase = None

    def _take_phase(self, event: PhaseEvent) -> None:
        before = self.phase
        same_phase = before is not None and before.name == event.name and not before.finished
        since = before.since if before is not None and same_phase else 0.0
        if event.state == "end":
            self._remember(event.name, event.seconds)
        self.phase = Phase(
            name=event.name,
            done=event.done,
            total=event.total,
            finished=event.state == "end",
            t=event.t,
            seconds_left=event.seconds_left,
            ranks=tuple(event.ranks or ()),
            since=event.t if event.state == "begin" else since,
        )


def _mean(seconds: Sequence[float], extreme: float = _LONG_STEP) -> float:
    """Return the mean of some times.

    One that is `extreme` times as long as the median, of two the shorter one, counts as no longer.
    """
    most = extreme * sorted(seconds)[(len(seconds) - 1) // 2]
    return sum(min(each, most) for each in seconds) / len(seconds)


def read_end(path: Path) -> EventLog:
    """Read only the newest steps: at least as many as the pace needs, if there are that many.

    Reads backwards from the end of the file. Whether a step counts depends only on later events, so
    these are exactly the last steps of the complete stream.
    """
    try:
        size = os.stat(path).st_size
    except OSError:
        return EventLog(path)
    length = _FIRST_READ
    while True:
        offset = max(0, size - length)
        log = EventLog(path, passed_over=_NO_NEWS_OF_STEPS, _offset=offset).read_all()
        if offset == 0 or len(log.steps) >= _PACE_WINDOW:
            return log
        length *= _READ_GROWTH


def read_phases(path: Path, before: EventLog | None = None) -> EventLog:
    """Read how long phases took, of the last megabytes of an event stream.

    Args:
        path: The event stream.
        before: What an earlier call returned, which is read on.
    """
    if before is None:
        with suppress(OSError):
            offset = max(0, os.stat(path).st_size - _LONG_AGO)
            before = EventLog(path, passed_over=_NO_NEWS_OF_PHASES, _offset=offset)
    log = before or EventLog(path, passed_over=_NO_NEWS_OF_PHASES)
    return log.read_all()


# -- run report -----------------------------------------------------------------------------
# Facts that a run reported about itself: strategy, sharding, memory.


_E = TypeVar("_E", Start, Memory)


@dataclass(frozen=True)
class RunReport:
    """Facts of the latest attempt; empty until they have been reported.

    Attributes:
        strategy: The strategy in use, for example fsdp2.
        reason: Why it was chosen.
        global_batch: Samples per optimizer step.
        accumulation: Forward passes of a rank per optimizer step.
        sharding: The engine's sharding summary: numbers of parameters and bytes.
        measure: What `peaks` counts: `allocated` on GPUs, `rss` on CPU ranks.
        peaks: Phase → peak bytes of each rank.
        validations: Step and loss of the newest validations, oldest first.
        scores: Step and scores of the newest samples that were scored, oldest first.
        measured: All that its checkpoints are judged by.
        warnings: The run's warnings, only the newest if there are many.
    """

    strategy: str = ""
    reason: str = ""
    global_batch: int | None = None
    accumulation: int | None = None
    sharding: dict[str, Any] = field(default_factory=dict)
    measure: str = ""
    peaks: dict[str, list[int]] = field(default_factory=dict)
    validations: tuple[tuple[int, float], ...] = ()
    scores: tuple[tuple[int, dict[str, float]], ...] = ()
    measured: Measurements = UNMEASURED
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
            peaks=_complete_phases(memory.peaks),
            validations=tuple(log.validations[-_NEWEST:]),
            scores=tuple(log.scores[-_NEWEST:]),
            measured=log.measured(),
            warnings=tuple(log.warnings[-_MOST_WARNINGS:]),
        )


_FRAME = ("t", "kind")  # fields of every event
_NEWEST: Final = 5  # validation losses, and scores
_MOST_WARNINGS: Final = 500
_MOST_VALIDATIONS: Final = 5000  # some are dropped when a run resumes
_REPORTED: Final = {event.kind for event in (Start, Sharding, Memory, Validation, Scores, Warned)}


_V = TypeVar("_V")


def _put(series: list[tuple[int, _V]], step: int, value: _V) -> None:
    """Append a measurement; those of steps that are trained again are dropped."""
    while series and series[-1][0] >= step:
        series.pop()
    series.append((step, value))


class ReportLog(EventLog):
    """Keep only what a report needs, so that its size does not grow with the stream.

    It can be saved as text and resumed from there.
    """

    @classmethod
    def begin(cls, run_dir: RunDir, kept: str = "") -> ReportLog:
        """Resume from the result of `to_json`, or start over if there is none or it is unusable."""
        try:
            state = json.loads(kept)
            return cls(
                run_dir.events,
                notes={str(kind): dict(note) for kind, note in state["notes"].items()},
                validations=[(int(step), float(loss)) for step, loss in state["validations"]],
                scores=[(int(step), dict(scores)) for step, scores in state["scores"]],
                warnings=[str(text) for text in state["warnings"]],
                passed_over=STEP_LINE,
                _offset=int(state["offset"]),
                _inode=int(state["inode"]),
            )
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            return cls(run_dir.events, passed_over=STEP_LINE)

    def to_json(self) -> str:
        """Return the state as JSON."""
        return json.dumps(
            {
                "offset": self._offset,
                "inode": self._inode,
                "notes": self.notes,
                "validations": self.validations,
                "scores": self.scores,
                "warnings": self.warnings,
            }
        )

    @property
    def offset(self) -> int:
        """Return the number of bytes read."""
        return self._offset

    def _consume(self, event: dict[str, Any]) -> None:
        if str(event.get("kind")) not in _REPORTED:
            return
        super()._consume(event)
        del self.warnings[:-_MOST_WARNINGS], self.validations[:-_MOST_VALIDATIONS]
        del self.scores[:-_MOST_VALIDATIONS]


def read_report(run_dir: RunDir) -> RunReport:
    """Return the report of a run directory."""
    return RunReport.of(ReportLog.begin(run_dir).read_all())


def read_measured(run_dir: RunDir) -> Measurements:
    """Return what a run's checkpoints are judged by."""
    return ReportLog.begin(run_dir).read_all().measured()


def _read(kind: type[_E], log: EventLog) -> _E:
    """Read the newest event of a kind; an empty one if it cannot be parsed."""
    try:
        return kind.read(log.notes.get(kind.kind, {}))
    except (TypeError, ValueError, OverflowError):
        return kind()


def _complete_phases(peaks: dict[Any, Any]) -> dict[str, list[int]]:
    """Return the phases for which every rank's number is known."""
    return {
        str(name): numbers
        for name, numbers in peaks.items()
        if isinstance(numbers, list) and numbers and all(isinstance(n, int) for n in numbers)
    }
