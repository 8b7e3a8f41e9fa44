"""The events of a run: what rank 0 writes into `events.jsonl`, and what readers take from it.

A line is a JSON object: `t` (Unix seconds), `kind`, and the fields of its kind below, in their
order. Readers survive what other versions wrote: kinds they do not know, and fields that are
missing or odd.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from jobs.run.rundir import event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Event:
    """Something that happened. `t` is when, in Unix seconds; of what is written, the time then."""

    kind: ClassVar[str]
    strict: ClassVar[frozenset[str]] = frozenset()  # fields that are good, or the line is not

    t: float = field(default=0.0, kw_only=True)

    def facts(self) -> dict[str, Any]:
        """Return the line's values, without its time and kind."""
        return {name: getattr(self, name) for name, _, _ in self._fields()}

    def line(self) -> str:
        """Return the line, with its newline."""
        return event(self.kind, **self.facts())

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Read a line; an odd field that has a default is as if it were not there.

        Raises:
            KeyError: A field without a default is missing.
            TypeError: Such a field, or the time, cannot be used.
            ValueError: See above.
            OverflowError: See above.
        """
        values = {"t": cls._time(facts.get("t"))}
        for name, convert, needed in cls._fields():
            if needed or (name in cls.strict and name in facts):
                values[name] = convert(facts[name])
            elif name in facts:
                with suppress(TypeError, ValueError, OverflowError):
                    values[name] = convert(facts[name])
        return cls(**values)

    @classmethod
    def _time(cls, value: Any) -> float:
        return float(_number(value) or 0.0)

    @classmethod
    @cache
    def _fields(cls) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
        """Each field, how it is read, and whether it is needed."""
        own = [part for part in dataclasses.fields(cls) if part.name != "t"]
        none = dataclasses.MISSING
        return tuple(
            (part.name, _READ[str(part.type)], part.default is none is part.default_factory)
            for part in own
        )


@dataclass(frozen=True)
class Start(Event):
    """Training begins, after step `step`.

    `accumulation` counts the forwards of a rank that make `global_batch` samples. `base_matmul` is
    that of a base in fp8.
    """

    kind = "start"
    strict = frozenset({"step"})  # what was trained after it is trained again

    step: int = 0
    total_steps: int | None = None
    world_size: int | None = None
    strategy: str = ""
    strategy_reason: str = ""
    samples: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    steps_per_epoch: float | None = None
    trained_parameters: int | None = None
    base_matmul: str | None = None


@dataclass(frozen=True)
class PhaseEvent(Event):
    """A phase begins, makes progress or ends.

    Attributes:
        name: A key of `jobs.run.rundir.PHASES`.
        state: Which of the three.
        done: How much of it.
        total: Of how much; None when it cannot be known.
        seconds_left: How long it may still take, while it is in progress.
        seconds: How long it took, at its end.
        ranks: What each rank has done, of work that they share.
    """

    kind = "phase"

    name: str
    state: str = ""
    done: int = 0
    total: int | None = None
    seconds_left: float | None = None
    seconds: float | None = None
    ranks: list[int] | None = None

    @classmethod
    def _time(cls, value: Any) -> float:
        return float(value)  # without it, nothing can be said of how long the phase takes

    def facts(self) -> dict[str, Any]:
        """Return the values that belong to this state."""
        absent = {"seconds_left", "seconds"} - {_OF_STATE.get(self.state)}
        if self.ranks is None:
            absent.add("ranks")
        return {name: value for name, value in super().facts().items() if name not in absent}


_OF_STATE: Final = {"progress": "seconds_left", "end": "seconds"}


@dataclass(frozen=True)
class Data(Event):
    """What there is to train on. A bucket is its width, height and number of samples."""

    kind = "data"

    samples: int
    held_out: int
    skipped: int
    texts: int
    buckets: list[Any]
    steps_per_epoch: float
    epochs: float
    total_steps: int | None = None


@dataclass(frozen=True)
class Freed(Event):
    """Modules are gone: what is counted, and the memory before, with and after them in bytes."""

    kind = "freed"

    what: str
    measure: str
    before: int
    loaded: int
    after: int
    held: int


@dataclass(frozen=True)
class Sharding(Event):
    """What sharding did on this rank. Counts of parameters (elements), sizes in bytes.

    Attributes:
        ranks: Over how many ranks each tensor is split.
        replicas: How many such groups of ranks there are (1 but for HSDP).
        units: Class name → number of FSDP units.
        tensors: Sharded tensors.
        parameters: Elements of them in the whole model.
        local_parameters: Elements of them on this rank.
        wrapped_parameters: Elements in units below the root.
        local_bytes: This rank's shards.
        largest_unit_bytes: The largest unit when it is gathered.
        root_bytes: What no unit below the root holds, when it is gathered.
        replicated_parameters: Elements of what is trained and whole on every rank.
    """

    kind = "sharding"

    ranks: int
    replicas: int
    units: dict[str, int]
    tensors: int
    parameters: int
    local_parameters: int
    wrapped_parameters: int
    local_bytes: int
    largest_unit_bytes: int
    root_bytes: int
    replicated_parameters: int


@dataclass(frozen=True)
class Step(Event):
    """One optimizer step. `seconds` is wall time, `peak_bytes` the largest over ranks."""

    kind = "step"

    step: int
    epoch: float | None = field(default=None, kw_only=True)
    loss: float
    lr: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    data_seconds: float | None = None
    images_per_second: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Sample(Event):
    """Images or videos were made after a step: where they are, and what their files are named."""

    kind = "sample"
    strict = frozenset({"files"})  # how many there are is what the line says

    step: int
    directory: str = ""
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Validation(Event):
    """The loss on what is held out, over all noise levels and for each."""

    kind = "validation"

    step: int
    loss: float
    levels: list[Any] = field(default_factory=list)
    samples: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint is complete."""

    kind = "checkpoint"

    step: int
    path: str = ""
    bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Export(Event):
    """The export is complete."""

    kind = "export"

    path: str


@dataclass(frozen=True)
class Memory(Event):
    """The most bytes of each phase, a number per rank; `measure` says what was counted."""

    kind = "memory"

    step: int = 0
    measure: str = ""
    peaks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned(Event):
    """Something that a person should know."""

    kind = "warning"

    message: str = ""


@dataclass(frozen=True)
class Failed(Event):
    """A rank has failed: with what, in which phase, after which step; `traceback` is where."""

    kind = "error"

    rank: int
    type: str
    cause: str = ""
    message: str = ""
    phase: str | None = None
    step: int | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class End(Event):
    """The ranks are done: they trained all steps, or were asked to stop."""

    kind = "end"

    reason: str = ""
    step: int | None = None


def _number(value: Any) -> float | None:
    """Return a finite or infinite number, or None for anything else.

    Raises:
        OverflowError: An integer that no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    float(value)
    return value


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _counts(value: Any) -> list[int]:
    return [int(count) for count in value or ()]


_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "int": int,
    "float": float,
    "str": str,
    "int | None": _whole,
    "float | None": _number,
    "str | None": _text,
    "list[int] | None": _counts,
    "list[str]": list,
    "list[Any]": list,
    "dict[str, int]": _mapping,
    "dict[str, Any]": _mapping,
}
"""How a field is read, by its type."""
