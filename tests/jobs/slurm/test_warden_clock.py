"""What a warden decides, on a clock that is made up: as a supervisor of a machine does.

`tests/jobs/supervise/test_supervisor_looks.py` has the same of that one.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.run.diagnosis import flight_records
from jobs.run.diagnosis.hang import SAVE_STEP
from jobs.run.rundir import RankStatus, RunDir, write_atomic
from jobs.slurm import supervise
from jobs.slurm.records import Allocation
from jobs.slurm.supervise import TERM_GRACE, Warden

if TYPE_CHECKING:
    from pathlib import Path

GRACE = 30.0
SPEC = SimpleNamespace(stop_grace_seconds=GRACE, hang_timeout=0.0)
RANK = RankStatus(0, 7, 1.0, "n1", "cuda:0", "train", 3, 0.0, 0.0)


@dataclass
class Played:
    """A warden whose only rank, clock and person are the test's."""

    warden: Warden
    now: float = 1000.0
    wish: int = 0
    sent: list[str] = field(default_factory=list)
    status: RankStatus = RANK
    attempt: Any = field(default_factory=lambda: SimpleNamespace(spec=SPEC, child=None))

    def look(self, after: float, *, moves: bool = True) -> None:
        """Let time pass, in which the rank makes progress or not, and look."""
        self.now += after
        if moves:
            self.status = replace(self.status, heartbeat=self.now, progressed=self.now)
        write_atomic(self.warden.run_dir.rank_file(0), self.status.to_json())
        self.warden._look(self.attempt)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    made = Played(Warden(run_dir, Allocation("7", 0), attempt=0))
    clock = SimpleNamespace(
        monotonic=lambda: made.now, sleep=lambda seconds: None, strftime=time.strftime
    )
    monkeypatch.setattr(supervise, "time", clock)
    monkeypatch.setattr(supervise, "world_size", lambda spec: 1)
    monkeypatch.setattr(Warden, "_persons_wish", lambda self: made.wish)
    monkeypatch.setattr(supervise, "taken_over", lambda root, mine: None)
    monkeypatch.setattr(
        supervise.commands, "signal_steps", lambda job, name: made.sent.append(name)
    )
    monkeypatch.setattr(Warden, "_kill", lambda self, attempt: made.sent.append("KILL"))
    return made


def test_a_save_that_goes_on_is_given_its_time(played: Played) -> None:
    played.look(1)
    played.wish = 1
    played.look(1)
    assert played.warden.stop_level == 1
    played.status = replace(played.status, phase="save")
    for _ in range(100):
        played.look(5)
    assert played.sent == [], "500 s of writing, where a stop has 30"
    for _ in range(2 * int(SAVE_STEP) + 5):
        played.look(1, moves=False)
    assert played.sent == ["TERM"]
    for _ in range(int(TERM_GRACE) + 5):
        played.look(1, moves=False)
    assert played.sent == ["TERM", "KILL"]


def test_time_in_which_the_warden_did_not_run_is_given_back(played: Played) -> None:
    played.look(1)
    played.wish = 1
    played.look(1)
    played.look(3600)
    assert played.warden.stop_level == 1
    for _ in range(int(GRACE) + 5):
        played.look(1)
    assert played.sent == ["TERM"]


def test_a_hang_names_its_collective(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_records, "find_wait", lambda run_dir: "rank 1 waits in all_reduce")
    played.warden._end_a_hang(played.attempt, "no progress for 600 s")
    assert played.warden.hang == "no progress for 600 s; rank 1 waits in all_reduce"
    assert played.sent == ["USR1", "KILL"]


def test_a_full_disk_is_logged_once(
    played: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    looks = iter([True] * 20 + [False])
    attempt: Any = SimpleNamespace(spec=SPEC, child=None, alive=lambda: next(looks), exit_code=0)
    monkeypatch.setattr(Warden, "_look", fail)
    monkeypatch.setattr(supervise, "judge", lambda *_, **__: None)
    played.warden._watch(attempt)
    assert capsys.readouterr().out.count("monitoring failed") == 1
