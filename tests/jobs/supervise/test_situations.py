"""What a supervisor does in each situation, whether its ranks are local or in an allocation.

Stops, failures and hangs; `test_situations_trouble.py` has what goes wrong around the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.queue.neighbors import find_neighbors
from jobs.run.events import Validation
from jobs.run.hang import SAVE_STEP
from jobs.run.rundir import RunDir
from tests.support.jobs.situations.rig import FAILURE_GRACE, GRACE, HANG, LATE, TERM_GRACE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.jobs.situations.rig import Rig

    Signals = list[tuple[str, tuple[int, ...]]]

BOTH = (0, 1)
TERM, KILL, USR1 = ("TERM", BOTH), ("KILL", BOTH), ("USR1", BOTH)
A_LONG_TIME = 150.0  # seconds, more than all graces together


def test_a_job_that_starts_is_seen_by_who_clears_the_cache(rig: Rig, tmp_path: Path) -> None:
    """From any other state directory that has the same cache."""
    (seen,) = find_neighbors(tmp_path)
    assert seen.jobs is not None
    assert [job.run_dir.root for job in seen.jobs] == [rig.job.run_dir.root]
    assert find_neighbors(seen.home) == []


# -- a person stops a job --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "signals"),
    [
        (1, [("TERM", GRACE), ("KILL", GRACE + TERM_GRACE)]),
        (2, [("TERM", 0.0), ("KILL", TERM_GRACE)]),
        (3, [("KILL", 0.0)]),
    ],
    ids=["level 1", "level 2", "level 3"],
)
def test_a_stop_that_nobody_heeds_escalates_in_time(
    rig: Rig, level: int, signals: list[tuple[str, float]]
) -> None:
    asked = rig.clock.now
    rig.person_stops(level)
    rig.passes(LATE)
    if level < 3:
        assert rig.state == "stopping"
        assert rig.job.run_dir.requested("stop") or level == 2
    rig.until_end()
    assert rig.sent == [(name, BOTH) for name, _ in signals]
    lateness = [sent.at - asked - due for sent, (_, due) in zip(rig.signals, signals, strict=True)]
    assert all(0 <= seconds <= LATE for seconds in lateness), lateness
    assert (rig.state, rig.reason) == ("stopped", "ended by SIGKILL; no checkpoint")


def test_each_further_stop_takes_effect_at_once(rig: Rig) -> None:
    rig.person_stops(1)
    rig.passes(LATE)
    assert rig.sent == []
    rig.person_stops(2)
    rig.passes(LATE)
    assert rig.sent == [TERM]
    rig.person_stops(3)
    rig.passes(LATE)
    assert rig.sent == [TERM, KILL]


def test_a_stop_that_is_heeded_ends_with_the_ranks(rig: Rig) -> None:
    rig.person_stops(1)
    rig.passes(LATE)
    rig.finish("stopped")
    rig.until_end(within=LATE)
    assert (rig.state, rig.reason) == ("stopped", "stopped at step 3, saved")
    assert rig.sent == []


@pytest.mark.parametrize("phase", ["save", "export"])
@pytest.mark.parametrize(("level", "first"), [(1, []), (2, [TERM])], ids=["level 1", "level 2"])
def test_a_stop_gives_a_save_that_makes_progress_its_time(
    rig: Rig, phase: str, level: int, first: Signals
) -> None:
    """However long it takes; one that writes nothing for a minute is no save any more."""
    rig.phase(phase)
    rig.person_stops(level)
    rig.passes(A_LONG_TIME)
    assert rig.sent == first
    rig.progress(False)
    rig.passes(SAVE_STEP - LATE)
    assert rig.sent == first
    rig.until_end(within=2 * SAVE_STEP + TERM_GRACE)
    assert rig.sent == [TERM, KILL]


@pytest.mark.parametrize(
    ("level", "signals"),
    [(0, []), (1, []), (2, [TERM]), (3, [KILL])],
    ids=["none", "level 1", "level 2", "level 3"],
)
def test_which_signals_go_out_during_a_save(rig: Rig, level: int, signals: Signals) -> None:
    """Level 3 waits for nothing: that is what it is for."""
    rig.phase("save")
    rig.passes(LATE)
    assert rig.state == "saving"
    rig.person_stops(level)
    rig.passes(LATE)
    assert rig.sent == signals
    rig.passes(GRACE + TERM_GRACE + LATE)
    assert rig.sent == signals


# -- a job does worse than most of its sweep -------------------------------------------------


@pytest.mark.parametrize("loss", [3.0, 1.0], ids=["worse", "better"])
def test_a_job_that_is_worse_than_most_of_its_sweep_is_stopped(idle: Rig, loss: float) -> None:
    keys = {"sweep": "cats", "stop_worse_than_median_after": 2, "validation_fraction": 0.1}
    idle.describe(keys)
    for name in ("90-a", "91-b"):
        other = RunDir(idle.job.run_dir.root.parent / name)
        other.create()
        other.job_file.write_text("sweep: cats\n")
        other.events.write_text(Validation(2, 2.0).line())
    idle.begin()
    with idle.job.run_dir.events.open("a") as file:
        file.write(Validation(2, loss).line())
    idle.passes(2 * LATE)
    stopped = loss > 2
    assert (idle.state == "stopping") == idle.job.run_dir.requested("stop") == stopped
    idle.finish("stopped" if stopped else "completed")
    idle.until_end()
    assert idle.sent == []
    if stopped:
        assert idle.state == "stopped"
        assert idle.reason == (
            "stopped at step 3, saved: best validation loss 3 is above the median 2 of 2 others at "
            "step 2"
        )
    else:
        assert idle.state == "completed"


# -- SIGTERM from someone else ---------------------------------------------------------------


def test_sigterm_from_outside_lets_the_ranks_save(idle: Rig) -> None:
    """They got it too. What follows is not ours to decide, so that nobody is killed by us."""
    idle.allow_restarts(1)
    idle.begin()
    idle.phase("save")
    idle.stop_from_outside()
    idle.passes(A_LONG_TIME)
    assert idle.sent == []
    idle.finish("stopped")
    idle.until_end()
    assert idle.state == "stopped"
    assert "stopped at step 3, saved" in idle.reason
    assert idle.launches == 1, "it is no failure"


def test_ranks_that_do_not_heed_sigterm_from_outside_are_left_alone(rig: Rig) -> None:
    rig.stop_from_outside()
    rig.passes(A_LONG_TIME)
    assert rig.sent == []
    assert not rig.clock.ended


# -- a rank fails, or is gone ----------------------------------------------------------------


def test_ranks_that_wait_for_one_that_failed_are_ended(rig: Rig) -> None:
    rig.error(0)
    rig.passes(FAILURE_GRACE)
    assert rig.sent == [], "they may end by themselves"
    rig.passes(LATE)
    assert rig.sent == [("KILL", (1,))]
    rig.until_end()
    assert rig.state == "failed"
    assert "rank 0" in rig.reason
    assert "the loss is odd" in rig.reason
    assert "rank 1" not in rig.reason, "it is not to blame"


def test_ranks_that_are_ended_for_another_are_named(rig: Rig) -> None:
    rig.error(0)
    rig.passes(FAILURE_GRACE + LATE)
    assert [line for line in rig.lines("ended", "ending") if line.endswith("[1]")] != []


def test_a_rank_that_leaves_as_if_all_were_well_strands_the_others(rig: Rig) -> None:
    """It was not at its end. Of such a task srun says nothing, and its pid is on another node."""
    rig.die(1, 0)
    rig.progress(False)
    rig.passes(FAILURE_GRACE + LATE if rig.local_run_id else HANG + 2 * LATE)
    assert ("KILL", (0,)) in rig.sent
    rig.until_end()
    assert rig.state == "failed"
    assert "rank 1" in rig.reason


@pytest.mark.parametrize("code", [7, -9])
def test_a_rank_that_is_gone_without_a_word_is_to_blame(rig: Rig, code: int) -> None:
    rig.die(1, code)
    rig.passes(FAILURE_GRACE)
    assert rig.sent == []
    rig.passes(LATE)
    assert rig.sent == [("KILL", (0,))]
    rig.until_end()
    assert rig.state == "failed"
    assert "rank 1" in rig.reason
    assert "rank 0" not in rig.reason


def test_a_rank_that_leaves_at_its_end_strands_nobody(rig: Rig) -> None:
    """Rank 0 has more to write."""
    rig.phase("end", 1)
    rig.phase("export", 0)
    rig.passes(LATE)
    rig.die(1, 0)
    rig.passes(A_LONG_TIME)
    assert rig.sent == []
    rig.finish("completed")
    rig.until_end()
    assert (rig.state, rig.reason) == ("completed", "trained 3 steps")


@pytest.mark.parametrize(("level", "launches"), [(0, 2), (1, 1)], ids=["alone", "stopped"])
def test_a_failed_job_starts_again_unless_a_person_stops_it(
    idle: Rig, level: int, launches: int
) -> None:
    idle.allow_restarts(1)
    idle.begin()
    idle.person_stops(level)
    idle.passes(LATE)
    idle.error(0)
    idle.error(1)
    idle.passes(5 * LATE)
    assert idle.launches == launches
    assert idle.clock.ended == (level > 0)
    assert idle.state == ("failed" if level else "running")
    assert not level or "the loss is odd" in idle.reason


# -- nothing moves ---------------------------------------------------------------------------


def test_a_hang_ends_once_it_is_known_what_ranks_wait_for(rig: Rig) -> None:
    rig.enter(0, "all_gather", "all_reduce")
    rig.enter(1, "all_gather")
    rig.progress(False)
    rig.passes(HANG - LATE)
    assert rig.sent == []
    rig.until_end()
    assert rig.sent == [USR1, KILL]
    asked, killed = (sent.at for sent in rig.signals)
    assert killed - asked >= 2.0, "stacks take their time"
    assert rig.state == "failed"
    assert rig.reason.startswith("hang: no rank made progress for 6")
    assert "rank 1 never reached the all_reduce that rank 0 waits in" in rig.reason


def test_a_hang_is_worth_another_attempt(idle: Rig) -> None:
    idle.allow_restarts(1)
    idle.begin()
    idle.progress(False)
    idle.passes(HANG + 5 * LATE)
    assert idle.sent == [USR1, KILL]
    assert idle.launches == 2
    assert idle.state == "running"
    assert not idle.job.run_dir.requested("flight")
    idle.passes(2 * HANG)
    assert idle.sent == [USR1, KILL], "the new ranks make progress"


def test_heartbeats_alone_are_no_progress_but_one_rank_that_moves_is(rig: Rig) -> None:
    rig.progress(False, rank=0)
    rig.passes(2 * HANG)
    assert rig.sent == []
    rig.progress(False, rank=1)
    rig.passes(HANG + 5 * LATE)
    assert rig.sent == [USR1, KILL]


# -- the supervisor does not run for five minutes --------------------------------------------

PAUSE = 300.0  # seconds
suspended = pytest.mark.parametrize("ranks", [False, True], ids=["supervisor", "node"])


@suspended
@pytest.mark.parametrize(
    ("level", "grace", "before", "after"),
    [(1, GRACE, [], [TERM]), (2, TERM_GRACE, [TERM], [TERM, KILL])],
    ids=["level 1", "level 2"],
)
def test_a_pause_uses_up_no_grace_of_a_stop(
    rig: Rig,
    ranks: bool,
    level: int,
    grace: float,
    before: Signals,
    after: Signals,
) -> None:
    rig.person_stops(level)
    rig.passes(10)
    rig.suspend(PAUSE, ranks=ranks)
    assert rig.sent == before, "at the first look afterwards"
    rig.passes(grace - 10 - LATE)
    assert rig.sent == before
    rig.passes(2 * LATE)
    assert rig.sent == after


@suspended
def test_a_pause_uses_up_no_grace_of_ranks_that_wait(rig: Rig, ranks: bool) -> None:
    rig.error(0)
    rig.passes(5)
    rig.suspend(PAUSE, ranks=ranks)
    assert rig.sent == [], "at the first look afterwards"
    rig.passes(FAILURE_GRACE - 5 - LATE)
    assert rig.sent == []
    rig.passes(2 * LATE)
    assert rig.sent == [("KILL", (1,))]


@suspended
def test_a_pause_is_no_hang_and_hides_none(rig: Rig, ranks: bool) -> None:
    rig.progress(False)
    rig.passes(HANG - 20)
    rig.suspend(PAUSE, ranks=ranks)
    assert rig.sent == [], "at the first look afterwards"
    rig.passes(20 - LATE)
    assert rig.sent == []
    rig.passes(HANG + LATE)
    assert rig.sent == [USR1, KILL]


@suspended
def test_a_pause_is_one_line_of_the_log(rig: Rig, ranks: bool) -> None:
    rig.suspend(PAUSE, ranks=ranks)
    rig.passes(30)
    assert rig.sent == []
    assert rig.state == "running"
    (line,) = rig.lines("did not run for")
    assert line.endswith(("did not run for 300 s", "did not run for 301 s"))
