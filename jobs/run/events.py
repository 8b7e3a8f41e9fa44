"""Define the events that rank 0 writes to `events.jsonl`, and parse them.

A line is a JSON object: `t` (Unix seconds), `kind`, and the fields of its kind below, in that
order. Readers tolerate output of other versions: unknown kinds, and missing or malformed fields.
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
    """One event. `t`: Unix seconds, set when the event is written."""

    kind: ClassVar[str]
    strict: ClassVar[frozenset[str]] = frozenset()  # fields without which the line is invalid

    t: float = field(default=0.0, kw_only=True)

    def facts(self) -> dict[str, Any]:
        """Return the line's values, without its time and kind."""
        return {name: getattr(self, name) for name, _, _ in self._fields()}

    def line(self) -> str:
        """Return the line, with its newline."""
        return event(self.kind, **self.facts())

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Parse a line. A malformed field that has a default counts as missing.

        Raises:
            KeyError: A field without a default is missing.
            TypeError: Such a field, or the time, has an invalid value.
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
        """Return each field's name, its converter, and whether it is required."""
        own = [part for part in dataclasses.fields(cls) if part.name != "t"]
        none = dataclasses.MISSING
        return tuple(
            (part.name, _READ[str(part.type)], part.default is none is part.default_factory)
            for part in own
        )


@dataclass(frozen=True)
class Start(Event):
    """Training begins after step `step`.

    `accumulation` is the number of forward passes of a rank per `global_batch` samples.
    `base_matmul` is set for an fp8 base. `best_by` is what its checkpoints are judged by.
    """

    kind = "start"
    strict = frozenset({"step"})  # later steps are trained again, so this must be right

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
    best_by: str = "validation_loss"


@dataclass(frozen=True)
class PhaseEvent(Event):
    """A phase begins, makes progress or ends.

    Attributes:
        name: A key of `jobs.run.rundir.PHASES`.
        state: `begin`, `progress` or `end`.
        done: Completed units.
        total: All units; None if unknown.
        seconds_left: Estimated remaining seconds, while in progress.
        seconds: The duration, at the end.
        ranks: Completed units per rank, for work shared between ranks.
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
        return float(value)  # a phase without a time is useless, because its duration is unknown

    def facts(self) -> dict[str, Any]:
        """Return the values that belong to this state."""
        absent = {"seconds_left", "seconds"} - {_OF_STATE.get(self.state)}
        if self.ranks is None:
            absent.add("ranks")
        return {name: value for name, value in super().facts().items() if name not in absent}


_OF_STATE: Final = {"progress": "seconds_left", "end": "seconds"}


@dataclass(frozen=True)
class Data(Event):
    """The training data. A bucket is its width, height and number of samples."""

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
    """Modules were freed. Bytes before, with and after them, counted as `measure` says."""

    kind = "freed"

    what: str
    measure: str
    before: int
    loaded: int
    after: int
    held: int


@dataclass(frozen=True)
class Sharding(Event):
    """What sharding did on this rank. Parameters are counted in elements, sizes in bytes.

    Attributes:
        ranks: Number of ranks over which each tensor is split.
        replicas: Number of such groups of ranks (1 except with HSDP).
        units: Class name → number of FSDP units.
        tensors: Number of sharded tensors.
        parameters: Their elements in the complete model.
        local_parameters: Their elements on this rank.
        wrapped_parameters: Elements in units below the root.
        local_bytes: Bytes of this rank's shards.
        largest_unit_bytes: Bytes of the largest unit when gathered.
        root_bytes: Bytes of the root unit, without the units below it, when gathered.
        replicated_parameters: Elements of trained parameters that are replicated on every rank.
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
    """One optimizer step. `seconds` is wall time, `peak_bytes` the largest over ranks.

    `base_loss` is the part of `loss` that holds a LoRA to the base's own prediction.
    """

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
    base_loss: float | None = None


@dataclass(frozen=True)
class Sample(Event):
    """Images or videos were sampled after a step: their directory and file names."""

    kind = "sample"
    strict = frozenset({"files"})  # the line reports their number

    step: int
    directory: str = ""
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Validation(Event):
    """The loss on the validation set, over all noise levels and for each of them."""

    kind = "validation"

    step: int
    loss: float
    levels: list[Any] = field(default_factory=list)
    samples: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Scores(Event):
    """Mean cosine similarities of the samples of a step, each in [-1, 1]; None: not asked for.

    Attributes:
        clip_t: Of each sample and its prompt.
        clip_i: Of each sample and each held-out image, in CLIP's space.
        dino_i: The same in DINO's space.
        samples: How many samples.
        references: How many held-out images.
        seconds: Wall time.
    """

    kind = "scores"

    step: int
    clip_t: float | None = None
    clip_i: float | None = None
    dino_i: float | None = None
    samples: int | None = None
    references: int | None = None
    seconds: float | None = None

    def values(self) -> dict[str, float]:
        """Return the scores that were asked for, by name."""
        named = {"clip_t": self.clip_t, "clip_i": self.clip_i, "dino_i": self.dino_i}
        return {name: value for name, value in named.items() if value is not None}


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
    """Peak bytes of each phase, one number per rank; `measure` says what was counted."""

    kind = "memory"

    step: int = 0
    measure: str = ""
    peaks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned(Event):
    """A warning for the user."""

    kind = "warning"

    message: str = ""


@dataclass(frozen=True)
class Failed(Event):
    """A rank failed: the exception, in which phase, after which step; `traceback` says where."""

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
    """The ranks have ended: they completed all steps or were asked to stop."""

    kind = "end"

    reason: str = ""
    step: int | None = None


def _number(value: Any) -> float | None:
    """Return a finite or infinite number; None for anything else.

    Raises:
        OverflowError: An integer does not fit into a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    float(value)
    return value


def _optional_int(value: Any) -> int | None:
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
    "int | None": _optional_int,
    "float | None": _number,
    "str | None": _text,
    "list[int] | None": _counts,
    "list[str]": list,
    "list[Any]": list,
    "dict[str, int]": _mapping,
    "dict[str, Any]": _mapping,
}
"""How a field is read, by its type."""
