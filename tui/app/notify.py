"""Notify of jobs that ended or hang: which events count, and how a terminal shows them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.queue.states import State
from jobs.run.hang import by_clock, find_hang
from tui.widgets.bars import done_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import App

    from jobs.queue.store import Job
    from tui.look.snapshot import JobView, Snapshot
    from tui.settings import Notifications

Severity = Literal["information", "warning", "error"]

# How long ranks may make no progress before we notify: in seconds, in steps, before the first step.
_STILL_SECONDS: Final = 120.0
_STILL_STEPS: Final = 10
_STILL_AT_FIRST: Final = 600.0
_TOGETHER: Final = 1.0  # seconds
_LONGEST: Final = 160  # characters that a desktop notification shows
_SEVERITIES: Final[dict[State, Severity]] = {
    State.COMPLETED: "information",
    State.STOPPED: "information",
    State.FAILED: "error",
    State.LOST: "error",
}


@dataclass(frozen=True)
class News:
    """A notification for a user who is looking elsewhere."""

    text: str
    severity: Severity


class Watch:
    """Compares snapshots and reports each event once; ignores what was true before it started.

    Args:
        since: Unix seconds; jobs that ended earlier are ignored.
    """

    def __init__(self, since: float | None = None) -> None:
        self._since = time.time() if since is None else since
        self._had_ended: dict[tuple[int, int], bool] = {}  # by job and attempt
        self._still: set[tuple[int, int]] = set()
        self._began = False
        self._jobs: Sequence[JobView] | None = None  # of the previous snapshot
        self._live: Sequence[JobView] = ()  # those that had not ended

    def news(self, snapshot: Snapshot) -> list[News]:
        """List the events since the last snapshot."""
        if not snapshot.jobs and snapshot.problem:
            return []  # the jobs could not be read, which does not mean that there are none
        news: list[News] = []
        views = self._live if snapshot.jobs is self._jobs else snapshot.jobs
        self._jobs, self._live = snapshot.jobs, [v for v in views if not v.job.state.ended]
        for view in views:
            job = view.job
            key = (job.id, job.attempt)
            ended_before = self._had_ended.get(key)
            self._had_ended[key] = job.state.ended
            if job.state.ended and not ended_before and self._is_news(job, ended_before):
                rest = f" · {words}" if (words := done_words(snapshot)) else ""
                news.append(News(_ended(job) + rest, _SEVERITIES[job.state]))
            news += self._standing(view, key, snapshot.t)
        self._began = True
        return news

    def _is_news(self, job: Job, ended_before: bool | None) -> bool:
        if ended_before is None:  # first seen now: it was queued and ended between two snapshots
            return self._began and (job.ended or 0) >= self._since
        return True

    def _standing(self, view: JobView, key: tuple[int, int], now: float) -> list[News]:
        """List the stalled jobs; a job is listed again only after it made progress."""
        if view.job.state is not State.RUNNING:
            self._still.discard(key)
            return []
        pace = view.progress.seconds_per_step
        usual = _STILL_AT_FIRST if pace is None else max(_STILL_SECONDS, pace * _STILL_STEPS)
        training = all(rank.phase == "train" for rank in view.ranks)
        hang = find_hang(by_clock(view.ranks, now), usual)
        if hang is None or not training:
            self._still.discard(key)
            return []
        if key in self._still:
            return []
        self._still.add(key)
        if not self._began:
            return []
        return [News(f"job {view.job.id} “{view.job.name}”: {hang.reason}", "warning")]


def _ended(job: Job) -> str:
    reason = f": {job.reason}" if job.reason and job.state is not State.COMPLETED else ""
    return f"job {job.id} “{job.name}” {_WORDS[job.state]}{reason}"


_WORDS: Final = {
    State.COMPLETED: "completed",
    State.STOPPED: "stopped",
    State.FAILED: "failed",
    State.LOST: "is lost",
}


class Bell:
    """Collects the notifications of one second, so that the terminal rings once.

    Args:
        app: The application whose terminal rings.
        how: The notification setting.
    """

    def __init__(self, app: App[Any], how: Notifications) -> None:
        self._app = app
        self._how = how
        self._waiting: list[str] = []

    def tell(self, text: str) -> None:
        """Schedule the bell unless it is already scheduled."""
        self._waiting.append(text)
        if len(self._waiting) == 1:
            self._app.set_timer(_TOGETHER, self._ring)

    def _ring(self) -> None:
        texts, self._waiting = self._waiting, []
        several = f"{len(texts)} messages: " if len(texts) > 1 else ""
        ring(self._app, several + " · ".join(texts), self._how)


def ring(app: App[Any], text: str, how: Notifications) -> None:
    """Ring the terminal, which may be in the background."""
    if how == "off" or app.is_headless:
        return
    if how == "osc9" and not app.is_web and app._driver is not None:  # as App.bell writes it
        app._driver.write(desktop_message(text, os.environ))
        if "TMUX" not in os.environ:
            return  # tmux drops it unless allow-passthrough is on, and marks the window on a bell
    app.bell()


def desktop_message(text: str, environ: Mapping[str, str]) -> str:
    """Return an OSC 9 notification: kitty, WezTerm, iTerm2, foot, Windows Terminal. Pure.

    It is wrapped for tmux and GNU screen, so that they pass it on.
    """
    clean = "".join(char if char.isprintable() else " " for char in text)[:_LONGEST]
    # ConEmu and Windows Terminal interpret a leading number and semicolon as a command.
    message = f"\x1b]9;fsdp-tui: {clean}\x07"
    if environ.get("TMUX"):
        return "\x1bPtmux;" + message.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    if environ.get("STY"):
        return f"\x1bP{message}\x1b\\"
    return message
