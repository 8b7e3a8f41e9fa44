"""What became of every key of another tool's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from jobs.untrusted.secrets import HIDDEN, SECRET_NAME, SECRET_VALUE

_LONGEST: Final = 60  # characters of a value that are shown


class Kind(StrEnum):
    """What happened to a key: exactly one of these. The values are keys of the JSON report."""

    TAKEN = "taken_over"
    TRANSLATED = "translated"
    UNSUPPORTED = "not_supported"
    UNNEEDED = "not_needed"
    UNKNOWN = "not_known"
    UNREADABLE = "could_not_be_read"

    @property
    def heading(self) -> str:
        """The heading in the report for users."""
        return _TITLES.get(self, self.replace("_", " "))


_TITLES: Final = {
    Kind.TAKEN: "converted",
    Kind.UNKNOWN: "unknown",
    Kind.UNREADABLE: "unreadable",
}


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        kind: What became of it.
        key: As it is called there, with dots between levels; a key with others below it stands for
            all of them.
        value: As it may be shown.
        ours: The keys of the job that it set, with their values.
        why: The reason, and what to do about it.
    """

    kind: Kind
    key: str
    value: str
    ours: dict[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass
class Report:
    """What became of a configuration.

    Attributes:
        entries: One for each of its keys, in their order.
        assumed: Keys that it leaves out, and whose defaults there are others than here.
        to_fill_in: Why the job cannot run as it is, a sentence each.
        unknown_family: Whether it names a model that is not supported here.
        warnings: What runs, but perhaps not as meant, a sentence each.
    """

    entries: list[Entry] = field(default_factory=list)
    assumed: list[Entry] = field(default_factory=list)
    to_fill_in: list[str] = field(default_factory=list)
    unknown_family: bool = False
    warnings: list[str] = field(default_factory=list)

    def of(self, kind: Kind) -> list[Entry]:
        """Return the entries of this kind."""
        return [entry for entry in self.entries if entry.kind is kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **{str(kind): [_facts(e) for e in self.of(kind)] for kind in Kind},
            "assumed": [_facts(entry) for entry in self.assumed],
            "to_fill_in": list(self.to_fill_in),
            "warnings": list(self.warnings),
        }


def shown(key: str, value: Any) -> str:
    """Return a value as it may be printed: short, and nothing that could be a password or token."""
    if is_secret(key, value):
        return HIDDEN
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, (list, tuple)):
        text = ", ".join(shown(key, item) for item in value)
        return f"[{_cut(text)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _cut(" ".join(str(value).split())) if value not in (None, "") else '""'


def is_secret(key: str, value: Any) -> bool:
    """Whether a key or value may not leave its file. Mappings are checked key by key."""
    if isinstance(value, (list, tuple)):
        return any(is_secret(key, item) for item in value)
    if not isinstance(value, str) or not value:
        return False
    named = SECRET_NAME.search(key.rpartition(".")[2]) is not None
    return named or SECRET_VALUE.search(value) is not None


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _facts(entry: Entry) -> dict[str, Any]:
    return {"key": entry.key, "value": entry.value, "ours": entry.ours, "why": entry.why}
