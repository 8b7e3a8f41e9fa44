"""The logs tab: the logs of each rank, the launcher and the supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tui.keys.key_table import Key, bindings_of
from tui.log.log_view import LogView
from tui.log.screen import log_sources, log_title
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from tui.look.job_look import Look


class LogsPane(Pane):
    """Shows one log at a time."""

    KEYS: ClassVar = (
        Key(
            "turn_log(1)",
            "right_square_bracket,right",
            "[ ]",
            "log",
            "Next log: ranks, launcher, supervisor",
        ),
        Key(
            "turn_log(-1)",
            "left_square_bracket,left",
            "[",
            "previous log",
            "Previous log",
            line=False,
        ),
        Key("read('')", "enter", "enter", "large", "Open the log full-screen"),
        Key("read('search')", "slash", "/", "search", "Search the log"),
        Key("read('filter')", "ampersand", "&", "filter", "Filter lines"),
        Key("follow", "f", "f", "follow", "Follow the log, or stop following"),
        Key("copy_path", "y", "y", "copy path", "Copy the log's path"),
    )
    BINDINGS: ClassVar = bindings_of("logs", KEYS)

    def __init__(self) -> None:
        super().__init__(id="logs")
        self.index = 0
        self.view = LogView(resting=lambda: not self.is_on_screen)
        self._look: Look | None = None

    def compose(self) -> ComposeResult:
        yield self.view

    def update_from(self, look: Look) -> None:
        self._look = look
        self.show_log(self.index)

    def show_log(self, index: int) -> None:
        """Show one of the logs, by its number."""
        self.index = index
        if self._look is not None:
            sources = log_sources(self._look.job)
            self.index %= len(sources)
            self.view.open(sources[self.index].path, log_title(sources, self.index))

    def action_turn_log(self, by: int) -> None:
        self.show_log(self.index + by)

    def action_read(self, ask: str) -> None:
        """Open the log full screen, where it can be searched and copied."""
        from tui.log.screen import LogScreen

        if self._look is not None:
            self.app.push_screen(LogScreen(self._look.job, self.index, ask=ask), self._came_back)

    def _came_back(self, index: int | None) -> None:
        if index is not None:
            self.show_log(index)

    def action_follow(self) -> None:
        self.view.toggle_follow()

    def action_copy_path(self) -> None:
        if self._look is not None:
            self.copy(str(log_sources(self._look.job)[self.index].path))
