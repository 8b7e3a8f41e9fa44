"""What a supervisor announces: the end of its job, and that it makes no progress."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.notify.config import read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.notify.config import Event
    from jobs.queue.job import Job
    from jobs.run.diagnosis.hang import Stillness

_WORTH_ASKING: Final = 30.0  # seconds without progress, the least that may be configured


@dataclass
class Announcer:
    """Announces what happens to a job; whatever goes wrong with it is a line in the log.

    Attributes:
        job: The job.
        say: Takes a line for the supervisor's log.
        stalled: Whether the present stall was announced.
    """

    job: Job
    say: Callable[[str], None]
    stalled: bool = False

    def look(self, ranks: Sequence[Stillness]) -> None:
        """Announce, once, that no rank has made progress for as long as the person allows."""
        still = min((rank.still for rank in ranks), default=0.0)
        if still < _WORTH_ASKING:
            self.stalled = False
        elif not self.stalled and (after := self._stalled_after()) and still >= after:
            self.stalled = True
            self.announce("stalled", f"no rank made progress for {still:.0f} s")

    def announce(self, event: Event, reason: str) -> None:
        """Start a process that delivers it, if the person wants to know."""
        try:
            config = read_config()
            if config is None or event not in config.on:
                return
            with open(self.job.run_dir.logs / "notify.log", "ab") as log:
                subprocess.Popen(
                    [sys.executable, "-m", "jobs.notify"],
                    env=os.environ | {"PYTHONSAFEPATH": "1"} | facts_of(self.job, event, reason),
                    cwd=self.job.run_dir.root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except (UserError, OSError) as error:
            self.say(f"cannot notify: {error}")

    def _stalled_after(self) -> float:
        try:
            config = read_config()
        except UserError:  # said when there is something to announce
            return 0.0
        return config.stalled_after if config and "stalled" in config.on else 0.0


def facts_of(job: Job, event: Event, reason: str) -> dict[str, str]:
    """Collect what a command gets in its environment."""
    return {
        "FSDP_TUI_EVENT": event,
        "FSDP_TUI_JOB_ID": str(job.id),
        "FSDP_TUI_JOB_NAME": job.name,
        "FSDP_TUI_REASON": reason,
        "FSDP_TUI_RUN_DIR": str(job.run_dir.root),
        "FSDP_TUI_TITLE": f"Job {job.id} {event}: {job.name}",
        "FSDP_TUI_MESSAGE": reason,
    }
