"""When a job stands still, and who holds it up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.hang import find_hang
from jobs.rundir import RankStatus

NOW = 10_000.0


def rank(number: int, *, still: float = 0.0, silent: float = 0.0, **changes: Any) -> RankStatus:
    """A rank that made progress `still` seconds ago, and a heartbeat `silent` seconds ago."""
    values: dict[str, Any] = {
        "rank": number, "pid": 1, "started": 0.0, "host": "h", "device": "cpu", "phase": "train",
        "step": 7, "heartbeat": NOW - silent, "progressed": NOW - still,
    }  # fmt: skip
    return RankStatus(**values | changes)


def test_who_moves_is_not_hung() -> None:
    assert find_hang([rank(0, still=99), rank(1, still=59)], NOW, timeout=60) is None
    assert find_hang([rank(0, still=59.9, silent=59.9)], NOW, timeout=60) is None


@pytest.mark.parametrize("timeout", [0, -1])
def test_the_check_can_be_turned_off(timeout: float) -> None:
    assert find_hang([rank(0, still=9999, silent=9999)], NOW, timeout) is None


def test_nobody_is_there_yet() -> None:
    assert find_hang([], NOW, timeout=1) is None


def test_a_rank_without_a_heartbeat_is_the_late_one() -> None:
    hang = find_hang([rank(0, still=70), rank(1, still=70, silent=70)], NOW, timeout=60)
    assert hang is not None
    assert hang.late == (1,)
    assert hang.reason == "rank 1 gave no sign of life for 70 s at step 7 while training"


def test_a_rank_that_is_behind_is_the_late_one() -> None:
    ranks = [rank(0, still=70, step=8), rank(1, still=75, step=7), rank(2, still=70, step=8)]
    hang = find_hang(ranks, NOW, timeout=60)
    assert hang is not None
    assert hang.late == (1,)
    assert "rank 1 stood still for 70 s at step 7" in hang.reason


def test_a_rank_in_another_phase_is_the_late_one() -> None:
    ranks = [rank(n, still=70) for n in range(3)] + [rank(3, still=70, phase="save")]
    hang = find_hang(ranks, NOW, timeout=60)
    assert hang is not None
    assert hang.late == (3,)
    assert "while saving" in hang.reason


def test_when_nobody_stands_out_nobody_is_blamed() -> None:
    hang = find_hang([rank(0, still=70), rank(1, still=71)], NOW, timeout=60)
    assert hang is not None
    assert hang.late == ()
    assert "all ranks stood still for 70 s" in hang.reason


@given(
    ages=st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=5),
    timeout=st.floats(1, 400),
)
def test_a_hang_is_when_no_rank_moved_for_so_long(
    ages: list[tuple[float, float]], timeout: float
) -> None:
    ranks = [rank(n, still=still, silent=silent) for n, (still, silent) in enumerate(ages)]
    hang = find_hang(ranks, NOW, timeout)
    youngest = NOW - max(status.progressed for status in ranks)
    assert (hang is not None) == (youngest >= timeout)
    if hang is not None:
        assert set(hang.late) <= set(range(len(ranks)))
        assert hang.seconds == youngest
