"""The states of a job and their transitions. No other code defines transitions."""

from __future__ import annotations

from enum import StrEnum

PAUSED = "the queue is paused"
"""The reason of jobs that wait while the queue is paused."""


class State(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    STOPPING = "stopping"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"

    @property
    def active(self) -> bool:
        """Return whether processes exist or are about to."""
        return self in ACTIVE

    @property
    def ended(self) -> bool:
        """Return whether no process of the job exists, and none will unless it is resumed."""
        return self in ENDED


ACTIVE = frozenset({State.STARTING, State.RUNNING, State.SAVING, State.STOPPING})
ENDED = frozenset({State.COMPLETED, State.STOPPED, State.FAILED, State.LOST})

_ENDINGS = {State.COMPLETED, State.STOPPED, State.FAILED, State.LOST}

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.STOPPED, State.FAILED}),
    # STARTING again: a restart after a failure, if the job allows it.
    State.STARTING: frozenset(
        {State.STARTING, State.RUNNING, State.SAVING, State.STOPPING, *_ENDINGS}
    ),
    State.RUNNING: frozenset({State.STARTING, State.SAVING, State.STOPPING, *_ENDINGS}),
    State.SAVING: frozenset({State.STARTING, State.RUNNING, State.STOPPING, *_ENDINGS}),
    State.STOPPING: frozenset(_ENDINGS),
    # Resuming queues an ended job again; a completed one may be given more steps.
    State.COMPLETED: frozenset({State.QUEUED}),
    State.STOPPED: frozenset({State.QUEUED}),
    State.FAILED: frozenset({State.QUEUED}),
    State.LOST: frozenset({State.QUEUED}),
}
# A cluster may requeue a job, which then starts again.
PUT_BACK = frozenset({(state, State.QUEUED) for state in ACTIVE})


def may_follow(current: State, following: State, *, here: bool = True) -> bool:
    """Return whether a job may go from `current` to `following`.

    Args:
        current: The current state.
        following: The next state.
        here: Whether this machine places and supervises the job.
    """
    put_back = not here and (current, following) in PUT_BACK
    return put_back or following in TRANSITIONS[current]
