"""Do a part of a save on every rank, with the same outcome on all of them."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.api import CheckpointException

from engine.ranks.failure import cause_of
from jobs.errors import UserError
from jobs.run.failure import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from engine.ranks.world import World

_LONGEST: Final = 200  # characters of an exception's message


class SaveError(Exception):
    """A rank could not do its part of a save. Raised on all ranks alike, with the same words.

    Args:
        words: What went wrong.
        full: Whether a disk is full.
    """

    def __init__(self, words: str, *, full: bool = False) -> None:
        super().__init__(words)
        self.full = full


class NoRoomError(SaveError):
    """The disk has no room for a checkpoint; nothing was written."""

    def __init__(self, words: str) -> None:
        super().__init__(words, full=True)


class OutOfStepError(Exception):
    """A rank left a collective that the others are in; it must end. Its cause says why."""


def together(
    act: Callable[[], Any], world: World, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Do something on every rank; a failure of one is a failure of all. A collective of `group`.

    Args:
        act: This rank's part; what it returns must be picklable.
        world: The ranks.
        group: All ranks, over gloo; default: the default group.

    Returns:
        What each rank's part returned, by rank.

    Raises:
        SaveError: Any exception of any rank, whatever its type. All ranks are here then.
        Exception: As `act` raised it, when this rank cannot meet the others again.
    """
    outcome, problem = None, None
    try:
        outcome = act()
    except (Exception, CheckpointException) as error:
        if isinstance(error, OutOfStepError) and world.size > 1:
            raise error.__cause__ or error from None
        # In words: not every exception survives being pickled.
        problem = words_of(error, world.rank if world.size > 1 else None), is_full(error)
        if not isinstance(error, (OSError, UserError)):
            traceback.print_exception(error)  # into this rank's log
    everyone = world.gather((outcome, problem), group)
    for _, failure in everyone:
        if failure is not None:
            raise SaveError(failure[0], full=failure[1])
    return [result for result, _ in everyone]


def is_full(error: BaseException) -> bool:
    """Whether it comes of a full disk."""
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return cause_of(error) is Cause.DISK_FULL


def words_of(error: BaseException, rank: int | None = None) -> str:
    """Describe an error in a line.

    Args:
        error: Of any type.
        rank: Whose it is; None where that says nothing.
    """
    if isinstance(error, OutOfStepError):
        error = error.__cause__ or error
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, CheckpointException) and error.failures:
        # Torch has gathered them from all ranks.
        rank, (error, _) = next(iter(error.failures.items()))
    line = " ".join(str(error).split())
    short = line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
    kind = type(error).__name__
    return f"{f'rank {rank}: ' if rank is not None else ''}{kind}{f': {short}' if short else ''}"
