"""Synchronize the ranks of an attempt outside of collectives."""

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
# Synchronize ranks through files, with no collective open.
#
# When ranks have different amounts of work (filling a cache may take hours), a collective would run
# into the process group's timeout. Marker files have no timeout.


# Seconds between checks; short at first, so that equally fast ranks hardly wait.
_SHORTEST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.1


class StrandedError(RuntimeError):
    """This rank is healthy, but cannot continue because another rank failed."""


class FileBarrier:
    """Barriers of one attempt of a run.

    Args:
        run_dir: A directory that all ranks see.
        token: The same on all ranks, and new for each attempt, so that stale markers are ignored.
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
        """Signal that this rank has reached a barrier.

        Args:
            place: Name of the barrier.
            word: Message for the other ranks, a JSON value. See `words`.
        """
        write_atomic(self._here / f"{place}.{self._rank}", json.dumps(word))

    def arrived(self, place: str) -> int:
        """Return how many ranks have arrived."""
        return sum(1 for _ in self._here.glob(f"{place}.*"))

    def words(self, place: str) -> list[Any]:
        """Return the messages of the ranks that have arrived, in rank order.

        Ranks that have not arrived have no entry.
        """
        paths = {int(path.suffix[1:]): path for path in self._here.glob(f"{place}.*")}
        return [json.loads(paths[rank].read_text()) for rank in sorted(paths)]

    def claim(self, work: str, number: int) -> bool:
        """Claim a piece of work that any rank could do; return whether this rank got it.

        A slow rank claims fewer pieces, so no rank waits for it, and no work is done twice.
        """
        folder = self._here / f"claims-{work}"  # separate, since `arrived` lists the parent often
        folder.mkdir(exist_ok=True)
        try:
            # Create the file exclusively: the file system decides which rank came first.
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def wait(
        self, place: str, *, ranks: int | None = None, waiting: Callable[[], None] | None = None
    ) -> None:
        """Wait without a timeout until `ranks` ranks (default: all) have arrived.

        Args:
            place: Name of the barrier.
            ranks: Number of ranks that must have arrived.
            waiting: Called several times a second while waiting.

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
        """Return whether a rank has left an error; see `RunDir.requested` for why it lists."""
        names = set(os.listdir(self._run_dir.ranks))
        return any(self._run_dir.rank_error(rank).name in names for rank in range(self._size))

    def close(self) -> None:
        """Delete all markers. Call only after all ranks have passed the last barrier."""
        shutil.rmtree(self._root, ignore_errors=True)


# -- control --------------------------------------------------------------------------------
# User requests to a running job, which all ranks agree on at a step boundary.


@dataclass(frozen=True)
class AgreedRequests:
    """Actions that all ranks agreed to take now."""

    stop: bool
    save_now: bool
    sample_now: bool
    save_failed: bool = False


class _PendingVote(NamedTuple):
    """A vote in flight: in host memory, through gloo, so that no device is synchronized."""

    votes: torch.Tensor
    work: Any


class StoppedError(Exception):
    """All ranks have agreed to leave before the first step. This is not a failure."""


class Control:
    """Watches the request files, and SIGTERM, which is equivalent to `stop`."""

    def __init__(self, run_dir: RunDir, world: World) -> None:
        self._run_dir = run_dir
        self._world = world
        self._stop = False
        self._pending: _PendingVote | None = None
        signal.signal(signal.SIGTERM, self._note_termination)

    def agree(self, *, save_failed: bool = False, now: bool = False) -> AgreedRequests:
        """Agree on the actions of all ranks at this step boundary; a collective.

        SIGTERM may reach one rank before another, so the ranks vote, and one vote is enough.

        Args:
            save_failed: Whether this rank knows that an asynchronous save has failed, which the
                other ranks may not have noticed yet.
            now: Vote now, and wait for the others. Otherwise, ranks on GPUs use the vote started by
                `ask` one step earlier, which has completed meanwhile.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.work.wait()
        if pending is None or now:
            return AgreedRequests(*self._world.any(self._votes(save_failed=save_failed)))
        return AgreedRequests(*map(bool, pending.votes))

    def ask(self, *, save_failed: bool = False) -> None:
        """Start the vote for the next boundary, once this boundary's actions are done.

        On CPU ranks, or with one rank, this would gain nothing: `agree` votes itself.
        """
        if self._world.size == 1 or self._world.device.type == "cpu":
            return
        votes = torch.tensor(self._votes(save_failed=save_failed), dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        self._pending = _PendingVote(votes, work)

    def _votes(self, *, save_failed: bool) -> list[bool]:
        # Rank 0 removes the other requests, so only rank 0 knows which of them are new.
        others = [self._world.main and self._run_dir.requested(name) for name in REQUESTS[1:]]
        return [self.stop_requested(), *others, save_failed]

    def stop_requested(self) -> bool:
        """Return whether this rank has seen a stop request. Not a collective.

        Other ranks may see it later. Once true, it stays true, since what a rank reports to others
        must match its own behavior.
        """
        if self._run_dir.requested("stop"):
            self._stop = True  # never back to False: SIGTERM may have arrived
        return self._stop

    def acknowledge(self, name: str) -> None:
        """Remove the request file of a completed request (main rank)."""
        if self._world.main:
            self._run_dir.clear_request(name)

    def _note_termination(self, *_: Any) -> None:
        # Only set a flag: a collective or a save inside a signal handler could deadlock or corrupt
        # state.
        self._stop = True


# -- team -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of an attempt and the means to share work.

    Attributes:
        world: The ranks.
        barrier: Their file barrier.
        telemetry: This rank's telemetry.
        stop_requested: Returns whether a stop was requested on this rank; once true, it stays true.
    """

    world: World
    barrier: FileBarrier
    telemetry: Telemetry
    stop_requested: Callable[[], bool] = lambda: False

    def arrive(self, place: str, word: dict[str, Any]) -> None:
        """Reach a barrier, adding to the message whether a stop was requested on this rank."""
        self.barrier.arrive(place, word | {"stop": self.stop_requested()})

    def words(self, place: str) -> list[dict[str, Any]]:
        """Return the messages left at a barrier, once every rank has arrived.

        Raises:
            StoppedError: A stop was requested on any rank. All ranks read the same messages, so
                either all leave here or none does, and no rank enters a collective alone.
        """
        words: list[dict[str, Any]] = self.barrier.words(place)
        if any(word["stop"] for word in words):
            raise StoppedError(place)
        return words
