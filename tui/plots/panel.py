"""The curves of some runs, and the keys that explore them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from textual.message import Message

from tui.keys.key_table import Key, bindings_of
from tui.plots import drawing
from tui.plots.line_chart import plot_columns
from tui.plots.measures import COMMON, MEASURES, Reading, Run, nearest
from tui.terminal.clipboard import copy
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.events import Click, Resize
    from textual.timer import Timer

    from jobs.queue.store import Job
    from tui.app.app import FsdpTui

_REDRAW_EVERY: Final = 2.0  # seconds, if only values were added
_RUNS: Final = ("primary", "accent", "success", "error", "secondary", "foreground")

_TITLES: Final = [measure.title for measure in MEASURES[:COMMON]]
NUMBER_KEYS: Final = tuple(
    Key(f"measure({n})", str(n + 1), str(n + 1), title, f"Show {title}", False)
    for n, title in enumerate([*_TITLES, "tab 8", "tab 9"])
)
"""The keys that turn to a tab; those that few jobs have come last."""


class PlotsPanel(Lines, can_focus=True):
    """Redraws when a key asks for it, and every two seconds if there is new data.

    Attributes:
        choices: What is drawn, and how.
        values: The measurements.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"lines--{kind}{number}" for kind in ("run", "faint") for number in range(drawing.MOST_RUNS)
    }
    DEFAULT_CSS = "PlotsPanel { height: 1fr; overflow: hidden; }\n" + "\n".join(
        f"PlotsPanel .lines--run{n} {{ color: ${colour}; text-style: bold; }}\n"
        f"PlotsPanel .lines--faint{n} {{ color: ${colour} 30%; }}"
        for n, colour in enumerate(_RUNS)
    )
    KEYS: ClassVar = (
        Key("read(-1)", "left", "← →", "values", "Move the cursor left"),
        Key("read(1)", "right", "→", "right", "Move the cursor right", False),
        Key(
            "read(-10)",
            "shift+left,H,shift+h",
            "H",
            "far left",
            "Move the cursor ten columns left",
            False,
        ),
        Key(
            "read(10)",
            "shift+right,L,shift+l",
            "L",
            "far right",
            "Move the cursor ten columns right",
            False,
        ),
        Key("read_end(0)", "home,g", "Home", "first", "Move the cursor to the start", False),
        Key("read_end(1)", "end,G,shift+g", "End", "last", "Move the cursor to the end", False),
        *NUMBER_KEYS,
        Key("everything", "a", "a", "all", "Show all plots, small", False),
        Key("turn(1)", "n,down,j", "1… n", "measure", "Show the next plot"),
        Key("turn(-1)", "N,shift+n,up,k", "N", "previous", "Show the previous plot", False),
        Key("zoom(0.5)", "plus,equals_sign", "+ -", "zoom", "Zoom in on the x axis"),
        Key("zoom(2.0)", "minus", "-", "zoom out", "Zoom out on the x axis", False),
        Key("pan(-0.25)", "less_than_sign,comma", "<", "pan left", "Pan left by a quarter", False),
        Key(
            "pan(0.25)",
            "greater_than_sign,full_stop",
            ">",
            "pan right",
            "Pan right by a quarter",
            False,
        ),
        Key("whole", "0", "0", "full", "Show the full x axis", False),
        Key("smoother(1)", "w", "w W", "smooth", "Smooth more: a wider window"),
        Key("smoother(-1)", "W,shift+w", "W", "smooth less", "Smooth less", False),
        Key("flip('raw')", "r", "r", "raw", "Show or hide the raw values", False),
        Key("flip('log')", "l", "l", "log", "Switch between log and linear scale"),
        Key("flip('by_time')", "u", "u", "time", "Switch the unit of the x axis: time or steps"),
        Key("flip('whole')", "o", "o", "outliers", "Include outliers in the scale", False),
        Key("copy", "y", "y", "copy", "Copy the values at the cursor"),
        Key("write", "ctrl+s", "^s", "csv", "Write the plotted values to a CSV file"),
    )
    BINDINGS: ClassVar = bindings_of("plots", KEYS)

    app: FsdpTui

    @dataclass
    class Read(Message):
        """There is new data; only the newest message counts."""

        values: drawing.Values

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, PlotsPanel.Read)

    def __init__(self, jobs: Sequence[Job], resting: Callable[[], bool] = lambda: False) -> None:
        """
        Args:
            jobs: The jobs of the runs, at most `MOST_RUNS`; the first one is the main one.
            resting: Whether nobody can see it; called in the reading thread.
        """
        super().__init__(id="plots")
        self.jobs = list(jobs)
        self.choices = drawing.Choices()
        self.values = drawing.Values()
        self._reading = Reading(resting)
        self._drawn_at = 0.0
        self._later: Timer | None = None

    # -- reading ---------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.compare(self.jobs)
        self.run_worker(
            partial(self._reading.run, self._tell),
            group="plots",
            exclusive=True,
            exit_on_error=False,
            thread=True,
        )

    def on_unmount(self) -> None:
        self._reading.close()

    def _tell(self, runs: list[Run]) -> None:
        """Post the data, in the reading thread, where averaging a long run delays nobody."""
        values, choices = drawing.Values(runs), self.choices
        for measure in choices.shown:
            drawing.curves_of(values, choices, measure)
        self.post_message(self.Read(values))

    def compare(self, jobs: Sequence[Job]) -> None:
        """Show the runs of these jobs."""
        self.jobs = list(jobs)[: drawing.MOST_RUNS]
        self._reading.follow(self.jobs)

    def on_plots_panel_read(self, message: Read) -> None:
        message.stop()
        others = [run.job for run in message.values.runs] != [run.job for run in self.values.runs]
        self.values = message.values
        wait = self._drawn_at + _REDRAW_EVERY - time.monotonic()
        if not self.size:  # not laid out yet: under load, no `Resize` may follow
            self.call_after_refresh(self.draw)
        elif others or wait <= 0:
            self.draw()
        elif self._later is None:
            self._later = self.set_timer(wait, self.draw)

    # -- drawing ---------------------------------------------------------------------------

    def on_resize(self, event: Resize) -> None:
        self.draw()

    def draw(self) -> None:
        """Draw the runs with the current choices."""
        if self._later is not None:
            self._later.stop()
            self._later = None
        width, height = self.size
        if width and height:
            self._drawn_at = time.monotonic()
            numbered = NUMBER_KEYS[0] in self.KEYS
            self.show(
                drawing.screenful(self.values, self.choices, width, height, numbered=numbered)
            )

    def choose(self, choices: drawing.Choices) -> None:
        """Draw with other choices."""
        if choices != self.choices:
            self.choices = choices
            self.draw()

    # -- what is shown ---------------------------------------------------------------------

    def action_measure(self, number: int) -> None:
        tabs = drawing.tabs_of(self.values, self.choices)
        if number < len(tabs):
            place = MEASURES.index(tabs[number])
            self.choose(replace(self.choices, measure=place, everything=False))

    def action_turn(self, by: int) -> None:
        tabs = drawing.tabs_of(self.values, self.choices)
        self.action_measure((tabs.index(MEASURES[self.choices.measure]) + by) % len(tabs))

    def action_everything(self) -> None:
        self.choose(replace(self.choices, everything=not self.choices.everything))

    def action_smoother(self, by: int) -> None:
        self.choose(replace(self.choices, span=(self.choices.span + by) % len(drawing.SPANS)))

    def action_flip(self, what: Literal["raw", "log", "by_time", "whole"]) -> None:
        now = self.choices
        match what:
            case "raw":
                self.choose(replace(now, raw=not now.has_raw(len(self.values.runs))))
            case "log":
                self.choose(replace(now, log=not now.log))
            case "whole":
                self.choose(replace(now, whole=not now.whole))
            case "by_time":  # places on the other axis mean nothing
                self.choose(replace(now, by_time=not now.by_time, extent=None, cursor=None))

    # -- the axis --------------------------------------------------------------------------

    @property
    def _axis(self) -> tuple[float, float] | None:
        return self.values.extent(self.choices.shown, self.choices.by_time)

    def action_zoom(self, factor: float) -> None:
        if (axis := self._axis) is not None:
            self.choose(drawing.zoomed(self.choices, axis, factor))

    def action_pan(self, by: float) -> None:
        if (axis := self._axis) is not None:
            self.choose(drawing.panned(self.choices, axis, by))

    def action_whole(self) -> None:
        self.choose(replace(self.choices, extent=None))

    # -- values ----------------------------------------------------------------------------

    def action_read(self, by: int) -> None:
        """Move the cursor by columns, at least to the next value."""
        axis = self._axis
        if axis is None:
            return
        first, last = self.choices.extent or axis
        column = (last - first) / self._columns()
        places = self._places()
        now = self.choices.cursor
        if now is None:
            self._read_at(last if by < 0 else first)
            return
        here = nearest(places, now)
        there = nearest(places, now + by * column)
        if there == here:
            there = max(0, min(here + (1 if by > 0 else -1), len(places) - 1))
        self._read_at(places[there])

    def action_read_end(self, which: int) -> None:
        if (axis := self._axis) is not None:
            self._read_at(axis[which])

    def stop_reading(self) -> bool:
        """Remove the cursor; return whether there was one."""
        if self.choices.cursor is None:
            return False
        self.choose(replace(self.choices, cursor=None))
        return True

    def on_click(self, event: Click) -> None:
        """Read the values at the mouse."""
        axis, offset = self._axis, event.get_content_offset(self)
        if axis is None or offset is None or self.choices.everything:
            return
        first, last = self.choices.extent or axis
        columns = self._columns()
        share = (offset.x - (self.size.width - columns)) / columns
        if 0 <= share <= 1:
            self._read_at(first + share * (last - first))

    def _read_at(self, x: float) -> None:
        """Put the cursor on the nearest value of the first run, and show that part."""
        places, axis = self._places(), self._axis
        if not places or axis is None:
            return
        x = places[nearest(places, x)]
        changed = replace(self.choices, cursor=x)
        if changed.extent is not None and not changed.extent[0] <= x <= changed.extent[1]:
            first, last = changed.extent
            by = (x - last if x > last else x - first) / (last - first)
            changed = drawing.panned(changed, axis, by)
        self.choose(changed)

    def _columns(self) -> int:
        """Return the number of columns of the axis."""
        drawn = [row for row in self.rows if len(row) > 1 and row[0].text.endswith(("│", "┤"))]
        columns = plot_columns(drawn, self.size.width)
        return columns // 2 if self.choices.everything and columns > 1 else columns

    def _places(self) -> Sequence[float]:
        """Return the places of the first run that has values."""
        series = (
            self.values.of(run, measure, self.choices.by_time).xs
            for run in range(len(self.values.runs))
            for measure in self.choices.shown
        )
        return next((xs for xs in series if xs), [])

    def action_copy(self) -> None:
        self.app.say(copy(self.app, drawing.as_text(self.values, self.choices)))

    def action_write(self) -> None:
        values, choices = self.values, self.choices
        self.app.act(lambda: f"written: {drawing.write_csv(values, choices)}")
