"""Ranks meet through files, with no collective open.

While ranks work on shares of different size (filling a cache may take hours), a collective would
run into the process group's timeout. A marker file per rank has none.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.run.rundir import RunDir

# Seconds between checks: ranks that are about equally fast hardly wait.
_SHORTEST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.1


class StrandedError(RuntimeError):
    """This rank is sound, but cannot continue without one that failed."""


class FileBarrier:
    """Meeting points of one attempt of a run.

    Args:
        run_dir: A directory that all ranks see.
        token: The same on all ranks, new for each attempt, so that markers of an earlier one
            mean nothing.
        rank: This rank.
        size: World size.
    """

    def __init__(self, run_dir: RunDir, token: str, rank: int, size: int) -> None:
        self._run_dir = run_dir
        self._root = run_dir.root / ".meeting"
        self._here = self._root / token
        self._rank = rank
        self._size = size
        self._here.mkdir(parents=True, exist_ok=True)

    def arrive(self, place: str, word: Any = None) -> None:
        """Say that this rank is done with what comes before `place`.

        Args:
            place: The meeting point.
            word: What the other ranks need to know; a JSON value. See `words`.
        """
        write_atomic(self._here / f"{place}.{self._rank}", json.dumps(word))

    def arrived(self, place: str) -> int:
        """How many ranks have arrived."""
        return sum(1 for _ in self._here.glob(f"{place}.*"))

    def words(self, place: str) -> list[Any]:
        """Return the messages that ranks left when they arrived, by rank.

        Ranks that are not there have none.
        """
        paths = {int(path.suffix[1:]): path for path in self._here.glob(f"{place}.*")}
        return [json.loads(paths[rank].read_text()) for rank in sorted(paths)]

    def claim(self, work: str, number: int) -> bool:
        """Take a piece of work that several ranks could do; whether this rank is the first.

        So a slow rank does less and nobody waits for it, and nothing is done twice.
        """
        folder = self._here / f"claims-{work}"  # of its own: `arrived` lists the one above often
        folder.mkdir(exist_ok=True)
        try:
            # Created exclusively: the file system decides who came first.
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def wait(
        self, place: str, *, ranks: int | None = None, waiting: Callable[[], None] | None = None
    ) -> None:
        """Wait, however long it takes, until `count` ranks (default: all) have arrived.

        Args:
            place: The meeting point.
            ranks: How many must have arrived.
            waiting: Called several times a second meanwhile.

        Raises:
            StrandedError: Another rank has failed and will never arrive.
        """
        pause = _SHORTEST_PAUSE
        while self.arrived(place) < (self._size if ranks is None else ranks):
            if self._one_failed():
                raise StrandedError(f"another rank failed while this one waited for it at {place}")
            if waiting is not None:
                waiting()
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    def _one_failed(self) -> bool:
        """Whether a rank has left an error; see `RunDir.requested` for why by listing."""
        names = set(os.listdir(self._run_dir.ranks))
        return any(self._run_dir.rank_error(rank).name in names for rank in range(self._size))

    def close(self) -> None:
        """Forget all markers; only after all ranks have met for the last time."""
        shutil.rmtree(self._root, ignore_errors=True)
