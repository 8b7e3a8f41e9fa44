"""What a supervisor does when things around its job go wrong, local or in an allocation.

Slurm or the kernel gives no answer, disks are full, files are damaged; and what it keeps in order.
`test_situations.py` has stops, failures and hangs.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from jobs.notify import config_file
from jobs.run.rundir import FLIGHT, REQUESTS
from tests.support.jobs.situations.rig import GRACE, HANG, LATE, TERM_GRACE

if TYPE_CHECKING:
    from tests.support.jobs.situations.rig import Rig

    Signals = list[tuple[str, tuple[int, ...]]]

BOTH = (0, 1)
TERM, KILL, USR1 = ("TERM", BOTH), ("KILL", BOTH), ("USR1", BOTH)
SOON = 10.0  # seconds within which something is tried again
HOUSEKEEPING = 15.0  # seconds between two looks at logs and disks
FULL = ("disk is full", "No space left")


# -- the kernel lists no processes, or Slurm is away -----------------------------------------


@pytest.mark.parametrize(
    ("level", "waits", "signals"),
    [(2, 0.0, [TERM]), (1, GRACE, [TERM]), (3, 0.0, [KILL])],
    ids=["level 2", "grace over", "level 3"],
)
def test_a_signal_that_cannot_be_sent_is_sent_later(
    rig: Rig, level: int, waits: float, signals: Signals
) -> None:
    """Whether it is due since a person asked, or since a grace is over."""
    rig.person_stops(level)
    rig.passes(waits - LATE if waits else 0.0)
    rig.backend_away(True)
    rig.passes(20)
    assert TERM not in rig.sent
    rig.backend_away(False)
    rig.passes(SOON)
    assert rig.sent == signals


def test_ranks_have_their_grace_from_the_signal_that_reached_them(rig: Rig) -> None:
    rig.backend_away(True)
    rig.person_stops(2)
    rig.passes(TERM_GRACE - LATE)
    rig.backend_away(False)
    rig.until_end(within=3 * TERM_GRACE)
    assert rig.sent == [TERM, KILL]
    sent, killed = (signal.at for signal in rig.signals)
    assert killed - sent >= TERM_GRACE


def test_a_backend_that_is_away_is_one_line_of_the_log(rig: Rig) -> None:
    rig.backend_away(True)
    rig.person_stops(2)
    rig.passes(40)
    assert len(rig.lines(rig.no_answer)) == 1
    assert rig.lines("Traceback") == []


def test_a_hang_ends_though_the_backend_is_away(rig: Rig) -> None:
    rig.progress(False)
    rig.backend_away(True)
    rig.passes(HANG + 5 * LATE)
    assert KILL in rig.sent
    rig.backend_away(False)
    rig.until_end()
    assert rig.state == "failed"
    assert rig.reason.startswith("hang: ")


def test_a_hang_ends_though_its_stacks_cannot_be_asked_for(rig: Rig) -> None:
    """On a full disk there is no room for the request."""
    rig.progress(False)
    rig.disk.full = True
    rig.passes(HANG + 5 * LATE)
    assert KILL in rig.sent
    rig.disk.full = False
    rig.until_end()
    assert rig.reason.startswith("hang: ")


def test_a_stop_becomes_firmer_though_the_backend_stays_away(rig: Rig) -> None:
    """SIGKILL needs nobody's answer: that of the ranks that are known, or of srun."""
    rig.backend_away(True)
    rig.person_stops(1)
    rig.passes(GRACE + TERM_GRACE + 4 * LATE)
    assert rig.sent == [KILL]
    assert rig.lines("stopping: SIGTERM sent") != []
    rig.backend_away(False)
    rig.until_end()
    assert rig.state == "stopped"


# -- disks and files -------------------------------------------------------------------------


def test_a_full_disk_is_one_line_of_the_log(rig: Rig) -> None:
    rig.disk.full = True
    rig.phase("save")
    rig.passes(40)
    assert len(rig.lines(*FULL)) == 1
    assert rig.sent == []


def test_what_a_full_disk_kept_from_being_said_is_said_later(rig: Rig) -> None:
    rig.disk.full = True
    rig.phase("save")
    rig.passes(40)
    assert rig.sent == []
    assert rig.state == "running", "the last that could be written"
    rig.disk.full = False
    rig.passes(SOON)
    assert rig.state == "saving"


def test_a_stop_on_a_full_disk_is_carried_out_once_there_is_space(rig: Rig) -> None:
    rig.disk.full = True
    rig.person_stops(1)
    rig.passes(SOON)
    rig.disk.full = False
    rig.passes(SOON)
    assert rig.job.run_dir.requested("stop")
    assert rig.state == "stopping"
    rig.passes(GRACE + LATE)
    assert rig.sent == [TERM]


def test_an_end_on_a_full_disk_is_recorded_once_there_is_space(rig: Rig) -> None:
    rig.disk.full = True
    rig.finish("completed")
    rig.passes(60)
    assert not rig.clock.ended
    assert rig.state == "running", "the last that could be written"
    rig.disk.full = False
    rig.until_end(within=SOON)
    assert (rig.state, rig.reason) == ("completed", "trained 3 steps")


WHOLE = {
    "rank": 1,
    "pid": 5,
    "started": 1.0,
    "host": "n1",
    "device": "cpu",
    "phase": "start",
    "step": 3,
    "heartbeat": 1.0,
    "progressed": 1.0,
}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{torn",
        "[1, 2]",
        json.dumps(WHOLE | {"phase": ["save"]}),
        json.dumps(WHOLE | {"pid": 2**70}),
        json.dumps(WHOLE | {"progressed": 10**400}),
    ],
    ids=["empty", "torn", "no object", "wrong type", "huge pid", "huge time"],
)
def test_a_damaged_status_file_changes_nothing(rig: Rig, content: str) -> None:
    rig.damage(1, content)
    rig.passes(40)
    assert (rig.state, rig.reason) == ("running", "all ranks are up")
    assert rig.sent == []
    assert rig.lines("Traceback") == []
    rig.damage(1, None)
    rig.phase("save")
    rig.passes(LATE)
    assert rig.state == "saving"


def test_a_damaged_status_file_is_one_line_of_the_log(rig: Rig) -> None:
    rig.damage(1, "{torn")
    rig.passes(40)
    assert len(rig.lines("cannot read ranks/1.json: ")) == 1


def test_a_damaged_status_file_delays_no_stop(rig: Rig) -> None:
    rig.damage(1, "{torn")
    rig.person_stops(2)
    rig.passes(LATE)
    assert rig.sent == [TERM]


# -- someone else has been quicker -----------------------------------------------------------


def test_an_end_that_someone_else_recorded_is_the_end(rig: Rig) -> None:
    rig.end_by_someone_else()
    rig.passes(LATE)
    rig.finish("completed")
    rig.until_end(within=SOON)
    assert rig.state.ended
    assert rig.lines("Traceback") == []


def test_a_job_that_was_removed_ends_its_supervisor(rig: Rig) -> None:
    rig.remove()
    rig.until_end(within=60)
    assert not rig.job.run_dir.root.exists()


# -- what is announced -----------------------------------------------------------------------


def notify(*events: str) -> None:
    """Have these announced; a stall after half a minute."""
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": "true", "on": events, "stalled_after": 30}))
    path.chmod(0o600)


def test_each_stall_is_announced_once(rig: Rig) -> None:
    notify("stalled")
    for stalls in (1, 2):
        rig.progress(False)
        rig.passes(25)
        assert rig.announced == ["stalled"] * (stalls - 1)
        rig.passes(15)
        assert rig.announced == ["stalled"] * stalls
        rig.passes(15)
        assert rig.announced == ["stalled"] * stalls
        rig.progress(True)
        rig.passes(SOON)
    assert rig.sent == [], "it is no hang yet"


@pytest.mark.parametrize("end", ["completed", "stopped", "failed"])
def test_the_end_is_announced_once(rig: Rig, end: str) -> None:
    notify("completed", "stopped", "failed")
    if end == "failed":
        rig.error(0)
        rig.error(1)
    else:
        rig.person_stops(int(end == "stopped"))
        rig.passes(LATE)
        rig.finish(end)
    rig.until_end()
    assert rig.state == end
    assert rig.announced == [end]


# -- what is kept in order -------------------------------------------------------------------


def test_a_log_that_grows_too_large_is_cut(rig: Rig) -> None:
    log = rig.job.run_dir.rank_log(0)
    log.write_text("the first line\n")
    os.truncate(log, 257 << 20)  # takes no space
    rig.passes(HOUSEKEEPING + LATE)
    assert log.stat().st_size < 64 << 20
    assert log.open("rb").readline() == b"the first line\n"
    assert len(rig.lines("rank0.log grew too large")) == 1


def test_a_disk_that_is_nearly_full_is_warned_about(rig: Rig) -> None:
    rig.disk.free = 1 << 20
    rig.passes(HOUSEKEEPING + LATE)
    assert rig.state == "running"
    assert "only 1 MiB free for checkpoints" in rig.reason
    assert rig.lines("only 1 MiB free for checkpoints") != []


ends = pytest.mark.parametrize("end", ["completed", "killed"])


def finish(rig: Rig, end: str) -> None:
    """Let the job end well, or by the hand of a person."""
    if end == "killed":
        rig.person_stops(3)
    else:
        rig.finish(end)
    rig.until_end()


@ends
def test_requests_that_nobody_took_are_cleared_at_the_end(rig: Rig, end: str) -> None:
    for name in (*REQUESTS, FLIGHT):
        rig.job.run_dir.request(name)
    finish(rig, end)
    assert [name for name in (*REQUESTS, FLIGHT) if rig.job.run_dir.requested(name)] == []


@ends
def test_unfinished_checkpoints_are_removed_at_the_end(rig: Rig, end: str) -> None:
    unfinished = rig.job.run_dir.checkpoints / ".step-9.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "part").write_bytes(b"x")
    finish(rig, end)
    assert not unfinished.exists()
