"""Read a run's event stream as it grows: what was trained, which phase, why it ended."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from jobs.run.events import (
    Checkpoint,
    End,
    PhaseEvent,
    Sample,
    Start,
    Step,
    Validation,
    Warned,
)
from jobs.untrusted.text import harmless_value

if TYPE_CHECKING:
    from pathlib import Path

_PACE_WINDOW: Final = 20  # steps
_FIRST_END: Final = 16 << 10  # bytes
_LARGER: Final = 8  # times, each end than the one before
# As `jobs.run.rundir.event` begins a line; of others every line is decoded.
STEP_LINE: Final = re.compile(rb'\{"t": [0-9.e+]+, "kind": "step"')
_NEITHER_STEP_NOR_START: Final = re.compile(rb'\{"t": [0-9.e+]+, "kind": "(?!step"|start")')


@dataclass(frozen=True)
class Phase:
    """What the ranks are doing outside of steps.

    Attributes:
        name: A key of `jobs.run.rundir.PHASES`.
        done: How much of it.
        total: Of how much; None when it cannot be known.
        finished: Whether it is over.
        t: When this was said.
        seconds_left: How long it may still take.
        ranks: What each rank has done, of work that they share.
        since: When it began; 0 where that is not known.
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

    After a resume from an earlier checkpoint the steps since then are repeated; the later
    attempt replaces them, and what was measured after them (`validations`: step and loss).

    Lines that `passed_over` matches are read, but not decoded.
    """

    path: Path
    steps: list[Step] = field(default_factory=list)
    phase: Phase | None = None
    end_reason: str | None = None
    checkpoints: list[int] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed_over: re.Pattern[bytes] | None = None
    behind: bool = False  # whether the last poll found more than it read
    _offset: int = 0
    _inode: int = 0

    def poll(self, limit: int = 8 << 20) -> bool:
        """Read up to `limit` new bytes; whether anything changed."""
        try:
            with open(self.path, "rb") as file:
                self._notice_replacement(file.fileno())
                file.seek(self._offset)
                data = file.read(limit)
        except OSError:
            return False
        end = data.rfind(b"\n") + 1  # a torn last line waits for its rest
        if end == 0 and len(data) >= limit:  # one endless line: nothing of ours, pass over it
            end = len(data)
        self._offset += end
        self.behind = len(data) >= limit
        skips = self.passed_over
        for line in data[:end].splitlines():
            # The last kind of a line counts, and a damaged one may have several.
            if skips is not None and skips.match(line) and line.count(b'"kind"') == 1:
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                # What could steer a terminal is escaped in JSON, or beyond ASCII.
                plain = b"\\" not in line and line.isascii()
                self._take(event if plain else harmless_value(event))
        return end > 0

    def read_all(self) -> Self:
        """Poll until there is nothing new."""
        while self.poll():
            pass
        return self

    @property
    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    def seconds_per_step(self, window: int = _PACE_WINDOW) -> float | None:
        """Median wall time of the latest steps."""
        recent = sorted(s.seconds for s in self.steps[-window:] if s.seconds is not None)
        return recent[len(recent) // 2] if recent else None

    def _notice_replacement(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        if (self._inode and stat.st_ino != self._inode) or stat.st_size < self._offset:
            # Another file now: start over.
            self.__init__(self.path, passed_over=self.passed_over)  # type: ignore[misc]
        self._inode = stat.st_ino

    def _take(self, event: dict[str, Any]) -> None:
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
                    self.validations = [v for v in self.validations if v[0] <= resumed]
                case End.kind:
                    self.end_reason = End.read(event).reason
                    self.phase = None
                case Checkpoint.kind:
                    self.checkpoints.append(Checkpoint.read(event).step)
                case Sample.kind:
                    self.samples.append(event)
                case Validation.kind:
                    self._take_validation(Validation.read(event))
                case Warned.kind:
                    self.warnings.append(Warned.read(event).message)
                case str() as kind:
                    self.notes[kind] = event
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # a line that some other version wrote

    def _take_step(self, step: Step) -> None:
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
        self.steps.append(step)
        self.phase = None

    def _take_validation(self, measured: Validation) -> None:
        while self.validations and self.validations[-1][0] >= measured.step:
            self.validations.pop()
        self.validations.append((measured.step, measured.loss))

    def _take_phase(self, event: PhaseEvent) -> None:
        before = self.phase
        same_phase = before is not None and before.name == event.name and not before.finished
        since = before.since if before is not None and same_phase else 0.0
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


def read_end(path: Path) -> EventLog:
    """Read only the newest steps: at least as many as the pace needs, if there are that many.

    Read from the end of the file, as far back as it takes. Whether a step counts is decided by
    what comes after it, so these are exactly the last ones of the whole stream.
    """
    try:
        size = os.stat(path).st_size
    except OSError:
        return EventLog(path)
    length = _FIRST_END
    while True:
        offset = max(0, size - length)
        log = EventLog(path, passed_over=_NEITHER_STEP_NOR_START, _offset=offset).read_all()
        if offset == 0 or len(log.steps) >= _PACE_WINDOW:
            return log
        length *= _LARGER
