"""The states of a job and which may follow which. The only such table."""

from __future__ import annotations

from enum import StrEnum

PAUSED = "the queue is paused"
"""Why a job waits while no queued job is started."""


class State(StrEnum):
    """Where a job is in its life."""

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
        """Processes exist, or are about to."""
        return self in ACTIVE

    @property
    def ended(self) -> bool:
        """No process of the job exists, and none will unless someone resumes it."""
        return self in ENDED


ACTIVE = frozenset({State.STARTING, State.RUNNING, State.SAVING, State.STOPPING})
ENDED = frozenset({State.COMPLETED, State.STOPPED, State.FAILED, State.LOST})

_ENDINGS = {State.COMPLETED, State.STOPPED, State.FAILED, State.LOST}

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.STOPPED, State.FAILED}),
    # To starting again: a restart after a failure, when the job asks for it.
    State.STARTING: frozenset(
        {State.STARTING, State.RUNNING, State.SAVING, State.STOPPING, *_ENDINGS}
    ),
    State.RUNNING: frozenset({State.STARTING, State.SAVING, State.STOPPING, *_ENDINGS}),
    State.SAVING: frozenset({State.STARTING, State.RUNNING, State.STOPPING, *_ENDINGS}),
    State.STOPPING: frozenset(_ENDINGS),
    # Resuming puts an ended job back into the queue; a completed one may be given more steps.
    State.COMPLETED: frozenset({State.QUEUED}),
    State.STOPPED: frozenset({State.QUEUED}),
    State.FAILED: frozenset({State.QUEUED}),
    State.LOST: frozenset({State.QUEUED}),
}
# A cluster may put a job back into its own queue, from which it starts again.
PUT_BACK = frozenset({(state, State.QUEUED) for state in ACTIVE})


def may_follow(current: State, following: State, *, here: bool = True) -> bool:
    """Whether a job may go from `current` to `following`.

    Args:
        current: The state.
        following: The next.
        here: Whether this machine places and supervises the job.
    """
    put_back = not here and (current, following) in PUT_BACK
    return put_back or following in TRANSITIONS[current]
