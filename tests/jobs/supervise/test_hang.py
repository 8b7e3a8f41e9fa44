"""When a job stands still, and who holds it up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.run.hang import Stillness, Watch, by_clock, find_hang
from jobs.run.rundir import RankStatus

NOW = 10_000.0


def status(number: int, **changes: Any) -> RankStatus:
    values: dict[str, Any] = {
        "rank": number,
        "pid": 1,
        "started": 0.0,
        "host": "h",
        "device": "cpu",
        "phase": "train",
        "step": 7,
        "heartbeat": NOW,
        "progressed": NOW,
    }
    return RankStatus(**values | changes)


def rank(number: int, *, still: float = 0.0, silent: float = 0.0, **changes: Any) -> Stillness:
    """A rank that made progress `still` seconds ago, and a heartbeat `silent` seconds ago."""
    return Stillness(status(number, **changes), still, silent)


# -- who is late -----------------------------------------------------------------------------


def test_who_moves_is_not_hung() -> None:
    assert find_hang([rank(0, still=99), rank(1, still=59)], timeout=60) is None
    assert find_hang([rank(0, still=59.9, silent=59.9)], timeout=60) is None


@pytest.mark.parametrize("timeout", [0, -1])
def test_the_check_can_be_turned_off(timeout: float) -> None:
    assert find_hang([rank(0, still=9999, silent=9999)], timeout) is None


def test_nobody_is_there_yet() -> None:
    assert find_hang([], timeout=1) is None


def test_a_rank_without_a_heartbeat_is_the_late_one() -> None:
    hang = find_hang([rank(0, still=70), rank(1, still=70, silent=70)], timeout=60)
    assert hang is not None
    assert hang.late == (1,)
    assert hang.reason == "rank 1 sent no heartbeat for 70 s at step 7 while training"


def test_a_rank_that_is_behind_is_the_late_one() -> None:
    ranks = [rank(0, still=70, step=8), rank(1, still=75, step=7), rank(2, still=70, step=8)]
    hang = find_hang(ranks, timeout=60)
    assert hang is not None
    assert hang.late == (1,)
    assert "rank 1 made no progress for 70 s at step 7" in hang.reason


def test_a_rank_in_another_phase_is_the_late_one() -> None:
    ranks = [rank(n, still=70) for n in range(3)] + [rank(3, still=70, phase="save")]
    hang = find_hang(ranks, timeout=60)
    assert hang is not None
    assert hang.late == (3,)
    assert "while saving" in hang.reason


def test_of_two_ranks_in_two_phases_neither_is_blamed() -> None:
    hang = find_hang([rank(0, still=70), rank(1, still=70, phase="save")], timeout=60)
    assert hang is not None
    assert hang.late == ()


def test_a_rank_that_stood_still_long_before_the_others_is_the_late_one() -> None:
    hang = find_hang([rank(0, still=70), rank(1, still=101)], timeout=60)
    assert hang is not None
    assert hang.late == (1,)


def test_when_nobody_stands_out_nobody_is_blamed() -> None:
    hang = find_hang([rank(0, still=70), rank(1, still=71)], timeout=60)
    assert hang is not None
    assert hang.late == ()
    assert "no rank made progress for 70 s" in hang.reason


@given(
    ages=st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=5),
    timeout=st.floats(1, 400),
)
def test_a_hang_is_when_no_rank_moved_for_so_long(
    ages: list[tuple[float, float]], timeout: float
) -> None:
    ranks = [rank(n, still=still, silent=silent) for n, (still, silent) in enumerate(ages)]
    hang = find_hang(ranks, timeout)
    youngest = min(one.still for one in ranks)
    assert (hang is not None) == (youngest >= timeout)
    if hang is not None:
        assert set(hang.late) <= set(range(len(ranks)))
        assert hang.seconds == youngest


# -- how long --------------------------------------------------------------------------------


def watched(watch: Watch, statuses: list[RankStatus], *, begin: float, seconds: int) -> float:
    """Look once a second, and return how long the rank that moved last has stood still then."""
    for second in range(seconds):
        seen = watch.observe(statuses, begin + second)
    return min(one.still for one in seen)


def test_stillness_is_what_was_seen_between_looks() -> None:
    watch, ranks = Watch(), [status(0, progressed=0.0), status(1, progressed=0.0)]
    assert watched(watch, ranks, begin=50.0, seconds=1) == 0.0, "whatever the ranks' clock says"
    assert watched(watch, ranks, begin=51.0, seconds=30) == 30.0
    ranks[1] = replace(ranks[1], progressed=1.0)
    assert [one.still for one in watch.observe(ranks, 81.0)] == [31.0, 0.0]


@pytest.mark.parametrize(
    "change", [{"step": 8}, {"phase": "save"}, {"progressed": 3.0}, {"pid": 2}, {"started": 1.0}]
)
def test_any_progress_ends_a_stillness(change: dict[str, Any]) -> None:
    """Also to an earlier time: the clock was set back."""
    watch = Watch()
    watched(watch, [status(0)], begin=0.0, seconds=9)
    (seen,) = watch.observe([status(0, **change)], 9.0)
    assert (seen.still, seen.silent) == (0.0, 0.0)


def test_a_heart_that_beats_is_no_progress() -> None:
    watch = Watch()
    watched(watch, [status(0)], begin=0.0, seconds=9)
    (seen,) = watch.observe([status(0, heartbeat=NOW + 1)], 9.0)
    assert (seen.still, seen.silent) == (9.0, 0.0)


def test_after_a_pause_in_which_nobody_watched_it_begins_again() -> None:
    watch, ranks = Watch(1800.0), [status(0)]
    assert watched(watch, ranks, begin=0.0, seconds=1001) == 1000.0
    watch.observe(ranks, 90_000.0)
    assert watch.unwatched == 89_000.0
    assert watched(watch, ranks, begin=90_001.0, seconds=5) == 5.0
    assert watch.unwatched == 0.0


def test_a_short_timeout_is_not_made_up_of_one_interval() -> None:
    watch = Watch(4.0)
    watch.observe([status(0)], 0.0)
    (seen,) = watch.observe([status(0)], 2.5)
    assert (seen.still, watch.unwatched) == (0.0, 2.5)


def test_a_rank_that_was_not_there_has_not_stood_still() -> None:
    watch = Watch()
    watched(watch, [status(0)], begin=0.0, seconds=9)
    seen = watch.observe([status(0), status(1)], 9.0)
    assert [one.still for one in seen] == [9.0, 0.0]


def test_who_has_not_watched_goes_by_what_ranks_say() -> None:
    (seen,) = by_clock([status(0, progressed=NOW - 70, heartbeat=NOW - 3)], NOW)
    assert (seen.still, seen.silent) == (70.0, 3.0)
