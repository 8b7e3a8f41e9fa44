"""Describe a run's events other than steps in words, with their times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from jobs.run.eventlog import EventLog
from jobs.run.events import (
    Checkpoint,
    End,
    Event,
    Export,
    Failed,
    PhaseEvent,
    Sample,
    Scores,
    Start,
    Step,
    Validation,
    Warned,
)
from jobs.run.judging import TITLES
from jobs.run.rundir import PHASES
from jobs.units import size

_MOST: Final = 4000  # a run of weeks has more, but nobody reads all of them
_LEAST_SECONDS: Final = 1.0  # shorter phases are not shown
_LAST: Final = 1e11  # Unix seconds of the year 5138; calendars cannot represent much later times
_FIRST, _LAST_STAGE = "import", "train"
_MOST_STAGES: Final = 40
_UNLISTED_PHASES: Final = ("train",)  # phases that other moments describe


class Stage(NamedTuple):
    """A phase before the first step of the latest attempt.

    Attributes:
        name: A key of `jobs.run.rundir.PHASES`.
        since: When it began, in Unix seconds.
        seconds: Its duration; None while it is in progress.
    """

    name: str
    since: float
    seconds: float | None = None


class Moment(NamedTuple):
    """A described event.

    Attributes:
        t: Unix seconds.
        kind: The event's kind, for example `checkpoint`.
        words: The description.
    """

    t: float
    kind: str
    words: str


@dataclass
class Timeline(EventLog):
    """The events of a run, plus descriptions of the newest ones."""

    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_MOST))
    stages: list[Stage] = field(default_factory=list)

    def _consume(self, event: dict[str, Any]) -> None:
        super()._consume(event)
        kind = event.get("kind")
        if kind == Step.kind or not isinstance(kind, str):
            return
        if kind == PhaseEvent.kind:
            self._take_stage(event)
        try:
            t = float(event["t"])
            if 0 <= t < _LAST and (words := in_words(kind, event)):
                self.moments.append(Moment(t, kind, words))
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # written by another version

    def _take_stage(self, event: dict[str, Any]) -> None:
        try:
            phase, t = PhaseEvent.read(event), float(event["t"])
            name, state = phase.name, phase.state
            if name == _FIRST and state == "begin":
                self.stages.clear()  # another attempt
            if self.stages and self.stages[-1].name == _LAST_STAGE:
                return  # training has started
            if state == "begin":
                self.stages.append(Stage(name, t))
            elif state == "end":
                for at in range(len(self.stages) - 1, -1, -1):
                    if self.stages[at].name == name:
                        seconds = max(0.0, t - self.stages[at].since)
                        self.stages[at] = self.stages[at]._replace(seconds=seconds)
                        break
            del self.stages[:-_MOST_STAGES]
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # written by another version


def in_words(kind: str, event: dict[str, Any]) -> str:
    """Describe an event; return "" if it is not for users.

    Raises:
        KeyError, TypeError, ValueError: The event is malformed.
    """
    read = _READ.get(kind)
    match read.read(event) if read is not None else None:
        case Start(step=step, world_size=ranks):
            place = f"after step {step}" if step else "from step 0"
            return f"trains {place}" + (f" on {ranks} ranks" if ranks else "")
        case PhaseEvent() as phase:
            return _phase(phase)
        case Checkpoint() as saved:
            took = f", {saved.seconds:.1f} s" if saved.seconds is not None else ""
            much = f" ({size(saved.bytes)}{took})" if saved.bytes is not None else ""
            return f"saved step-{saved.step}{much}"
        case Sample(step=step, files=files):
            return f"sampled {len(files)} prompt{'s' * (len(files) != 1)} at step {step}"
        case Validation(step=step, loss=loss):
            return f"validation loss {loss:.5f} at step {step}"
        case Scores(step=step) as scored:
            each = (f"{TITLES[name]} {value:.4f}" for name, value in scored.values().items())
            return f"{', '.join(each)} at step {step}"
        case Warned(message=message):
            return message
        case Failed() as error:
            return (
                f"rank {error.rank}: {error.type} at step {error.step} during "
                f"{error.phase}: {error.message}"
            )
        case Export(path=path):
            return f"exported to {path}"
        case End(reason=reason):
            return f"the ranks ended: {reason}"
    return ""


_EVENTS: Final = (
    *(Start, PhaseEvent, Checkpoint, Sample, Validation, Scores, Warned, Failed, Export, End),
)
_READ: Final[dict[str, type[Event]]] = {event.kind: event for event in _EVENTS}


def _phase(event: PhaseEvent) -> str:
    """Describe a finished phase that took long enough to mention."""
    if event.state != "end" or event.name in _UNLISTED_PHASES:
        return ""
    seconds = event.seconds or 0.0
    if seconds < _LEAST_SECONDS:
        return ""
    count = f" ({event.total})" if event.total else ""
    return f"{PHASES.get(event.name, event.name)} took {_format_seconds(seconds)}{count}"


def _format_seconds(seconds: float) -> str:
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
