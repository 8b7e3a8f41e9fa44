"""Write and read a machine's reports, one JSON object per line. Pure.

A stream starts with a head. Reports follow: a line for each job and GPU, complete the first time
and later only with changed values, then a line with the time of the report. Each side ignores
unknown keys, so that different versions are compatible; a machine with another `FORMAT` is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jobs.errors import UserError
from jobs.untrusted.text import harmless, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FORMAT: Final = 1
LONGEST: Final = 1 << 16  # bytes of a line
MOST_JOBS: Final = 20_000
MOST_GPUS: Final = 256
MOST_KEPT: Final = 8 << 20  # characters and GPU numbers in all rows of a machine
REMOVED: Final = {"state": "removed"}
_MOST_NOISE: Final = 100  # lines that a shell's startup files may print before the head
_LONGEST_TEXT: Final = 300  # characters
_LARGEST: Final = 2**53  # the largest integer that JSON parsers of any language represent exactly
_LONGEST_TIME: Final = 1e9  # seconds that fit on a screen: 30 years


def _text(value: Any) -> Any:
    return harmless(one_line(value[:_LONGEST_TEXT])) if isinstance(value, str) else value


def _time(value: Any) -> Any:
    """Drop an implausible time instead of the job: a job can really be that slow."""
    far = isinstance(value, int | float) and not 0 <= value <= _LONGEST_TIME
    return None if far else value


Text = Annotated[str, BeforeValidator(_text)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Percent = Annotated[int, Field(ge=0, le=100)]
Seconds = Annotated[float | None, BeforeValidator(_time)]
Real = Annotated[float, Field(allow_inf_nan=False)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Head(_Message):
    """The first line: the machine, and the seconds between its reports."""

    fleet: int
    version: Text = "?"
    host: Text = "?"
    cores: Count = 0
    interval: float = Field(10.0, gt=0, le=86400)


class BoxGpu(_Message):
    """A GPU of a machine: bytes and percent. `others`: used by processes that are not our jobs."""

    gpu: Count
    name: Text = ""
    memory_total: Count = 0
    memory_used: Count | None = None
    utilisation: Percent | None = None
    job: Count | None = None
    others: bool = False
    problem: Text | None = None


class BoxJob(_Message):
    """A job of a machine, as in `list --json`."""

    id: Count
    name: Text
    state: Text
    reason: Text = ""
    step: Count = 0
    total_steps: Count = 0
    loss: Real | None = None
    seconds_per_step: Seconds = None
    eta: Seconds = None
    eta_at_least: bool = False
    starts_in: Seconds = None
    ranks: Count = 0
    gpus: tuple[Count, ...] = Field((), max_length=MOST_GPUS)


class _Look(_Message):
    """The last line of a report, by the machine's clock."""

    t: Real
    paused: bool = False
    problem: Text = ""


# -- writing -----------------------------------------------------------------------------------


class ReportWriter:
    """Generate the lines of a stream."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, Any], Mapping[str, Any]] = {}

    def head(self, version: str, host: str, cores: int, interval: float) -> str:
        """Return the first line."""
        head = Head(fleet=FORMAT, version=version, host=host, cores=cores, interval=interval)
        return _line(head.model_dump())

    def look(
        self,
        t: float,
        jobs: Sequence[Mapping[str, Any]],
        gpus: Sequence[Mapping[str, Any]],
        paused: bool,
    ) -> Iterator[str]:
        """Yield lines with the changes since the last call, then the final line of the report."""
        now: dict[tuple[str, Any], Mapping[str, Any]]
        now = {("id", row["id"]): _shown_values(row) for row in jobs}
        now |= {("gpu", row["gpu"]): row for row in gpus}
        for (kind, name), row in now.items():
            before = self._sent.get((kind, name), {})
            if before != row:
                changed = {
                    key: row[key] for key in row if key not in before or before[key] != row[key]
                }
                yield _line({kind: name} | changed)
        for kind, name in [key for key in self._sent if key not in now]:
            yield _line({kind: name} | REMOVED)
        self._sent = now
        yield _line({"t": round(t)} | ({"paused": True} if paused else {}))

    def trouble(self, t: float, problem: str) -> str:
        """Return the line that reports a problem."""
        return _line({"t": round(t), "problem": problem})


def _shown_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's displayed values, rounded to the displayed digits.

    More digits would have to be sent again with each report.
    """
    shown = {key: row[key] for key in BoxJob.model_fields if key in row}
    shown["total_steps"] = shown.get("total_steps") or 0  # None until the steps have been counted
    for key in ("loss", "seconds_per_step"):
        if shown.get(key) is not None:
            shown[key] = float(f"{shown[key]:.4g}")
    for key in ("eta", "starts_in"):
        if shown.get(key) is not None:
            shown[key] = round(shown[key])
    return shown


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


# -- reading -----------------------------------------------------------------------------------


class UnreadableError(UserError):
    """A machine sent something that violates the format; the rest of its stream is unusable."""


@dataclass(frozen=True)
class Snapshot:
    """A machine's state at the end of a report. `newer`: parts of it are not understood here."""

    head: Head
    gpus: tuple[BoxGpu, ...]
    jobs: tuple[BoxJob, ...]
    paused: bool = False
    problem: str = ""
    newer: bool = False


class ReportReader:
    """Parse the lines of one stream."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self._rows: dict[str, dict[int, dict[str, Any]]] = {"id": {}, "gpu": {}}
        self._read: dict[tuple[str, int], BoxJob | BoxGpu] = {}
        self._changed: dict[tuple[str, int], None] = {}  # in the order of the lines
        self._newer = False
        self._noise = 0
        self._kept = 0  # towards MOST_KEPT

    def take(self, line: bytes) -> Snapshot | None:
        """Parse a line; return a snapshot of the machine if the line ends a report.

        Raises:
            UnreadableError: It does not come from fsdp-tui, or has an unknown format.
        """
        if self.head is None and not line.startswith(b"{") and self._noise < _MOST_NOISE:
            self._noise += 1
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UnreadableError(f'it says "{_text(line[:60].decode(errors="replace"))}"')
        if self.head is None:
            self.head = _head(row)
        elif "t" in row:
            return self._end(row)
        else:
            self._note(row)
        return None

    def _note(self, row: dict[str, Any]) -> None:
        kind = next((kind for kind in self._rows if kind in row), "")
        name = row.get(kind)
        if not isinstance(name, int) or isinstance(name, bool) or not 0 <= name <= _LARGEST:
            self._newer = True
            return
        rows = self._rows[kind]
        if row.get("state") == "removed":
            self._kept -= _size(rows.pop(name, {}))
            self._read.pop((kind, name), None)
            self._changed.pop((kind, name), None)
            return
        fields = BoxJob.model_fields if kind == "id" else BoxGpu.model_fields
        kept = rows.setdefault(name, {})
        self._kept -= _size(kept)
        kept.update((key, _truncated(row[key])) for key in row if key in fields)
        self._kept += _size(kept)
        self._changed[kind, name] = None
        if self._kept > MOST_KEPT:
            raise UnreadableError(f"its rows have more than {MOST_KEPT >> 20} MiB")
        if len(rows) > (MOST_JOBS if kind == "id" else MOST_GPUS):
            raise UnreadableError(
                f"it lists more than {len(rows) - 1} {'jobs' if kind == 'id' else 'GPUs'}"
            )

    def _end(self, row: dict[str, Any]) -> Snapshot:
        assert self.head is not None
        for kind, name in self._changed:
            shape = BoxJob if kind == "id" else BoxGpu
            try:
                self._read[kind, name] = shape.model_validate(self._rows[kind][name])
            except ValidationError:
                self._newer = True
                self._read.pop((kind, name), None)
        self._changed.clear()
        try:
            look = _Look.model_validate(row)
        except ValidationError as error:
            raise UnreadableError("its looks end in another way") from error
        gpus = sorted(
            (g for g in self._read.values() if isinstance(g, BoxGpu)), key=lambda g: g.gpu
        )
        jobs = sorted((j for j in self._read.values() if isinstance(j, BoxJob)), key=lambda j: j.id)
        return Snapshot(
            self.head, tuple(gpus), tuple(jobs), look.paused, look.problem, newer=self._newer
        )


def _truncated(value: Any) -> Any:
    """Truncate a value to what fields allow; {} for values that no field allows."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, list):
        numbers = all(isinstance(number, int) and 0 <= number <= _LARGEST for number in value)
        return value if numbers and len(value) <= MOST_GPUS else {}
    large = isinstance(value, int) and abs(value) > _LARGEST
    return {} if large or isinstance(value, dict) else value


def _size(row: Mapping[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str | list))


def _head(row: dict[str, Any]) -> Head:
    try:
        head = Head.model_validate(row)
    except ValidationError as error:
        raise UnreadableError("it does not begin as a fleet's box does") from error
    if head.fleet != FORMAT:
        older = "there" if head.fleet < FORMAT else "here"
        raise UnreadableError(
            f"its fsdp-tui is {head.version}, which speaks another format ({head.fleet}, not "
            f"{FORMAT})",
            f"update fsdp-tui {older}",
        )
    return head
