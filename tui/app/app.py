"""The dashboard application: themes, the looking thread, and where its results go."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.markup import escape
from textual.message import Message
from textual.screen import SystemModalScreen
from textual.signal import Signal
from textual.worker import Worker, WorkerState

from jobs.errors import UserError
from jobs.queue.tables import trouble
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.values.spellings import did_you_mean
from tui.app.notify import Bell, Watch
from tui.app.themes import ANSI, DARK, THEMES, other_theme
from tui.dashboard.screen import DashboardScreen
from tui.keys.actions import ACTING, everywhere
from tui.keys.keymap import known_bindings, settle_keymap
from tui.keys.screen_keys import EVERYWHERE, screen_keys
from tui.look.collector import Collector
from tui.settings import Settings
from tui.terminal.ascii_filter import AsciiFilter, HarmlessFilter
from tui.terminal.textual_fixes import fix_textual
from tui.widgets.job_actions import JobActions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from textual.actions import ActionParseResult
    from textual.dom import DOMNode
    from textual.driver import Driver
    from textual.filter import LineFilter
    from textual.screen import Screen
    from textual.timer import Timer

    from jobs.queue.store import Store
    from tui.keys.screen_keys import ScreenKey
    from tui.look.snapshot import JobView, Snapshot
    from tui.terminal.driver import GovernedDriver


# -- palette --------------------------------------------------------------------------------
# The command palette: actions of the screen, those that fit the job first, and jobs by name.


_DISCOVERED: Final = 5  # jobs that are offered before anything is typed
_COLUMN: Final = 10  # columns of keys
_LATER: Final = 0.5  # of the score of what does not fit the job
_OWN: Final = ("app.command_palette",)  # what is open already


@dataclass(frozen=True)
class Entry:
    """One line of the palette.

    Attributes:
        keys: As people read them; "" for what has none.
        title: What it does.
        about: More about that, or "".
        words: By which it is found as well.
        do: What choosing it does.
        place: Where it stands before anything is typed; None: only who looks for it finds it.
        fits: Whether it makes sense now.
    """

    keys: str
    title: str
    about: str
    words: str
    do: Callable[[], object]
    place: int | None
    fits: bool = True

    @property
    def below(self) -> str | None:
        """A second line under the title, as markup."""
        return " " * _COLUMN + escape(self.about) if self.about else None

    def shown(self, title: Content | None = None) -> Content:
        keys = Content.styled(f"{self.keys:<{_COLUMN}}", "$accent")
        return Content.assemble(keys, title if title is not None else Content(self.title))


class ActionsProvider(Provider):
    """Actions of the screen with their keys, each once; on the dashboard, jobs too."""

    @property
    def ours(self) -> FsdpTui:
        return self.app  # type: ignore[return-value]

    async def discover(self) -> Hits:
        offered = [entry for entry in self.entries() if entry.place is not None and entry.fits]
        for entry in sorted(offered, key=lambda entry: entry.place or 0):
            yield DiscoveryHit(entry.shown(), entry.do, entry.title, entry.below)

    async def search(self, query: str) -> Hits:
        """Those that have the words; only without any, those that have the letters."""
        words = query.casefold().split()
        entries = list(self.entries())
        having = [
            entry for entry in entries if all(word in entry.words.casefold() for word in words)
        ]
        matcher = self.matcher(query)
        for entry in having or entries:
            score = 1.0 + matcher.match(entry.title) if having else matcher.match(entry.title)
            if score > 0:
                title = entry.shown(matcher.highlight(entry.title))
                score *= 1.0 if entry.fits else _LATER
                yield Hit(score, title, entry.do, entry.title, entry.below)

    def entries(self) -> Iterator[Entry]:
        """All of them, each title once."""
        seen: set[str] = set()
        for entry in (*self._actions(), *self._jobs(), self._themes()):
            if entry.title not in seen:
                seen.add(entry.title)
                yield entry

    def _actions(self) -> Iterator[Entry]:
        job = self.screen.job_acted_on if isinstance(self.screen, JobActions) else None
        for key in screen_keys(self.screen):
            if key.id in _OWN:
                continue
            do = partial(self.app.run_action, key.action, key.node)
            fits = key.entry is None or key.entry.fits(job)
            place = None if key.moves else self._place(key)
            about = key.help.partition(": ")[2]
            words = f"{key.title} {key.label} {key.help}"
            yield Entry(key.shown, key.title, about, words, do, place, fits)

    def _place(self, key: ScreenKey) -> int:
        if key.section == EVERYWHERE:
            return 4
        if key.entry is not None and key.entry.group == "app":
            return 4
        if key.node is not self.screen:
            return 2
        return 0 if key.entry is not None and key.entry.needs not in ("nothing", "job") else 1

    def _jobs(self) -> Iterator[Entry]:
        screen = self.screen
        views = screen.snapshot.jobs if isinstance(screen, DashboardScreen) else ()
        for number, view in enumerate(views):
            title = f"Go to job {view.job.id} “{view.job.name}”"
            go = partial(self._go, view.job.id)
            place = 3 if number < _DISCOVERED else None
            yield Entry("", title, _state_of(view), title, go, place)

    def _themes(self) -> Entry:
        choose = self.ours.search_themes
        return Entry("", "Choose a theme", "", "Choose a theme", choose, 4)

    def _go(self, job: int) -> None:
        screen = self.screen
        if isinstance(screen, DashboardScreen):
            screen.jobs.awaited = job  # the next look selects it, if it is still there
            screen.app.collector.wake()


def _state_of(view: JobView) -> str:
    reason = f": {view.job.reason}" if view.job.reason else ""
    return f"{view.job.state}{reason}"


# -- ui state -------------------------------------------------------------------------------
# What the dashboard remembers of a person's last choices, across sessions.
#
# Saved when a choice is made, since SIGHUP ends a dashboard without a word. A choice changes
# its own entry alone, so that two dashboards do not undo each other's.


_FILE: Final = "ui.json"
_LOCK: Final = "ui.lock"
_VERSION: Final = 1


class UiState:
    """Choices by name: JSON values. Any thread may use it.

    Args:
        home: The state directory.
        writable: Whether choices are kept; a read-only dashboard keeps none.
    """

    def __init__(self, home: Path, *, writable: bool = True) -> None:
        self._home = home
        self._writable = writable
        self._lock = threading.Lock()  # never held while the disk is waited for
        self._saving = threading.Lock()
        self._values = self._read()
        self._changed: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the last choice; the default unless it is of the default's type."""
        value = self._values.get(name, default)
        return value if default is None or isinstance(value, type(default)) else default

    def put(self, name: str, value: Any) -> bool:
        """Choose; whether that is news, which `save` then has to write."""
        with self._lock:
            if self._values.get(name) == value:
                return False
            self._values[name] = self._changed[name] = value
            return self._writable

    def save(self) -> None:
        """Write what was chosen since the last time, over what others wrote meanwhile.

        Raises:
            OSError: It cannot be written; what was chosen counts for this session.
        """
        with self._saving, open(self._home / _LOCK, "a", encoding="utf-8") as lock:
            # Freed when the file is closed, also when this process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._lock:
                changed = dict(self._changed)
            if changed and not self._is_newer():
                text = json.dumps({"version": _VERSION, "values": self._read() | changed}, indent=1)
                write_atomic(self._home / _FILE, text + "\n")
            with self._lock:  # what was chosen meanwhile is still to be written
                for name, value in changed.items():
                    if self._changed[name] == value:
                        del self._changed[name]

    def _read(self) -> dict[str, Any]:
        """Read the file; empty if it is damaged or of another version."""
        stored = read_json(self._home / _FILE) or {}
        values = stored.get("values") if stored.get("version") == _VERSION else None
        return values if isinstance(values, dict) else {}

    def _is_newer(self) -> bool:
        """Whether a newer fsdp-tui wrote it, whose choices are to stay."""
        version = (read_json(self._home / _FILE) or {}).get("version")
        return isinstance(version, int) and version > _VERSION


# -- app ------------------------------------------------------------------------------------


_THREADS: Final = 32  # at most; one is started when it is needed
_LAID_OUT_IN: Final = 0.1  # seconds after a change of the terminal's size
Severity = Literal["information", "warning", "error"]


class FsdpTui(App[None]):
    """The dashboard. It holds no truth: close it at any moment and nothing happens to jobs."""

    TITLE = "fsdp-tui"
    CSS_PATH: ClassVar = ["app.tcss", "../dashboard/dashboard.tcss"]
    BINDINGS: ClassVar = everywhere()
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar = {lambda: ActionsProvider}

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

    def __init__(
        self,
        store: Store,
        *,
        select: int | None = None,
        settings: Settings | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        """
        Args:
            store: The jobs.
            select: The job to begin with.
            settings: What the person has set for good.
            problems: What was wrong with them; shown when the dashboard is open.
        """
        fix_textual()
        # Without colours Textual draws in shades of grey, unless they are the terminal's own.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.settings = settings or Settings()
        self.problems = list(problems)
        self.store = store
        store.read_only = store.read_only or self.settings.read_only
        self.ui = UiState(store.home, writable=not self.settings.read_only)
        self.own_keys: Mapping[str, str] = {}  # a person's, by the action's id
        self.watch_jobs = Watch()
        self.bells = Bell(self, self.settings.notifications)
        self.snapshots: Signal[Snapshot] = Signal(self, "snapshots")  # for other screens
        period = self.settings.refresh_seconds if self.settings.refresh_is_set else None
        self.collector = Collector(store, select, period)
        self.animation_level = "none"  # one animated page of log costs an SSH link a megabyte
        self._harmless, self._ascii = HarmlessFilter(), AsciiFilter()
        self._sends_all: Timer | None = None
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK.name
        # The environment may name the machine, for images that must not.
        host = os.environ.get("FSDP_TUI_HOST") or socket.gethostname()
        self.dashboard = DashboardScreen(store, host, select)
        key_bar = self.dashboard.key_bar
        key_bar.read_only = self.dashboard.title_bar.read_only = self.settings.read_only
        if self.settings.keymap or not self.settings.vim_keys:
            settled = settle_keymap(self.settings, known_bindings())
            self.set_keymap(settled.keys)
            self.own_keys = key_bar.keymap = settled.keys
            self.problems += settled.problems

    def get_driver_class(self) -> type[Driver]:
        """Return the driver class: in a terminal, the one with a budget of bytes.

        A browser and tests keep their own driver.
        """
        from textual.drivers.linux_driver import LinuxDriver  # needs a terminal's modules

        from tui.terminal.driver import GovernedDriver

        chosen = super().get_driver_class()
        return GovernedDriver if chosen is LinuxDriver else chosen

    @property
    def _governed(self) -> GovernedDriver | None:
        from tui.terminal.driver import GovernedDriver

        return self._driver if isinstance(self._driver, GovernedDriver) else None

    def get_default_screen(self) -> Screen[None]:
        return self.dashboard

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        ours = [self._harmless, *([self._ascii] if self.settings.ascii else [])]
        return [*filters, *ours]

    def on_load(self) -> None:
        # Python's own pool has four threads more than there are cores. Looking, tending and
        # following logs keep some for good, and what a person asks for would wait behind them.
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fsdp-tui")
        asyncio.get_running_loop().set_default_executor(pool)

    def on_mount(self) -> None:
        self._begin_as_set()
        self._run("look")
        if not self.settings.read_only:
            self._run("tend")

    def on_resize(self) -> None:
        """Send every cell again when the layout has been rebuilt.

        A terminal may move or lose cells though it has its old size again, as after a window was
        dragged to and fro, for which Textual would paint nothing.
        """
        if self._governed:
            self._governed.resized()
            if self._sends_all:
                self._sends_all.stop()
            self._sends_all = self.set_timer(_LAID_OUT_IN, lambda: self.screen.refresh())

    def post_display_hook(self) -> None:
        if self._governed:
            self._governed.picture_ended()

    def on_unmount(self) -> None:
        self.collector.close()

    # -- settings and last choices -----------------------------------------------------------

    def _begin_as_set(self) -> None:
        """Theme and keys as they were set, or chosen last."""
        if self.ui.get("of_ranks", False):
            self.dashboard.devices.toggle_ranks()
        self.theme = self._first_theme()
        self.theme_changed_signal.subscribe(self, lambda theme: self.remember("theme", theme.name))
        for problem in self.problems:
            self.say(problem, "warning")

    def _first_theme(self) -> str:
        name = self.settings.theme
        if name in self.available_themes:
            return name
        if name:
            meant = did_you_mean(name, self.available_themes)
            self.problems.append(f'settings: no theme "{name}"{meant}')
        few = self.console.color_system in (None, "standard") and not self.is_headless
        if self.no_color or few:
            return ANSI.name
        last = self.ui.get("theme", DARK.name)
        return last if last in self.available_themes else DARK.name

    def remember(self, name: str, value: object) -> None:
        """Keep a choice for the next session, in a thread: the state directory may be slow."""
        if self.ui.put(name, value):
            self.run_worker(self.ui.save, group="remember", exit_on_error=False, thread=True)

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
        if self._governed:
            self._governed.follow_size()
        for news in self.watch_jobs.news(message.snapshot):
            self.say(news.text, news.severity)
            self.bells.tell(news.text)
        self.snapshots.publish(message.snapshot)
        if self.dashboard.is_mounted and not self.dashboard.is_covered():
            self.dashboard.update_from(message.snapshot)

    def select(self, job: int) -> None:
        """Look closely at this job from now on."""
        self.collector.selected = job
        self.collector.wake()

    # -- acting ----------------------------------------------------------------------------

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Do what a key, a click or the palette asks for; read-only, say why it is not done."""
        if self.settings.read_only:
            target, name, _ = self._parse_action(action, default_namespace or self, namespaces)
            if name in ACTING and type(target).__module__.startswith("tui."):
                self.say(
                    f"read-only: {name.replace('_', ' ')} is disabled; see `fsdp-tui settings`",
                    "warning",
                )
                return True
        return await super().run_action(action, default_namespace, namespaces)

    def act(self, action: Callable[[], str]) -> None:
        """Run an action in a thread, show its message unless it is "", and refresh."""

        def run() -> None:
            try:
                if message := action():
                    self.post_message(self.Said(message))
            except UserError as error:
                self.post_message(self.Said(str(error), "warning"))
            except sqlite3.Error as error:
                self.post_message(self.Said(str(trouble(error)), "error"))
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
        """Report a failed thread, which is a bug, and continue."""
        if event.state is not WorkerState.ERROR:
            return
        self.say(f"{event.worker.group} failed: {event.worker.error!r}", "error")
        if event.worker.group in ("look", "tend") and self.is_running:
            self.set_timer(1.0, partial(self._run, event.worker.group))

    # -- commands --------------------------------------------------------------------------

    def switch_theme(self) -> None:
        self.theme = other_theme(self.theme, dark=self.current_theme.dark)

    def action_redraw(self) -> None:
        """Send every cell again: another program may have written on the terminal."""
        if self._governed:
            self._governed.forget()
        self.screen.refresh()

    async def action_quit(self) -> None:
        """Quit, and ask first where something typed is in no queue yet."""
        from tui.widgets.questions import ConfirmScreen

        if not any(getattr(screen, "holds_changes", False) for screen in self.screen_stack):
            self.exit()
        elif not isinstance(self.screen, ConfirmScreen):
            detail = "The form's changes are kept as a draft: F6 restores it in the next form."
            question = ConfirmScreen("Quit with a form open?", detail, "quit", refuse="stay")
            self.push_screen(question, lambda yes: self.exit() if yes else None)

    def action_help_quit(self) -> None:
        """Say how to leave: ^c is pressed by habit, and would end too much by mistake."""
        here = "q quits" if self.screen is self.dashboard else "esc leaves this screen, ^q quits"
        self.say(f"{here}; jobs keep running")

    def action_show_help(self) -> None:
        """Show the keys of this screen, or close that help."""
        from tui.widgets.help import HelpScreen

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        elif not isinstance(self.screen, SystemModalScreen):
            self.push_screen(HelpScreen(self.screen))
