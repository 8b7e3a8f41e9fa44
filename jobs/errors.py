"""The exceptions a person is meant to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST: Final = 3000  # characters of a message
_END: Final = 500  # of it, which often says what is expected


class UserError(Exception):
    """Something the person can put right; shown as one line, never as a traceback.

    Args:
        message: What is wrong and where. A very long one, such as foreign text, loses its middle.
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
    """Something that is wrong with a job.

    Attributes:
        key: What to look at; "" where that is no key of a job.
        text: One sentence.
        line: Where the key is in the file.
        named: Whether the sentence is said of the key, and needs its name in front where nothing
            else says which it is.
    """

    key: str
    text: str
    line: int | None = None
    named: bool = False

    def __str__(self) -> str:
        sentence = f"{self.key}: {self.text}" if self.named else self.text
        return sentence if self.line is None else f"line {self.line}: {sentence}"


class SpecError(UserError):
    """A job description that cannot be run as written.

    Args:
        message: What is wrong and where.
        hint: What to do about it.
        problems: The same one by one, where the keys are known.
    """

    def __init__(
        self, message: str, hint: str | None = None, problems: Iterable[Problem] = ()
    ) -> None:
        super().__init__(message, hint)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, where: str, problems: Iterable[Problem]) -> SpecError:
        """All of them in one line, after the name of what they are in."""
        problems = tuple(problems)
        sentences = "; ".join(one_line(str(problem)) for problem in problems)
        return cls(f"{where}: {sentences}", problems=problems)


class DiskFullError(UserError):
    """There is no room on a disk."""


class NotFiniteError(UserError):
    """Numbers are not finite: a loss or gradient, what an encoder returns, what is exported."""


class NotFoundError(UserError):
    """No such job, or no such thing of a job."""


class StateError(UserError):
    """What was asked does not fit the state the job is in."""
