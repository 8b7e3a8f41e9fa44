"""The exceptions a person is meant to read."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 3000  # characters of a message
_END: Final = 500  # of it, which often says what is expected


class UserError(Exception):
    """Something the person can put right; shown as one line, never as a traceback.

    Args:
        message: What is wrong and where. Of a very long one, as of foreign text, the middle is
            left out.
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


class SpecError(UserError):
    """A job description that cannot be run as written."""


class NotFoundError(UserError):
    """No such job, or no such thing of a job."""


class StateError(UserError):
    """What was asked does not fit the state the job is in."""
