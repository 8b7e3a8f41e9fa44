"""Ranks that are made up, and what they write into the run directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs.run.rundir import FLIGHT, RankStatus, event
from tests.support.jobs.situations.kernel import STARTED

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir


@dataclass
class Rank:
    """A rank, which trains until the test says otherwise.

    Attributes:
        number: Which.
        pid: Its process.
        phase: What it does; a key of `jobs.run.rundir.PHASES`.
        moves: Whether it makes progress.
        beats: Whether it sends heartbeats.
        code: Its exit status once it has ended; negative for a signal.
        status: In the place of its status file, if that is damaged.
        collectives: The collectives that it has reached, for its flight record.
    """

    number: int
    pid: int = 0
    phase: str = "train"
    moves: bool = True
    beats: bool = True
    code: int | None = None
    status: str | None = None
    collectives: list[str] = field(default_factory=list)
    _progressed: float = 0.0

    @property
    def alive(self) -> bool:
        return self.code is None

    def act(self, run_dir: RunDir, now: float) -> None:
        """Do what a rank does about once a second."""
        if not self.alive or not self.beats:
            return
        if self.moves:
            self._progressed = now
        status = self._status(now).to_json() if self.status is None else self.status
        run_dir.rank_file(self.number).write_text(status)  # nobody reads meanwhile
        if self.collectives and run_dir.requested(FLIGHT):
            run_dir.flight(self.number).write_text(json.dumps([self._flight(), {}]))

    def fail(self, run_dir: RunDir, message: str, now: float) -> None:
        """Leave word of an error."""
        words = {"t": now, "type": "ValueError", "message": message, "phase": self.phase}
        run_dir.rank_error(self.number).write_text(json.dumps(words | {"step": 3}))

    def _status(self, now: float) -> RankStatus:
        return RankStatus(
            rank=self.number,
            pid=self.pid,
            started=STARTED,
            host="n1",
            device="cpu",
            phase=self.phase,
            step=3,
            heartbeat=now,
            progressed=self._progressed,
        )

    def _flight(self) -> dict[str, Any]:
        entries = [
            {
                "process_group": ["0", "default_pg"],
                "collective_seq_id": number,
                "profiling_name": f"gloo:{name}",
                "time_created_ns": number,
                "state": "scheduled",
                "is_p2p": False,
            }
            for number, name in enumerate(self.collectives, 1)
        ]
        return {"pg_config": {"0": {"name": "0", "desc": "default_pg"}}, "entries": entries}


def say_end(run_dir: RunDir, reason: str) -> None:
    """Write what rank 0 says last."""
    with open(run_dir.events, "a", encoding="utf-8") as events:
        events.write(event("end", reason=reason, step=3))
