"""The dashboard application: themes, the snapshot thread, and where its results go."""

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
# The command palette: the screen's actions (those that fit the job first), and jobs by name.


_DISCOVERED: Final = 5  # jobs listed before anything is typed
_COLUMN: Final = 10  # columns for the keys
_LATER: Final = 0.5  # score factor for actions that do not fit the job
_OWN: Final = ("app.command_palette",)  # no entry for what is already open


@dataclass(frozen=True)
class Entry:
    """One entry of the palette.

    Attributes:
        keys: The keys as displayed; "" if it has none.
        title: What it does.
        about: A longer description, or "".
        words: Additional search terms.
        do: Called when it is chosen.
        place: Sort position before anything is typed; None lists it only in search results.
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
        """Return a second line below the title, as markup."""
        return " " * _COLUMN + escape(self.about) if self.about else None

    def shown(self, title: Content | None = None) -> Content:
        keys = Content.styled(f"{self.keys:<{_COLUMN}}", "$accent")
        return Content.assemble(keys, title if title is not None else Content(self.title))


class ActionsProvider(Provider):
    """The screen's actions with their keys, each once; on the dashboard, jobs too."""

    @property
    def ours(self) -> FsdpTui:
        return self.app  # type: ignore[return-value]

    async def discover(self) -> Hits:
        offered = [entry for entry in self.entries() if entry.place is not None and entry.fits]
        for entry in sorted(offered, key=lambda entry: entry.place or 0):
            yield DiscoveryHit(entry.shown(), entry.do, entry.title, entry.below)

    async def search(self, query: str) -> Hits:
        """Yield entries that contain the words, or else those that contain the letters."""
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
        """Return all entries, one for each title."""
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
            screen.jobs.awaited = job  # the next snapshot selects it if it still exists
            screen.app.collector.wake()


def _state_of(view: JobView) -> str:
    reason = f": {view.job.reason}" if view.job.reason else ""
    return f"{view.job.state}{reason}"


# -- ui state -------------------------------------------------------------------------------
# The user's last choices in the dashboard, kept across sessions.
#
# Saved on every choice, since SIGHUP ends a dashboard without warning. A choice updates only
# its own entry, so that two dashboards do not undo each other's.


_FILE: Final = "ui.json"
_LOCK: Final = "ui.lock"
_VERSION: Final = 1


class UiState:
    """Choices by name, as JSON values. Thread-safe.

    Args:
        home: The state directory.
        writable: Whether choices are saved; a read-only dashboard saves none.
    """

    def __init__(self, home: Path, *, writable: bool = True) -> None:
        self._home = home
        self._writable = writable
        self._lock = threading.Lock()  # never held during disk access
        self._saving = threading.Lock()
        self._values = self._read()
        self._changed: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the last choice, or the default if the stored value has another type."""
        value = self._values.get(name, default)
        return value if default is None or isinstance(value, type(default)) else default

    def put(self, name: str, value: Any) -> bool:
        """Set a choice; return whether it changed, so that `save` has something to write."""
        with self._lock:
            if self._values.get(name) == value:
                return False
            self._values[name] = self._changed[name] = value
            return self._writable

    def save(self) -> None:
        """Write the choices made since the last save over what other processes wrote meanwhile.

        Raises:
            OSError: The file cannot be written; the choices still apply to this session.
        """
        with self._saving, open(self._home / _LOCK, "a", encoding="utf-8") as lock:
            # Released when the file is closed, also when this process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._lock:
                changed = dict(self._changed)
            if changed and not self._is_newer():
                text = json.dumps({"version": _VERSION, "values": self._read() | changed}, indent=1)
                write_atomic(self._home / _FILE, text + "\n")
            with self._lock:  # keep choices made in the meantime for the next save
                for name, value in changed.items():
                    if self._changed[name] == value:
                        del self._changed[name]

    def _read(self) -> dict[str, Any]:
        """Read the file; return {} if it is damaged or of another version."""
        stored = read_json(self._home / _FILE) or {}
        values = stored.get("values") if stored.get("version") == _VERSION else None
        return values if isinstance(values, dict) else {}

    def _is_newer(self) -> bool:
        """Return whether a newer fsdp-tui wrote the file; its choices must be kept."""
        version = (read_json(self._home / _FILE) or {}).get("version")
        return isinstance(version, int) and version > _VERSION


# -- app ------------------------------------------------------------------------------------


_THREADS: Final = 32  # upper limit; threads are started on demand
_LAID_OUT_IN: Final = 0.1  # seconds after the terminal was resized
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
        """The snapshot thread made a snapshot; only the newest one counts."""

        snapshot: Snapshot

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, FsdpTui.Looked)

    @dataclass
    class Said(Message):
        """An action ended; has the message to show."""

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
            select: The job that is selected at first.
            settings: The user's settings.
            problems: Errors in the settings; shown once the dashboard is open.
        """
        fix_textual()
        # Without colors Textual draws in shades of gray, unless they are the terminal's own.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.settings = settings or Settings()
        self.problems = list(problems)
        self.store = store
        store.read_only = store.read_only or self.settings.read_only
        self.ui = UiState(store.home, writable=not self.settings.read_only)
        self.own_keys: Mapping[str, str] = {}  # the user's keys by action id
        self.watch_jobs = Watch()
        self.bells = Bell(self, self.settings.notifications)
        self.snapshots: Signal[Snapshot] = Signal(self, "snapshots")  # for other screens
        period = self.settings.refresh_seconds if self.settings.refresh_is_set else None
        self.collector = Collector(store, select, period)
        self.animation_level = "none"  # animating one page of log sends a megabyte over SSH
        self._harmless, self._ascii = HarmlessFilter(), AsciiFilter()
        self._sends_all: Timer | None = None
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK.name
        # Screenshots must not show the machine's name, so the environment can override it.
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
        """Return the driver class: in a terminal, the one with a byte budget.

        Browsers and tests keep their own driver.
        """
        # Requires modules that need a terminal.
        from textual.drivers.linux_driver import LinuxDriver

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
        # Python's default pool has only four threads more than there are cores. Snapshots, the
        # queue and log followers occupy some permanently, and user actions would wait behind them.
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fsdp-tui")
        asyncio.get_running_loop().set_default_executor(pool)

    def on_mount(self) -> None:
        self._begin_as_set()
        self._run("look")
        if not self.settings.read_only:
            self._run("tend")

    def on_resize(self) -> None:
        """Send every cell again when the layout has been rebuilt.

        A terminal may move or lose cells although it ends up at its old size, for example after a
        window was dragged back and forth. Textual would paint nothing then.
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
        """Apply the theme and keys from the settings, or the ones chosen last."""
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
        """Save a choice for the next session, in a thread: the state directory may be slow."""
        if self.ui.put(name, value):
            self.run_worker(self.ui.save, group="remember", exit_on_error=False, thread=True)

    # -- looking ---------------------------------------------------------------------------

    def _run(self, group: str) -> None:
        work = self._look if group == "look" else self.collector.tend
        self.run_worker(work, group=group, exclusive=True, exit_on_error=False, thread=True)

    def _look(self) -> None:
        """Take snapshots in a thread until the dashboard closes."""

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
        """Collect details of this job from now on."""
        self.collector.selected = job
        self.collector.wake()

    # -- acting ----------------------------------------------------------------------------

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Run the action of a key, click or palette entry; if read-only, say why it is refused."""
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
            except Exception as error:  # top level: report every failure to the user
                self.post_message(self.Said(f"{type(error).__name__}: {error}", "error"))
            self.collector.wake()

        self.run_worker(run, group="act", exit_on_error=False, thread=True)

    def on_fsdp_tui_said(self, message: Said) -> None:
        self.say(message.text, message.severity)

    def say(self, text: str, severity: Severity = "information") -> None:
        """Show a transient message."""
        self.notify(text, severity=severity, markup=False)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Report a crashed thread, which is a bug, and continue."""
        if event.state is not WorkerState.ERROR:
            return
        self.say(f"{event.worker.group} failed: {event.worker.error!r}", "error")
        if event.worker.group in ("look", "tend") and self.is_running:
            self.set_timer(1.0, partial(self._run, event.worker.group))

    # -- commands --------------------------------------------------------------------------

    def switch_theme(self) -> None:
        self.theme = other_theme(self.theme, dark=self.current_theme.dark)

    def action_redraw(self) -> None:
        """Send every cell again: another program may have written to the terminal."""
        if self._governed:
            self._governed.forget()
        self.screen.refresh()

    async def action_quit(self) -> None:
        """Quit; ask first if a form holds unsubmitted input."""
        from tui.widgets.questions import ConfirmScreen

        if not any(getattr(screen, "holds_changes", False) for screen in self.screen_stack):
            self.exit()
        elif not isinstance(self.screen, ConfirmScreen):
            detail = "The form's changes are kept as a draft: F6 restores it in the next form."
            question = ConfirmScreen("Quit with a form open?", detail, "quit", refuse="stay")
            self.push_screen(question, lambda yes: self.exit() if yes else None)

    def action_help_quit(self) -> None:
        """Say how to quit: ^c is often pressed by habit, and quitting on it would lose too much."""
        here = "q quits" if self.screen is self.dashboard else "esc leaves this screen, ^q quits"
        self.say(f"{here}; jobs keep running")

    def action_show_help(self) -> None:
        """Show the keys of this screen, or close that help."""
        from tui.widgets.help import HelpScreen

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        elif not isinstance(self.screen, SystemModalScreen):
            self.push_screen(HelpScreen(self.screen))
