"""What people ask of a running job, agreed by all ranks at a step boundary."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from jobs.run.rundir import REQUESTS

if TYPE_CHECKING:
    from engine.ranks.world import World
    from jobs.run.rundir import RunDir


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
