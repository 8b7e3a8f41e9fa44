"""The caches screen: sizes, and clearing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from jobs.errors import StateError, UserError
from jobs.service.caches import clear, list_caches
from tui.keys.key_table import bind, key_line
from tui.text.cache_text import amount, cache_rows, freed, listed
from tui.widgets.bars import Links
from tui.widgets.lines import PickList
from tui.widgets.questions import ConfirmScreen
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.queue.store import Store
    from jobs.service.caches import Cache
    from tui.app.app import FsdpTui
    from tui.text.format import Row


# -- panel ----------------------------------------------------------------------------------
# The list of the caches screen.


class CachesPanel(PickList):
    """The caches, one per row, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="caches")
        self.caches: list[Cache] = []

    @property
    def count(self) -> int:
        return len(self.caches)

    @property
    def highlighted(self) -> Cache | None:
        return self.caches[self.index] if self.caches else None

    def update_from(self, caches: Sequence[Cache]) -> None:
        self.caches = list(caches)
        self.index = max(0, min(self.index, len(self.caches) - 1))
        self.fill()
        self.post_message(self.Highlighted())

    def pick(self, row: int) -> None:
        if row < self.count:
            super().pick(row)

    def table(self, width: int) -> Sequence[Row]:
        return cache_rows(self.caches, width)


# -- screen ---------------------------------------------------------------------------------
# The caches screen: sizes, and clearing.


_KEYS: Final = (  # action, displayed keys, description
    ("go(1)", "↑ ↓", "choose"),
    ("clear", "del", "clear"),
    ("clear_all", "a", "clear all"),
    ("look", "r", "refresh"),
    ("dismiss", "esc", "close"),
)
_MARGIN: Final = 2  # columns beside the keys


class CachesScreen(Screen[None]):
    """Lists the caches. Clearing continues after the screen closes, and its result is shown."""

    CSS_PATH = "caches.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = "#caches"
    BINDINGS: ClassVar = [
        bind("caches.close", "escape,q,C,shift+c", "Back to the dashboard", action="dismiss"),
        Binding("j,down", "go(1)", "next cache", id="caches.down"),
        Binding("k,up", "go(-1)", "previous cache", id="caches.up"),
        Binding("home,g", "go(-1000000)", "first cache", id="caches.first"),
        Binding("end,G,shift+g", "go(1000000)", "last cache", id="caches.last"),
        bind("caches.clear", "delete,enter", "Clear the selected cache (asks first)"),
        bind("caches.clear_all", "a", "Clear all caches (asks first)"),
        bind("caches.look", "r", "Measure the caches again", label="refresh"),
        bind("caches.switch_theme", "t", "Switch between the dark and light theme", label="theme"),
    ]

    app: FsdpTui

    @dataclass
    class Looked(Message):
        """The caches have been measured."""

        caches: list[Cache]

    @dataclass
    class Failed(Message):
        """The caches cannot be read."""

        problem: str

    @dataclass
    class Cleared(Message):
        """Clearing has finished or was refused, with the text to show."""

        text: str
        refused: bool = False

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.panel = CachesPanel()
        self.key_line = Links("", id="cache-keys")
        self._clearing = False

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        yield Static("caches", id="cache-title")
        yield Static("measuring …", id="cache-totals", markup=False)
        yield Static("", id="cache-problem", markup=False)
        yield self.panel
        yield Static("", id="cache-about", markup=False)
        yield Static("", id="cache-status", markup=False)
        yield self.key_line

    def on_mount(self) -> None:
        self.action_look()

    def on_resize(self) -> None:
        self.key_line.update(key_line(_KEYS, self.size.width - _MARGIN))

    # -- looking ---------------------------------------------------------------------------

    def action_look(self) -> None:
        """Measure the caches; takes seconds if there are many files."""
        self.query_one("#cache-totals", Static).update("measuring …")
        self.run_worker(
            self._look, group="caches", exclusive=True, exit_on_error=False, thread=True
        )

    def _look(self) -> None:
        try:
            self.post_message(self.Looked(list_caches(self.store)))
        except UserError as error:
            self.post_message(self.Failed(str(error)))
        except Exception as error:  # top level: report any failure instead of waiting forever
            self.post_message(self.Failed(f"{type(error).__name__}: {error}"))

    def on_caches_screen_looked(self, message: Looked) -> None:
        self._complain("")
        self.query_one("#cache-totals", Static).update(
            f"{amount(message.caches)} · jobs rebuild what they need"
        )
        self.panel.update_from(message.caches)

    def on_caches_screen_failed(self, message: Failed) -> None:
        self.query_one("#cache-totals", Static).update("")
        self._complain(message.problem)

    def _complain(self, problem: str) -> None:
        self.query_one("#cache-problem", Static).update(f"! {problem}" if problem else "")
        self.set_class(bool(problem), "-failed")

    @on(CachesPanel.Highlighted)
    def _show_about(self) -> None:
        cache = self.panel.highlighted
        text = f"{cache.title}\n{cache.path}" if cache is not None else ""
        self.query_one("#cache-about", Static).update(text)

    # -- moving ----------------------------------------------------------------------------

    def action_go(self, by: int) -> None:
        self.panel.go(by)

    def action_switch_theme(self) -> None:
        self.app.switch_theme()

    # -- clearing --------------------------------------------------------------------------

    def action_clear(self) -> None:
        if (cache := self.panel.highlighted) is not None:
            self._ask([cache])

    def action_clear_all(self) -> None:
        self._ask(self.panel.caches)

    def _ask(self, caches: Sequence[Cache]) -> None:
        if self._clearing or not caches:
            return
        if not any(cache.files for cache in caches):
            self._tell("nothing to clear")
            return
        filled = [cache for cache in caches if cache.files]
        names = [cache.name for cache in filled]

        def answered(yes: bool | None) -> None:
            if yes:
                self._clearing = True
                self._tell(f"clearing {listed(names)} …")
                self.app.act(partial(self._clear, names))

        what = "\n".join(f"{cache.title}: {cache.path}" for cache in filled)
        detail = (
            f"{amount(filled)} will be deleted; the next job that needs them rebuilds them."
            f"\n\n{what}"
        )
        question = f"Clear the {listed(names)} cache{'s' * (len(names) > 1)}?"
        self.app.push_screen(ConfirmScreen(question, detail, "clear"), answered)

    def _clear(self, names: list[str]) -> str:
        """Clear caches in a thread. The toast shows on any screen, the line on this one."""
        outcome, refused = "clearing failed", True
        try:
            outcome, refused = freed(clear(self.store, names)), False
        except StateError as error:
            outcome = f"nothing cleared: {error}"
            raise
        except UserError as error:  # some of it may be gone
            outcome = str(error)
            raise
        finally:
            self.post_message(self.Cleared(outcome, refused))
        return outcome

    def on_caches_screen_cleared(self, message: Cleared) -> None:
        self._clearing = False
        self._tell(message.text, refused=message.refused)
        self.action_look()

    def _tell(self, text: str, *, refused: bool = False) -> None:
        status = self.query_one("#cache-status", Static)
        status.set_class(refused, "-refused")
        status.update(text)
