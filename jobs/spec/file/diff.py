"""Compare the settings of two jobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.spec.job_spec import field_group, field_names

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec

Kind = Literal["added", "removed", "changed"]

_NAME: Final = "name"  # irrelevant for what the jobs do
_NOTHING: Final[tuple[Any, ...]] = (None, [], {}, "")


@dataclass(frozen=True)
class Difference:
    """A key whose values differ.

    Attributes:
        key: The key in the job file.
        group: The heading under which the key is documented.
        before: Its value in the first job.
        after: Its value in the second job.
        kind: Whether only the second job has a value, only the first, or both.
    """

    key: str
    group: str
    before: Any
    after: Any
    kind: Kind

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values, for scripts."""
        return asdict(self)


def differences(first: JobSpec, second: JobSpec) -> list[Difference]:
    """Return the keys whose values differ, in the order of a job file; names do not count."""
    ours, theirs = first.to_dict(), second.to_dict()
    return [
        Difference(key, field_group(key), ours[key], theirs[key], _kind(ours[key], theirs[key]))
        for key in field_names()
        if key != _NAME and ours[key] != theirs[key]
    ]


def _kind(before: Any, after: Any) -> Kind:
    if before in _NOTHING:
        return "added"
    return "removed" if after in _NOTHING else "changed"
