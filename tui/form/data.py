"""The screen that shows what a job would train on, before it starts."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.cells import cell_len, set_cell_size
from textual import on
from textual.binding import Binding
from textual.containers import Container
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import get_current_worker

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.preflight.data import DataLook, look_at_data
from jobs.run.rundir import read_json
from tui.keys.key_table import bind, key_line
from tui.terminal.thumbnails import draw, find_grid, pictures_of
from tui.text.data_text import (
    bucket_name,
    changes,
    dataset_name,
    draws_text,
    each,
    groups,
    headlines,
    some,
)
from tui.text.format import Row, Span, bar, percent, right
from tui.widgets.bars import Links
from tui.widgets.lines import Lines, PickList
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image
    from textual.app import ComposeResult
    from textual.events import DescendantFocus, Resize
    from textual.timer import Timer

    from jobs.spec.job_spec import JobSpec
    from tui.app.app import FsdpTui


# -- rows -----------------------------------------------------------------------------------
# The rows of the data screen: buckets, findings, and progress. Pure.


_NUMBERS: Final = (("per epoch", 11), ("cropped", 9), ("max crop", 9))  # name, columns
_WIDEST_BAR: Final = 48
_LEAST_BAR: Final = 6
_MUCH: Final = 0.25  # cropped share of an image from which it is marked
_LEAST_EXAMPLE: Final = 16  # columns
_TITLES: Final = 9  # columns of `converted`, the longest group title


def bucket_rows(buckets: Sequence[Mapping[str, Any]], width: int) -> list[Row]:
    """Return a heading, and a row for each bucket.

    Columns that do not fit are dropped, the rightmost first.
    """
    names = max(6, *(len(bucket_name(bucket)) for bucket in buckets))
    most = max(bucket["samples"] for bucket in buckets)
    counts = max(7, len(str(most)))
    room = width - names - 2 - counts - 2
    shown = len(_NUMBERS)
    while shown and room - sum(columns for _, columns in _NUMBERS[:shown]) < _LEAST_BAR:
        shown -= 1
    space = room - sum(columns for _, columns in _NUMBERS[:shown])
    length = max(0, min(_WIDEST_BAR, space))
    heading = f"{'bucket':<{names}}  {'samples':>{counts}}  {'':{length}}"
    heading += "".join(f"{name:>{columns}}" for name, columns in _NUMBERS[:shown])
    return [
        (Span(heading, "dim"),),
        *(_bucket_row(b, names, counts, most, length, shown) for b in buckets),
    ]


def _bucket_row(
    bucket: Mapping[str, Any], names: int, counts: int, most: int, length: int, shown: int
) -> Row:
    samples = bucket["samples"]
    numbers = (
        Span(draws_text(bucket["draws"])),
        Span(percent(bucket["cut_mean"] * 100), _mark(bucket["cut_mean"])),
        Span(percent(bucket["cut_most"] * 100), _mark(bucket["cut_most"])),
    )
    return (
        Span(bucket_name(bucket).ljust(names) + "  ", "strong"),
        Span(right(str(samples), counts) + "  "),
        *bar(samples / most, length),
        *(
            Span(right(span.text, columns), span.role)
            for span, (_, columns) in zip(numbers[:shown], _NUMBERS, strict=False)
        ),
    )


def _mark(share: float) -> str:
    return "warn" if share > _MUCH else ""


def finding_rows(report: Mapping[str, Any], width: int) -> list[Row]:
    """Return rows of skipped, converted or unexpected files, and of datasets if several."""
    rows: list[Row] = []
    for group in groups(report):
        own: list[Row] = []
        for finding in group.findings:
            own += _finding(finding, group.role, width - _TITLES)
        rows += _titled(group.title, own)
    if len(report["datasets"]) > 1:
        rows += _titled("datasets", [_dataset(d, width - _TITLES) for d in report["datasets"]])
    return rows


def _titled(title: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their title before the first."""
    titles = [title, *[""] * (len(rows) - 1)]
    return [
        (Span(own.ljust(_TITLES), "title"), *row) for own, row in zip(titles, rows, strict=True)
    ]


def _dataset(dataset: Mapping[str, Any], width: int) -> Row:
    facts = (
        f"{dataset['samples']:>6}  {draws_text(dataset['draws'])} per epoch, {each(dataset)} each"
    )
    facts += f", {dataset['skipped']} skipped  " if dataset["skipped"] else "  "
    return (Span(facts), Span(_head_cut(dataset_name(dataset), width - len(facts)), "dim"))


def _finding(finding: Mapping[str, Any], role: str, width: int) -> list[Row]:
    """Return a finding on one line if an example fits beside the text, else on more."""
    count = f"{finding['count']:>6}  "
    space = " " * len(count)
    first, *rest = textwrap.wrap(finding["text"], max(20, width - len(count))) or [""]
    rows: list[Row] = [(Span(count, role), Span(first))]
    rows += [(Span(space + line),) for line in rest]
    examples, room = finding["examples"], width - len(count) - len(first) - 2
    if not examples:
        return rows
    if not rest and room >= min(_LEAST_EXAMPLE, cell_len(examples[0])):
        return [(*rows[0], Span("  " + _listed(examples, finding["count"], room), "dim"))]
    listed = _listed(examples, finding["count"], width - len(count))
    return [*rows, (Span(space + listed, "dim"),)]


def _listed(examples: Sequence[str], count: int, room: int) -> str:
    """Return as many examples as fit, at least the first, with `…` if there are more."""
    for number in range(len(examples), 0, -1):
        text = ", ".join(examples[:number]) + (", …" if number < count else "")
        if cell_len(text) <= room:
            return text
    return _tail_cut(examples[0], room)


def _tail_cut(text: str, room: int) -> str:
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(0, room - 1)).rstrip() + "…"


def _head_cut(text: str, room: int) -> str:
    """Cut the beginning of a path, since its end identifies it."""
    while text and cell_len(text) > max(0, room):
        text = "…" + text[2:] if len(text) > 1 else ""
    return text


def looking_row(done: int, total: int, width: int) -> Row:
    """Return the progress of reading the data."""
    if not total:
        return (Span("reading the data …", "accent"),)
    if done >= total:
        return (Span(f"read {total} files …", "accent"),)
    words, count = "reading the data ", f" {done}/{total}  {done / total:.0%}"
    return (
        Span(words, "accent"),
        *bar(done / total, max(0, min(60, width - len(words) - len(count)))),
        Span(count, "strong"),
    )


# -- buckets panel --------------------------------------------------------------------------
# The buckets of the data screen.


class BucketsPanel(PickList):
    """The buckets, one per row, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="buckets")
        self._report: Mapping[str, Any] | None = None

    @property
    def count(self) -> int:
        """Return the number of buckets."""
        return len(self._report["buckets"]) if self._report else 0

    def update_from(self, report: Mapping[str, Any]) -> None:
        self._report = report
        self.index = min(self.index, self.count - 1)
        self.border_title = some(self.count, "bucket")
        self.fill()

    def table(self, width: int) -> Sequence[Row]:
        assert self._report is not None, "some buckets"
        return bucket_rows(self._report["buckets"], width)


# -- findings panel -------------------------------------------------------------------------
# The findings of the data screen.


class FindingsPanel(Lines, can_focus=True):
    """What was skipped, converted, or may be unexpected."""

    BINDINGS: ClassVar = [
        Binding("j,down", "scroll_down", "scroll down", show=False, id="findings.down"),
        Binding("k,up", "scroll_up", "scroll up", show=False, id="findings.up"),
        Binding(
            "pagedown,space,ctrl+d", "page_down", "page down", show=False, id="findings.page_down"
        ),
        Binding("pageup,ctrl+u", "page_up", "page up", show=False, id="findings.page_up"),
        Binding("home,g", "scroll_home", "first line", show=False, id="findings.first"),
        Binding("end,G,shift+g", "scroll_end", "last line", show=False, id="findings.last"),
    ]

    def __init__(self) -> None:
        super().__init__(id="findings")
        self._report: Mapping[str, Any] | None = None

    def update_from(self, report: Mapping[str, Any]) -> None:
        self._report = report
        self.border_title = " · ".join(group.count for group in groups(report)) or "nothing skipped"
        self._fill()

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def _fill(self) -> None:
        width = self.scrollable_content_region.width
        if self._report is not None and width:
            rows = finding_rows(self._report, width)
            self.show(rows or [(Span("every file is used unchanged", "dim"),)])


# -- images panel ---------------------------------------------------------------------------
# Some images of a bucket, as they are trained on.


_DRAW_AFTER: Final = 0.12  # seconds; moving through the buckets does not draw each of them


class PicturesPanel(Widget):
    """Images in half blocks, drawn only when another bucket or page is shown."""

    def __init__(self) -> None:
        super().__init__(id="pictures")
        self.pictures: list[Image] = []
        self.first = 0  # index of the first displayed image
        self._room = 0  # number of images that fit
        self._lines: list[Strip] = []
        self._title = ""
        self._due: Timer | None = None

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._draw_soon())

    def show(self, bucket: Mapping[str, Any], strip: bytes) -> None:
        """Show images of a bucket, unless another bucket is shown within a moment."""
        width, height = bucket["size"][:2]
        self.pictures, self.first = pictures_of(strip, width / height), 0
        shown, there = len(self.pictures), bucket["samples"]
        which = f"{shown} of {there} samples" if shown < there else some(there, "sample")
        self._title = f"{bucket_name(bucket)} · {which}, cropped as for training"
        self._draw_soon()

    def turn(self, by: int) -> None:
        """Show the next images, or the previous ones."""
        first = self.first + by * max(1, self._room)
        if 0 <= first < len(self.pictures):
            self.first = first
            self._draw_soon()

    def on_resize(self, event: Resize) -> None:
        self._draw_soon()

    def render_line(self, y: int) -> Strip:
        style = self.visual_style.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, style)
        return self._lines[y].adjust_cell_length(self.size.width, style)

    def _draw_soon(self) -> None:
        if self._due is not None:
            self._due.stop()
        self._due = self.set_timer(_DRAW_AFTER, self._draw)

    def _draw(self) -> None:
        width, height = self.size
        if not self.pictures or not width or not height:
            return
        aspect = self.pictures[0].width / self.pictures[0].height
        grid = find_grid(len(self.pictures), aspect, width, height)
        self._room = grid.room if grid else 0
        # Pages begin where earlier ones ended, whatever the screen size was.
        self.first -= self.first % max(1, self._room)
        page = self.pictures[self.first : self.first + self._room]
        background = self.background_colors[1].rgb
        lines = draw(page, grid, width, background) if grid else []
        self._lines = [Strip(line, width) for line in lines]
        self.border_title = self._title
        more = len(page) < len(self.pictures)
        last = self.first + len(page)
        self.border_subtitle = (
            f"← {self.first + 1}–{last} of {len(self.pictures)} →" if more else ""
        )
        self.refresh()


# -- screen ---------------------------------------------------------------------------------
# The screen that shows what a job would train on, before it does.


_KEYS: Final = (  # action, displayed keys, description
    ("go(1)", "↑ ↓", "bucket"),
    ("turn(1)", "← →", "images"),
    ("app.focus_next", "tab", "findings"),
    ("look_again", "r", "refresh"),
    ("dismiss", "esc", "close"),
)
_KEYS_WITHOUT: Final = _KEYS[-2:]  # available while there is nothing to show
_MARGIN: Final = 2  # columns beside the keys
_STATES: Final = ("-looking", "-failed", "-looked")


class DataScreen(Screen[None]):
    """Checks the data in a separate process, which ends with the screen."""

    CSS_PATH = "data.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = ""
    BINDINGS: ClassVar = [
        bind("data.close", "escape,q,d", "Back to the previous screen", action="dismiss"),
        Binding("j,down", "go(1)", "next bucket", id="data.down"),
        Binding("k,up", "go(-1)", "previous bucket", id="data.up"),
        Binding("ctrl+d,pagedown", "go(10)", "ten buckets down", id="data.page_down"),
        Binding("ctrl+u,pageup", "go(-10)", "ten buckets up", id="data.page_up"),
        Binding("home,g", "first", "first bucket", id="data.first"),
        Binding("end,G,shift+g", "last", "last bucket", id="data.last"),
        bind(
            "data.next_pictures",
            "l,right",
            "Next images of the bucket",
            action="turn(1)",
            label="next images",
        ),
        bind(
            "data.previous_pictures",
            "h,left",
            "Previous images of the bucket",
            action="turn(-1)",
            label="previous images",
        ),
        bind("data.look_again", "r", "Read the data again", label="refresh"),
        bind("data.switch_theme", "t", "Switch between the dark and light theme", label="theme"),
    ]

    app: FsdpTui

    @dataclass
    class Progressed(Message):
        """Reading has made progress."""

        done: int
        total: int

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, DataScreen.Progressed)

    @dataclass
    class Looked(Message):
        """The data has been read."""

        look: DataLook
        changed: str

    @dataclass
    class Failed(Message):
        """The data could not be read."""

        problem: str

    def __init__(
        self, heading: str, job: Callable[[], JobSpec], earlier: Path | None = None
    ) -> None:
        """
        Args:
            heading: The job's name.
            job: Reads the job; called in a thread.
            earlier: The file with the report of the job's run; None if it has not read its data.
        """
        super().__init__()
        self.heading = heading
        self.look: DataLook | None = None
        self._job = job
        self._earlier = earlier
        self.buckets = BucketsPanel()
        self.pictures = PicturesPanel()
        self.findings = FindingsPanel()
        self.looking = Lines(id="looking")
        self.key_line = Links("", id="data-keys")

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        yield Static(Content(self.heading), id="data-title")
        yield self.looking
        yield Static("", id="data-problem", markup=False)
        yield Static("", id="data-totals", markup=False)
        yield Static("", id="data-changed", markup=False)
        with Container(id="data-body"):
            yield self.buckets
            yield self.pictures
            yield self.findings
        yield self.key_line

    def on_mount(self) -> None:
        self.action_look_again()

    # -- looking ---------------------------------------------------------------------------

    def action_look_again(self) -> None:
        self._become("-looking")
        self.looking.show([looking_row(0, 0, 0)])
        self.run_worker(self._look, group="data", exclusive=True, exit_on_error=False, thread=True)

    def _look(self) -> None:
        """Read in a thread. Closing the screen cancels its worker, and with it the process."""
        worker = get_current_worker()

        def report_progress(done: int, total: int) -> None:
            self.post_message(self.Progressed(done, total))

        try:
            job = self._job()
            look = look_at_data(
                job, report_progress, cancelled=lambda: worker.is_cancelled, strips=True
            )
            before = read_json(self._earlier) if self._earlier else None
            changed = changes(before, look.report)
            self.post_message(self.Looked(look, changed))
        except Cancelled:
            return
        except (UserError, ToolError) as error:
            self.post_message(self.Failed(str(error)))
        except Exception as error:  # top level: report any failure instead of waiting forever
            self.post_message(self.Failed(f"{type(error).__name__}: {error}"))

    def on_data_screen_progressed(self, message: Progressed) -> None:
        if self.has_class("-looking"):
            width = self.looking.size.width
            self.looking.show([looking_row(message.done, message.total, width)])

    def on_data_screen_failed(self, message: Failed) -> None:
        self.query_one("#data-problem", Static).update(f"! {message.problem}")
        self._become("-failed")

    def on_data_screen_looked(self, message: Looked) -> None:
        self.look = message.look
        report = message.look.report
        self.query_one("#data-totals", Static).update("\n".join(headlines(report)))
        changed = self.query_one("#data-changed", Static)
        changed.set_class(bool(message.changed), "-shown")
        changed.update(f"The data has changed since the job read it: {message.changed}.")
        self._become("-looked")
        self.buckets.update_from(report)
        self.findings.update_from(report)
        self._show_pictures()
        self.buckets.focus()

    def _become(self, state: str) -> None:
        for name in _STATES:
            self.set_class(name == state, name)
        self._show_keys()

    def on_resize(self) -> None:
        self._show_keys()

    def _show_keys(self) -> None:
        """Show as many keys as fit."""
        keys = _KEYS if self.has_class("-looked") else _KEYS_WITHOUT
        self.key_line.update(key_line(keys, self.size.width - _MARGIN))

    # -- moving ----------------------------------------------------------------------------

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        # On a low screen, the findings replace the images while they are focused.
        self.set_class(event.widget is self.findings, "-reading")

    def action_go(self, by: int) -> None:
        self.buckets.go(by)

    def action_first(self) -> None:
        self.buckets.go(-self.buckets.index)

    def action_last(self) -> None:
        self.buckets.go(self.buckets.count)

    def action_turn(self, by: int) -> None:
        self.pictures.turn(by)

    @on(BucketsPanel.Highlighted)
    def _show_pictures(self) -> None:
        if self.look is not None:
            index = self.buckets.index
            self.pictures.show(self.look.report["buckets"][index], self.look.strips[index])

    def action_switch_theme(self) -> None:
        self.app.switch_theme()
