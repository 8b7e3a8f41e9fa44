"""The table of states: every job can end, an ended one can only be queued again."""

from __future__ import annotations

import pytest

from jobs.queue.states import ACTIVE, ENDED, TRANSITIONS, State, may_follow


@pytest.mark.parametrize("state", State)
def test_a_state_is_queued_active_or_ended(state: State) -> None:
    assert [state is State.QUEUED, state.active, state.ended].count(True) == 1
    assert state in TRANSITIONS


@pytest.mark.parametrize("state", sorted(ACTIVE))
def test_an_active_job_can_end_in_every_way_and_never_goes_back_to_the_queue(state: State) -> None:
    assert TRANSITIONS[state] >= ENDED
    assert not may_follow(state, State.QUEUED)


@pytest.mark.parametrize("state", sorted(ENDED))
def test_an_ended_job_can_only_be_queued_again(state: State) -> None:
    assert TRANSITIONS[state] == {State.QUEUED}


def test_a_stopping_job_does_not_pretend_to_run_again() -> None:
    assert TRANSITIONS[State.STOPPING] == ENDED


def test_a_queued_job_never_completes_unstarted() -> None:
    assert TRANSITIONS[State.QUEUED] == {State.STARTING, State.STOPPED, State.FAILED}
