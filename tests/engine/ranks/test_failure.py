"""What kind of failure a rank records: by types, never by words."""

from __future__ import annotations

import errno

import pytest

from engine.checkpoint.together import is_full
from engine.ranks.failure import cause_of
from jobs.errors import DiskFullError, NotFiniteError, UserError
from jobs.run.failure import Cause


def led_to(error: Exception, first: BaseException) -> Exception:
    error.__cause__ = first
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DiskFullError("no words"), Cause.DISK_FULL),
        (OSError(errno.EDQUOT, "no words"), Cause.DISK_FULL),
        (led_to(UserError("a cache"), OSError(errno.ENOSPC, "no words")), Cause.DISK_FULL),
        (OSError(errno.EIO, "No space left on device"), Cause.OTHER),
        (NotFiniteError("no words"), Cause.NOT_FINITE),
        (UserError("the disk is full"), Cause.OTHER),
    ],
)
def test_the_kind_of_a_failure(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause
    assert is_full(error) == (cause is Cause.DISK_FULL)
