"""The ranks of an attempt, as far as they meet outside of collectives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from jobs.run.rundir import REQUESTS, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World
    from jobs.run.rundir import RunDir


# -- file barrier ---------------------------------------------------------------------------
# Ranks meet through files, with no collective open.
#
# While ranks work on shares of different size (filling a cache may take hours), a collective
# would run into the process group's timeout. A marker file per rank has none.


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


# -- control --------------------------------------------------------------------------------
# What people ask of a running job, agreed by all ranks at a step boundary.


@dataclass(frozen=True)
class Wishes:
    """What all ranks agreed to do now."""

    stop: bool
    save_now: bool
    sample_now: bool
    save_failed: bool = False


class _Asked(NamedTuple):
    """A vote under way: host memory, through gloo, so that no device is waited for."""

    votes: torch.Tensor
    work: Any


class StoppedError(Exception):
    """All ranks have agreed to leave before the first step; nothing has failed."""


class Control:
    """Watches the request files, and SIGTERM, which asks for the same as `stop`."""

    def __init__(self, run_dir: RunDir, world: World) -> None:
        self._run_dir = run_dir
        self._world = world
        self._stop = False
        self._asked: _Asked | None = None
        signal.signal(signal.SIGTERM, self._note_termination)

    def agree(self, *, save_failed: bool = False, now: bool = False) -> Wishes:
        """Agree on what all ranks do at this step boundary; a collective.

        SIGTERM may reach one rank before another, so the ranks vote; one vote is enough.

        Args:
            save_failed: Whether this rank knows that a save behind training's back has failed;
                the others may not have noticed yet.
            now: Look now, and wait for the others. Else ranks on GPUs take what they were asked
                with `ask` a step before, which has been answered meanwhile.
        """
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.work.wait()
        if asked is None or now:
            return Wishes(*self._world.any(self._votes(save_failed=save_failed)))
        return Wishes(*map(bool, asked.votes))

    def ask(self, *, save_failed: bool = False) -> None:
        """Vote for the next boundary, after what was agreed for this one is done.

        On CPU ranks, and where there is one rank, nothing is gained by that: `agree` looks itself.
        """
        if self._world.size == 1 or self._world.device.type == "cpu":
            return
        votes = torch.tensor(self._votes(save_failed=save_failed), dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        self._asked = _Asked(votes, work)

    def _votes(self, *, save_failed: bool) -> list[bool]:
        # Rank 0 removes the other requests, and so it alone knows which of them are new.
        others = [self._world.main and self._run_dir.requested(name) for name in REQUESTS[1:]]
        return [self.wants_stop(), *others, save_failed]

    def wants_stop(self) -> bool:
        """Whether this rank has seen a wish to stop. No collective: others may see it later.

        What was seen once stays: what a rank tells the others must not differ from what it did.
        """
        if self._run_dir.requested("stop"):
            self._stop = True  # never back to False: SIGTERM may have come meanwhile
        return self._stop

    def honoured(self, name: str) -> None:
        """Remove the request file of what has been done (main rank)."""
        if self._world.main:
            self._run_dir.clear_request(name)

    def _note_termination(self, *_: Any) -> None:
        # Only a note: a collective or a save in a signal handler would hang or tear.
        self._stop = True


# -- team -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of an attempt, as far as they share work.

    Attributes:
        world: The ranks.
        barrier: Where they meet.
        telemetry: This rank's.
        wants_stop: Whether this rank was asked to stop; once true, it stays true.
    """

    world: World
    barrier: FileBarrier
    telemetry: Telemetry
    wants_stop: Callable[[], bool] = lambda: False

    def arrive(self, place: str, word: dict[str, Any]) -> None:
        """Go to a meeting point; the word also says whether this rank wants to stop."""
        self.barrier.arrive(place, word | {"stop": self.wants_stop()})

    def words(self, place: str) -> list[dict[str, Any]]:
        """Return the messages left at a meeting point, once every rank has arrived.

        Raises:
            StoppedError: A rank wants to stop. All ranks read the same words, so all leave here or
                none does, and no rank enters a collective alone.
        """
        words: list[dict[str, Any]] = self.barrier.words(place)
        if any(word["stop"] for word in words):
            raise StoppedError(place)
        return words
