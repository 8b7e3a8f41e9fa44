"""The dashboard application: themes, the looking thread, and where its results go."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from textual.app import App, SystemCommand
from textual.message import Message
from textual.worker import Worker, WorkerState

from jobs.errors import UserError
from tui.actions import ACTIONS
from tui.collector import Collector
from tui.dashboard.screen import DashboardScreen
from tui.themes import DARK, LIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from textual.screen import Screen

    from jobs.store import Store
    from tui.snapshot import Snapshot

Severity = Literal["information", "warning", "error"]


class FsdpTui(App[None]):
    """The dashboard. It holds no truth: close it at any moment and nothing happens to jobs."""

    TITLE = "fsdp-tui"
    CSS_PATH: ClassVar = ["app.tcss", "dashboard/dashboard.tcss"]
    BINDINGS: ClassVar = []
    ENABLE_COMMAND_PALETTE = True

    @dataclass
    class Looked(Message):
        """The looking thread made a snapshot; only the newest one counts."""

        snapshot: Snapshot

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, FsdpTui.Looked)

    @dataclass
    class Said(Message):
        """An action ended: what to tell."""

        text: str
        severity: Severity = "information"

    def __init__(self, store: Store, *, select: int | None = None) -> None:
        super().__init__()
        self.store = store
        self.collector = Collector(store, select)
        self.animation_level = "none"  # one animated page of log costs an SSH link a megabyte
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name
        # The environment may name the machine, for pictures that must not.
        host = os.environ.get("FSDP_TUI_HOST") or socket.gethostname()
        self.dashboard = DashboardScreen(store, host, select)

    def get_default_screen(self) -> Screen[None]:
        return self.dashboard

    def on_mount(self) -> None:
        self._run("look")
        self._run("tend")

    def on_unmount(self) -> None:
        self.collector.close()

    # -- looking ---------------------------------------------------------------------------

    def _run(self, group: str) -> None:
        work = self._look if group == "look" else self.collector.tend
        self.run_worker(work, group=group, exclusive=True, exit_on_error=False, thread=True)

    def _look(self) -> None:
        """In a thread, until the dashboard closes."""

        def publish(snapshot: Snapshot) -> None:
            self.post_message(self.Looked(snapshot))

        self.collector.run(publish)

    def on_fsdp_tui_looked(self, message: Looked) -> None:
        if self.dashboard.is_mounted and not self.dashboard.is_covered():
            self.dashboard.update_from(message.snapshot)

    def select(self, job: int) -> None:
        """Look closely at this job from now on."""
        self.collector.selected = job
        self.collector.wake()

    # -- acting ----------------------------------------------------------------------------

    def act(self, action: Callable[[], str]) -> None:
        """Do something in a thread, tell what came of it unless that is "", and look again."""

        def run() -> None:
            try:
                if told := action():
                    self.post_message(self.Said(told))
            except UserError as error:
                self.post_message(self.Said(str(error), "warning"))
            except Exception as error:  # the edge: nothing a person asked for ends in silence
                self.post_message(self.Said(f"{type(error).__name__}: {error}", "error"))
            self.collector.wake()

        self.run_worker(run, group="act", exit_on_error=False, thread=True)

    def on_fsdp_tui_said(self, message: Said) -> None:
        self.say(message.text, message.severity)

    def say(self, text: str, severity: Severity = "information") -> None:
        """Tell something in passing."""
        self.notify(text, severity=severity, markup=False)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A thread that failed is a mistake of ours; it is told, and looking goes on."""
        if event.state is not WorkerState.ERROR:
            return
        self.say(f"{event.worker.group} failed: {event.worker.error!r}", "error")
        if event.worker.group in ("look", "tend") and self.is_running:
            self.set_timer(1.0, partial(self._run, event.worker.group))

    # -- commands --------------------------------------------------------------------------

    def switch_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        if isinstance(screen, DashboardScreen):
            for action in ACTIONS:
                method = getattr(screen, f"action_{action.name}", None)
                if method is not None and action.name != "quit_app":
                    title = f"{action.label.capitalize()}  ({action.shown})"
                    yield SystemCommand(title, action.help, method)
        yield SystemCommand("Quit  (q)", "Leave the dashboard; jobs go on without it", self.exit)
        yield SystemCommand("Theme", "Choose one of all themes", self.search_themes)
