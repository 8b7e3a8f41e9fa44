"""The full-screen log."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from textual import on
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input, Static

from jobs.errors import UserError
from tui.keys.key_table import bind, key_line
from tui.log.reader import LogReader
from tui.log.search import Filter, Finding, place_of
from tui.terminal.clipboard import copy
from tui.widgets.bars import Links
from tui.widgets.job_actions import OfOneJob

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from textual.app import ComposeResult

    from jobs.queue.store import Job


# -- sources --------------------------------------------------------------------------------
# The logs of a job, and how a title offers them.


_MOST_RANKS = 4  # ranks in the title beside the current one


class Source(NamedTuple):
    """A log file of a job."""

    name: str
    path: Path


def log_sources(job: Job) -> list[Source]:
    """Return each rank's log, then the launcher's and the supervisor's."""
    ranks = [Source(f"rank {rank}", job.run_dir.rank_log(rank)) for rank in range(job.ranks)]
    return [
        *ranks,
        Source("launcher", job.run_dir.launcher_log),
        Source("supervisor", job.run_dir.supervisor_log),
    ]


def log_title(sources: Sequence[Source], shown: int) -> str:
    """Return the title of the log panel, as markup."""
    return f"log · {log_choices(sources, shown)}"


def log_choices(sources: Sequence[Source], shown: int) -> str:
    """Return markup for the current log and clickable others; distant ranks are omitted."""
    parts = []
    ranks = len(sources) - 2
    for index, source in enumerate(sources):
        near = index >= ranks or index < _MOST_RANKS or index == shown
        if not near:
            continue
        short = source.name if index in (0, shown) or index >= ranks else str(index)
        mark = f"[b]{short}[/b]" if index == shown else f"[dim]{short}[/dim]"
        parts.append(f"[@click=screen.show_log({index})]{mark}[/]")
    return " ".join(parts)


# -- screen ---------------------------------------------------------------------------------


# Action, displayed keys, description; the first ones are dropped last. Job actions are
# inserted between the two.
_FIRST: Final = (
    ("dismiss_or_undo", "esc", "close"),
    ("ask('search')", "/", "search"),
    ("ask('filter')", "&", "only"),
    ("app.show_help", "?", "help"),
)
_MORE: Final = (
    ("next_error", "e", "error"),
    ("more_serious", "v", "level"),
    ("ask('place')", ":", "go to"),
    ("wrap", "w", "wrap"),
    ("copy", "y", "copy"),
    ("follow", "f", "follow"),
    ("select", "space", "select"),
    ("next_log", "]", "next log"),
    ("next_match", "n", "next match"),
)
_PROMPTS: Final = {  # type of input: its prompt sign, and what may be typed
    "search": ("/", "text or regular expression · capitals make it case-sensitive"),
    "filter": ("&", "show only matching lines · empty: all lines"),
    "place": (":", "line 1200 · percentage 50% · time 14:05 or 14:05:30"),
}


class LogScreen(OfOneJob[int]):
    """The logs of a job, one at a time. Returns the number of the last one shown."""

    CSS_PATH = "log.tcss"
    AUTO_FOCUS = "#reader"
    BINDINGS: ClassVar = [
        bind(
            "log.close", "escape", "Clear the selection, or close the log", action="dismiss_or_undo"
        ),
        bind("log.leave", "q,l", "Close the log", action="close", label="close"),
        bind(
            "log.down",
            "j,down",
            "Next line; follow the log after the last one",
            action="go(1)",
            label="next line",
        ),
        bind("log.up", "k,up", "Previous line", action="go(-1)", label="previous line"),
        bind("log.page_down", "ctrl+d,pagedown", "Page down", action="go_page(1)"),
        bind("log.page_up", "ctrl+u,pageup", "Page up", action="go_page(-1)"),
        bind("log.first", "g,home", "Go to the first line", label="first line"),
        bind(
            "log.last",
            "G,shift+g,end",
            "Go to the end and follow it",
            label="last line",
            shown="G End",
        ),
        bind("log.left", "h,left", "Scroll long lines left", action="sideways(-1)"),
        bind("log.right", "right", "Scroll long lines right", action="sideways(1)"),
        bind(
            "log.follow_log",
            "f",
            "Follow the log, or stop following",
            action="follow",
            label="follow",
        ),
        bind(
            "log.search",
            "slash",
            "Search for text or a regular expression",
            action="ask('search')",
            shown="/",
        ),
        bind("log.next_match", "n", "Go to the next match"),
        bind("log.previous_match", "N,shift+n", "Go to the previous match", shown="N"),
        bind(
            "log.filter",
            "ampersand",
            "Show only lines that match a text or regular expression",
            action="ask('filter')",
            shown="&",
        ),
        bind(
            "log.level",
            "v",
            "Show all lines, warnings and errors, or errors only",
            action="more_serious",
        ),
        bind("log.next_error", "e", "Go to the next error or traceback"),
        bind("log.previous_error", "E,shift+e", "Go to the previous error or traceback", shown="E"),
        bind(
            "log.go_to",
            "colon",
            "Go to a line, a percentage, or a time",
            action="ask('place')",
            shown=":",
        ),
        bind(
            "log.next_log",
            "right_square_bracket",
            "Next log: ranks, launcher, supervisor",
            shown="]",
        ),
        bind("log.previous_log", "left_square_bracket", "Previous log", shown="["),
        bind("log.wrap", "w", "Wrap or truncate long lines"),
        bind("log.select", "space", "Select lines from here, or clear the selection"),
        bind("log.copy", "y", "Copy the selected lines, or the current line"),
    ]

    def __init__(self, job: Job, shown: int = 0, *, ask: str = "") -> None:
        """
        Args:
            job: The job.
            shown: Which log, as in `log_sources`.
            ask: The input to open at once: `search`, `filter` or `place`.
        """
        super().__init__(job)
        self.sources = log_sources(job)
        self.shown = shown % len(self.sources)
        self.reader = LogReader()
        self.finding = Finding(self.reader, self._tell)
        self.prompt = Input(id="log-input", compact=True)
        self.key_line = Links("", id="log-keys")
        self._first_question = ask
        self._asking = "search"
        self._shown_words: tuple[str, str] | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="log-title")
        yield self.reader
        with Horizontal(id="log-status"):
            yield Static("", id="log-place", markup=False)
            yield Static("", id="log-found", markup=False)
        with Horizontal(id="log-prompt"):
            yield Static("", id="log-sign", markup=False)
            yield self.prompt
        yield self.key_line

    def on_mount(self) -> None:
        self.action_show_log(self.shown)
        if self._first_question:
            self.action_ask(self._first_question)

    def on_resize(self) -> None:
        self.show_keys()

    def show_keys(self) -> None:
        room = self.size.width - 2
        acting = ((key.action, key.shown, key.label) for key in self.job_keys(self.job_now))
        keys = [*_FIRST, *acting, *_MORE]
        while keys and len("  ".join(f"{shown} {does}" for _, shown, does in keys)) > room:
            keys.pop()
        self.key_line.update(key_line(keys))

    # -- which log -------------------------------------------------------------------------

    def action_show_log(self, index: int) -> None:
        self.shown = index % len(self.sources)
        whose = Content.from_markup(
            "log of job $id “$name” · ", id=str(self.job.id), name=self.job.name
        )
        choices = Content.from_markup(log_choices(self.sources, self.shown))
        self.query_one("#log-title", Static).update(Content.assemble(whose, choices))
        self.reader.open(self.sources[self.shown].path, "")
        self.finding.begin()

    def action_next_log(self) -> None:
        self.action_show_log(self.shown + 1)

    def action_previous_log(self) -> None:
        self.action_show_log(self.shown - 1)

    def action_dismiss_or_undo(self) -> None:
        """Undo the last action; close when there is nothing to undo."""
        if self.has_class("-asking"):
            self._end_asking()
        elif self.reader.origin is not None:
            self.reader.select(False)
        else:
            self.action_close()

    def action_close(self) -> None:
        self.dismiss(self.shown)

    # -- asking ----------------------------------------------------------------------------

    def action_ask(self, what: str) -> None:
        """Open the input line for a search, a filter or a place."""
        self._asking = what
        sign, help_text = _PROMPTS[what]
        self.query_one("#log-sign", Static).update(sign)
        before = {"search": self.finding.pattern, "filter": self.finding.filter.pattern}
        self.prompt.placeholder = help_text
        self.prompt.value = before.get(what, "")
        self.prompt.select_all()
        self.add_class("-asking")
        self.prompt.focus()

    @on(Input.Submitted, "#log-input")
    def _answered(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value
        try:
            if self._asking == "search":
                self.finding.search(text)
            elif self._asking == "filter":
                self.finding.show_only(Filter(text, self.finding.filter.least))
            elif text.strip():
                self.finding.go_to(place_of(text))
        except UserError as error:
            self.app.say(str(error), "warning")
            return
        self._end_asking()

    def _end_asking(self) -> None:
        self.remove_class("-asking")
        self.reader.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the screen's keys, except escape, while the input line is open."""
        if self.prompt.has_focus and action not in ("dismiss_or_undo", "command_palette"):
            return False
        return super().check_action(action, parameters)

    # -- moving ----------------------------------------------------------------------------

    def action_go(self, by: int) -> None:
        self.reader.go(by)

    def action_go_page(self, by: int) -> None:
        self.reader.go(by * self.reader.page_size)

    def action_first(self) -> None:
        self.reader.go_to(0)

    def action_last(self) -> None:
        self.reader.action_scroll_end()

    def action_sideways(self, by: int) -> None:
        x = self.reader.scroll_offset.x + by * max(1, self.reader.size.width // 2)
        self.reader.scroll_to(x=x, animate=False, force=True)

    def action_follow(self) -> None:
        self.reader.toggle_follow()

    def action_wrap(self) -> None:
        self.reader.wrap = not self.reader.wrap

    def action_next_match(self) -> None:
        self.finding.next_match(True)

    def action_previous_match(self) -> None:
        self.finding.next_match(False)

    def action_next_error(self) -> None:
        self.finding.next_error(True)

    def action_previous_error(self) -> None:
        self.finding.next_error(False)

    def action_more_serious(self) -> None:
        self.finding.show_only(self.finding.filter.more_serious())

    # -- copying, and the rest -------------------------------------------------------------

    def action_select(self) -> None:
        self.reader.select(self.reader.origin is None)

    def action_copy(self) -> None:
        self._tell(copy(self.app, self.reader.selected_text()))
        if self.reader.origin is not None:
            self.reader.select(False)

    def _tell(self, text: str) -> None:
        self.app.say(text)

    # -- messages --------------------------------------------------------------------------

    @on(LogReader.Answered)
    def _take(self, event: LogReader.Answered) -> None:
        self.finding.take(event.answer)
        self._say_where()

    @on(LogReader.Moved)
    def _say_where(self) -> None:
        words = self._place(), "   ".join(self.finding.words)
        if words != self._shown_words:
            self._shown_words = words
            self.query_one("#log-place", Static).update(words[0])
            self.query_one("#log-found", Static).update(words[1])

    def _place(self) -> str:
        reader, model = self.reader, self.reader.model
        count = len(model) if model is not None else 0
        if model is None or not count:
            return "no output yet"
        if not reader.count:
            return f"none of {count:,} lines" if self.finding.is_looking is None else ""
        of = f"{reader.count:,} of {count:,} lines" if reader.only is not None else f"{count:,}"
        if reader.following:
            return f"following · {of}" + (" lines" if reader.only is None else "")
        if not model.complete:
            return "paused · counting lines"
        line = f"paused · line {reader.line_of(reader.row) + 1:,} of {count:,}"
        if reader.origin is None:
            return line
        low, high = reader.selected
        return f"{line} · {high - low + 1:,} selected, y copies"
