"""What a person does with the queue: hold, release, move, change priorities, pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs import service
from tui.widgets.job_actions import JobActions

if TYPE_CHECKING:
    from jobs.queue.job import Place
    from tui.look.snapshot import Snapshot


class QueueControl(JobActions[None]):
    """A screen that shows the queue."""

    snapshot: Snapshot

    def action_hold_job(self) -> None:
        def hold(job: int) -> str:
            service.hold(self.app.store, job)
            return f"job {job} is held until it is released"

        self.act(hold)

    def action_release_job(self) -> None:
        self.act(lambda job: f"job {job} is {service.hold(self.app.store, job, False).state}")

    def action_move_up(self) -> None:
        self._move("up")

    def action_move_down(self) -> None:
        self._move("down")

    def _move(self, to: Place) -> None:
        def move(job: int) -> str:
            service.move(self.app.store, job, to=to)
            return ""  # its place in the queue is on the screen

        self.act(move)

    def action_raise_priority(self) -> None:
        self._change_priority(1)

    def action_lower_priority(self) -> None:
        self._change_priority(-1)

    def _change_priority(self, by: int) -> None:
        def change(job: int) -> str:
            priority = self.app.store.get(job).priority + by
            service.move(self.app.store, job, priority=priority)
            return f"job {job} has priority {priority}"

        self.act(change)

    def action_pause_queue(self) -> None:
        pause = not self.snapshot.paused  # as it is shown

        def change() -> str:
            service.pause(self.app.store, pause)
            return "the queue is paused; running jobs continue" if pause else "the queue is running"

        self.app.act(change)
