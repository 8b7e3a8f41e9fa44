"""The exceptions whose messages are for users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST: Final = 3000  # maximum characters of a message
_END: Final = 500  # characters kept at its end, which often says what is expected


class UserError(Exception):
    """A problem that the user can fix; shown as one line, never as a traceback.

    Args:
        message: What is wrong and where. The middle of a very long message is cut out.
        hint: What to do about it, if that is not obvious from the message.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - _END]} … {message[-_END:]}"
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


@dataclass(frozen=True)
class Problem:
    """A problem of a job.

    Attributes:
        key: The key in question; "" if there is none.
        text: One sentence.
        line: Line number of the key in the file.
        named: Whether the sentence needs the key's name in front of it unless the context shows it.
    """

    key: str
    text: str
    line: int | None = None
    named: bool = False

    def __str__(self) -> str:
        sentence = f"{self.key}: {self.text}" if self.named else self.text
        return sentence if self.line is None else f"line {self.line}: {sentence}"


class SpecError(UserError):
    """A job description that cannot run as written.

    Args:
        message: What is wrong and where.
        hint: What to do about it.
        problems: The individual problems, if their keys are known.
    """

    def __init__(
        self, message: str, hint: str | None = None, problems: Iterable[Problem] = ()
    ) -> None:
        super().__init__(message, hint)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, where: str, problems: Iterable[Problem]) -> SpecError:
        """Join all problems on one line, prefixed by where they are."""
        problems = tuple(problems)
        sentences = "; ".join(one_line(str(problem)) for problem in problems)
        return cls(f"{where}: {sentences}", problems=problems)


class DiskFullError(UserError):
    """A disk is full."""


class NotFiniteError(UserError):
    """Numbers are not finite: a loss or gradient, an encoder's output, or exported weights."""


class NotFoundError(UserError):
    """A job, or a part of a job, does not exist."""


class StateError(UserError):
    """The request is impossible in the job's current state."""
