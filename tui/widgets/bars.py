"""Texts that are painted only when they change; the lines at the edges of the screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from textual.content import Content
from textual.widgets import Static

from jobs.queue.states import ACTIVE, State
from tui.keys.actions import FOOTER_GAP, footer_actions
from tui.text.format import eta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.queue.store import Job
    from tui.look.snapshot import JobView, Snapshot

# Columns of the title's right side and its gap, excluding when all jobs end.
_LEAST_RIGHT: Final = len("  ● 99 running  ◌ 99 queued  00:00")


class Links(Static):
    """Text with clickable parts, in color."""

    def on_mount(self) -> None:
        self.auto_links = False  # Textual would give all links one color


def reveal(place: Static, text: str) -> None:
    """Show a line that takes no room while it is empty."""
    show(place, text)
    place.set_class(bool(text), "-shown")


def show(place: Static, text: Content | str) -> None:
    """Update the text if it changed: Textual repaints at every update."""
    if place.content != text:
        place.update(text)


class _Line(Static):
    """One line that is repainted only when its text changes."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__("", id=id)
        self._text: Content | None = None

    def say(self, text: Content) -> None:
        if self._text is None or text.markup != self._text.markup:
            self._text = text
            self.update(text)


class TitleBar(_Line):
    """Application, machine, and the number of running and queued jobs."""

    def __init__(self, host: str) -> None:
        super().__init__("titlebar")
        self.host = host
        self.read_only = False
        self._shown: tuple[int, int, int, bool, str, str, int] | None = None
        self._jobs: Sequence[JobView] | None = None
        self._counts = (0, 0)

    def update_from(self, snapshot: Snapshot) -> None:
        clock = time.strftime("%H:%M", time.localtime(snapshot.t))
        if snapshot.jobs is not self._jobs:  # there may be thousands
            self._jobs = snapshot.jobs
            self._counts = snapshot.count(*ACTIVE), snapshot.count(State.QUEUED)
        running, queued = self._counts
        shown = (
            running,
            queued,
            len(snapshot.gpus),
            snapshot.paused,
            done_words(snapshot),
            clock,
            self.size.width,
        )
        if shown != self._shown:
            self._shown = shown
            self._draw(*shown)

    def _draw(
        self,
        running: int,
        queued: int,
        gpus: int,
        paused: bool,
        done: str,
        clock: str,
        width: int,
    ) -> None:
        devices = f"{gpus} GPU{'s' * (gpus != 1)}"
        left = Content.from_markup(
            "[b $primary]fsdp-tui[/] [$foreground 60%]on[/] [b]$host[/]"
            " [$foreground 60%]· $gpus[/]" + " [b $warning]· read-only[/]" * self.read_only,
            host=self.host,
            gpus=devices if gpus else "CPU only",
        )
        room = width - len(left.plain) - _LEAST_RIGHT - len("queue paused · ") * paused
        right = Content.from_markup(
            f"[{'$success' if running else '$foreground 60%'}]● $running running[/]"
            "  [$foreground 60%]◌ $queued queued[/]"
            + "[b $warning] · queue paused[/]" * paused
            + "  [$foreground 60%]$done$clock[/]",
            done=f"{done}  " if done and len(done) + 2 <= room else "",
            running=str(running),
            queued=str(queued),
            clock=clock,
        )
        gap = max(2, width - len(left.plain) - len(right.plain))
        self.say(Content.assemble(left, " " * gap, right))


def done_words(snapshot: Snapshot) -> str:
    """Return when all jobs end: `all done in 3:12`; "" for a single job, or if unknown."""
    outlook = snapshot.outlook
    if outlook.all_done is None or snapshot.count(State.QUEUED, *ACTIVE) < 2:
        return ""
    return f"all done in {eta(outlook.all_done, outlook.at_least)}"


class KeyBar(_Line):
    """The footer's keys, for the keyboard and the mouse; those that do not fit the job are dim."""

    def __init__(self) -> None:
        super().__init__("keybar")
        self.auto_links = False  # Textual would give all links one color
        self.read_only = False
        self.keymap: Mapping[str, str] = {}  # the user's keys by action id
        self._shown: list[tuple[str, bool]] = []
        self._job: Job | None = None

    def on_resize(self) -> None:
        self.update_from(self._job)

    def update_from(self, job: Job | None) -> None:
        self._job = job
        actions = footer_actions(self.content_size.width, self.keymap, job)
        fitting = [action.fits(job) and not (self.read_only and action.acts) for action in actions]
        shown = [(action.name, fits) for action, fits in zip(actions, fitting, strict=True)]
        if shown == self._shown:
            return
        self._shown = shown
        parts = [
            f"[@click=screen.{action.name}]"
            + (
                f"[b $accent]{action.shown}[/] {action.label}"
                if fits
                else f"[$foreground 35%]{action.shown} {action.label}[/]"
            )
            + "[/]"
            for action, fits in zip(actions, fitting, strict=True)
        ]
        self.say(Content.from_markup((" " * FOOTER_GAP).join(parts)))


class ProblemBar(_Line):
    """What the dashboard failed to read or do; cleared when it works again."""

    def __init__(self) -> None:
        super().__init__("problem")

    def update_from(self, problem: str) -> None:
        self.set_class(bool(problem), "-shown")
        self.say(Content(f"! {problem}" if problem else ""))
