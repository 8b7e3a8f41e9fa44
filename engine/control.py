"""What people ask of a running job, agreed by all ranks at a step boundary."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.rundir import REQUESTS

if TYPE_CHECKING:
    from engine.world import World
    from jobs.rundir import RunDir


@dataclass(frozen=True)
class Wishes:
    """What all ranks agreed to do now."""

    stop: bool
    save_now: bool
    sample_now: bool
    save_failed: bool = False


class StoppedError(Exception):
    """All ranks have agreed to leave before the first step; nothing has failed."""


class Control:
    """Watches the request files, and SIGTERM, which asks for the same as `stop`."""

    def __init__(self, run_dir: RunDir, world: World) -> None:
        self._run_dir = run_dir
        self._world = world
        self._stop = False
        signal.signal(signal.SIGTERM, self._note_termination)

    def agree(self, *, save_failed: bool = False) -> Wishes:
        """Look once, and agree. A collective: every rank calls it at the same step boundary.

        A file may appear between two ranks' looks, so the ranks vote; one vote is enough.

        Args:
            save_failed: Whether this rank knows that a save behind training's back has failed;
                the others may not have noticed yet.
        """
        others = [self._run_dir.requested(name) for name in REQUESTS[1:]]
        return Wishes(*self._world.any([self.wants_stop(), *others, save_failed]))

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
