"""What a check found: well, doubtful or wrong, in one sentence, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

# What may stand in a path or a variable and is nobody's business.
_SECRETS: Final = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # user and password in an address
    r"|\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{6,}"
)
_LONGEST: Final = 400


class Verdict(StrEnum):
    """How bad it is. Only `fail` makes the exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What it was, in a word or two.
        verdict: ok, warn or fail.
        found: One sentence.
        advice: One sentence of what to do; None when all is well.
        lines: A table that goes with it, a line each.
        facts: The same as JSON values, for scripts.
        group: Under which heading it is shown.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None
    lines: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    group: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"verdict": str(self.verdict), "lines": list(self.lines)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        """Read what `to_dict` made.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        return cls(
            **values | {"verdict": Verdict(values["verdict"]), "lines": tuple(values["lines"])}
        )

    def plain(self, group: str) -> Finding:
        """The same under a heading, with nothing in it that steers a terminal or is secret."""
        return replace(
            self,
            group=group,
            found=plain(self.found),
            advice=None if self.advice is None else plain(self.advice),
            lines=tuple(_printable(line) for line in self.lines),
            facts={name: _masked(value) for name, value in self.facts.items()},
        )


def ok(name: str, sentence: str, **facts: Any) -> Finding:
    return Finding(name, Verdict.OK, sentence, facts=facts)


def warn(name: str, sentence: str, advice: str, **facts: Any) -> Finding:
    return Finding(name, Verdict.WARN, sentence, advice, facts=facts)


def fail(name: str, sentence: str, advice: str, **facts: Any) -> Finding:
    return Finding(name, Verdict.FAIL, sentence, advice, facts=facts)


def plain(text: str) -> str:
    """Foreign text (an error, a path, a variable) as it may be printed: one line, no secrets."""
    line = " ".join(_printable(_masked(text)).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _masked(value: Any) -> Any:
    """Return a JSON value without secrets."""
    if isinstance(value, str):
        return _SECRETS.sub("***", value)
    if isinstance(value, dict):
        return {name: _masked(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item) for item in value]
    return value


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
