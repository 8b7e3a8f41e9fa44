"""The panels that show rows of a snapshot: devices, activity, loss curve."""

from __future__ import annotations

import math
import textwrap
import time
from typing import TYPE_CHECKING, ClassVar, Final

from textual.binding import Binding
from textual.markup import escape

from jobs.queue.states import PAUSED, State
from tui.dashboard.device_rows import device_head, device_rows, devices_title
from tui.dashboard.rank_lines import LEGEND, OTHERS, OURS, rank_table, rank_title
from tui.look.snapshot import FIRST_STEP, Curve
from tui.plots.line_chart import chart, ema, smoothing_span
from tui.text.format import (
    Row,
    Span,
    bar,
    cut,
    duration,
    eta,
    left_words,
    number,
    pace,
    spent,
    state_text,
)
from tui.widgets.job_rows import GLYPHS, starts_words
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Resize
    from textual.timer import Timer

    from jobs.queue.store import Job
    from jobs.run.eventlog import Phase
    from jobs.run.events import Step
    from jobs.service.outlook import Expected
    from tui.look.snapshot import JobView, Snapshot


# -- activity rows --------------------------------------------------------------------------
# The line about the selected job: its phase and progress, or why it ended.


_MOST_LINES = 3
_LEAST_BAR = 12  # columns
# What the next stop request would do, by the number of requests so far.
_ON_X = {0: " · x twice: SIGTERM", 1: " · x twice: SIGTERM", 2: " · x again: SIGKILL"}


def activity_rows(
    view: JobView | None, width: int, now: float | None = None, expected: Expected | None = None
) -> tuple[Row, ...]:
    """Return one line for a running job, up to three with the reason for any other.

    Args:
        view: The job.
        width: Cells of a line.
        now: Unix seconds, to show how long a phase has taken.
        expected: When it starts, if it is queued.
    """
    if view is None or width < 20:
        return ()
    job = view.job
    glyph, role = GLYPHS[job.state]
    head = (Span(f"{glyph} ", role), Span(f"#{job.id} {cut(job.name, width // 4)}  ", "strong"))
    if job.state in (State.STARTING, State.RUNNING, State.SAVING):
        return ((*head, *_progress(view, width - _length(head), now)),)
    if job.state is State.STOPPING:
        words = f"stopping: {job.reason}" + (f" · {view.doing}" if view.doing else "")
        words += _ON_X.get(job.stop_level, "")
        return _wrapped(head, words, width, "warn")
    if job.state is State.QUEUED:
        starts = f"{words} · " if (words := starts_words(expected, job.reason)) else ""
        return _wrapped(head, starts + _queued(job, width - _length(head)), width, "")
    hint = " · s: resume" if job.state is not State.COMPLETED else ""
    spent = f" · took {duration(job.ended - job.started)}" if job.ended and job.started else ""
    words = f"{state_text(job.state, job.reason)}{spent}{hint}"
    return _wrapped(head, words, width, "bad" if job.state in (State.FAILED, State.LOST) else "")


def _queued(job: Job, room: int) -> str:
    """Return why a job waits and the keys that change that; those of every job if they fit."""
    state = f"queued with priority {job.priority}" if job.priority else "queued"
    words = f"{state}: {job.reason or 'starts when the queue allows'}"
    if job.held or job.stuck:
        return f"{words} · H: release"
    if job.reason == PAUSED:
        return f"{words} · P: start queued jobs again"
    keys = " · h: hold · K J: move"
    return words + keys if len(words + keys) <= room else words


def doing_for(view: JobView, now: float | None) -> str | None:
    """Describe what a job does other than steps, and for how long: `loading weights 12 s`."""
    doing, since = view.doing, view.doing_since
    if doing is None or now is None or since is None or now - since < 1:
        return doing
    return f"{doing} {spent(now - since)}"


def _progress(view: JobView, width: int, now: float | None) -> Row:
    doing = doing_for(view, now)
    if doing is None:
        done, total = view.progress.step, view.total_steps
        words, tails = "training", _pace(view)
    elif view.phase is not None and not view.phase.finished and view.doing != FIRST_STEP:
        # A total of 0 means that there is nothing to do.
        done, total = view.phase.done, view.phase.total or None
        words, tails = doing, _with_all(_shared(view.phase), view)
    else:
        done, total, words, tails = 0, None, doing, []
    if total is None:
        more = f" {done}" if done else ""
        return (Span(f"{words}{more} …", "accent"),)
    share = done / total if total else 0.0
    count = f" {done}/{total}  {share * 100:.0f}%"
    room = width - len(words) - len(count) - 1
    tail = next((tail for tail in tails if room - len(tail) >= _LEAST_BAR), "")
    if not tail and tails and room - len(tails[-1]) >= _LEAST_BAR // 2:
        tail = tails[-1]  # the duration tells more than a longer bar
    room -= len(tail)
    strategy = _strategy(view, room)
    return (
        Span(words, "accent"),
        Span(count, "strong"),
        Span(tail + "  ", "dim"),
        *bar(share, min(60, room - len(strategy) - 1), "bar"),
        Span(strategy, "dim"),
    )


def _strategy(view: JobView, room: int) -> str:
    """Return `  fsdp2: why`, `  fsdp2` or "", so that there is room for a bar."""
    if not view.strategy:
        return ""
    for words in (f"{view.strategy}: {view.strategy_reason}", view.strategy):
        if room - len(words) - 2 >= _LEAST_BAR:
            return f"  {words}"
    return ""


def _pace(view: JobView) -> list[str]:
    """Return speed and time left, in wordings from the longest to the shortest."""
    now = view.progress
    if now.seconds_per_step is None:
        return []
    each = f"  {pace(now.seconds_per_step)} s/step"
    if now.eta is None:
        return [each]
    lefts = [f"  {left}" for left in left_words(now.eta, now.eta_parts, bool(now.eta_unknown))]
    return [*(each + left for left in lefts), *lefts]


def _with_all(tails: list[str], view: JobView) -> list[str]:
    """Add the job's remaining time beyond this phase if it fits."""
    now = view.progress
    if now.eta is None:
        return tails
    whole = eta(now.eta, bool(now.eta_unknown))
    return [f"{tails[0]} · {whole} in all", *tails] if tails else [f"  {whole} left in all"]


def _shared(phase: Phase) -> list[str]:
    """Return the phase's time left and each rank's share, in wordings from long to short."""
    left = f"  {duration(phase.seconds_left)} left" if phase.seconds_left is not None else ""
    ranks = phase.ranks
    if len(ranks) < 2:
        return [left] if left else []
    least, most = min(ranks), max(ranks)
    span = f"{least} to {most}" if least < most else f"{most} each"
    tails = [f"{left}  ranks {' + '.join(map(str, ranks))}", f"{left}  {len(ranks)} ranks: {span}"]
    return [*tails, left] if left else tails


def _wrapped(head: Row, words: str, width: int, role: str) -> tuple[Row, ...]:
    indent = _length(head)
    lines = textwrap.wrap(
        words, width - indent, max_lines=_MOST_LINES, placeholder=" …", break_on_hyphens=False
    )
    first, *rest = lines or [""]
    return ((*head, Span(first, role)), *((Span(" " * indent + line, role),) for line in rest))


def _length(row: Row) -> int:
    return sum(len(span.text) for span in row)


# -- panels ---------------------------------------------------------------------------------


# A curve is the most expensive part of the screen: seven bytes a cell, and all cells change.
_REDRAW_EVERY: Final = 2.0  # seconds, at least
_CELLS_A_SECOND: Final = 160
_REDRAW_WITHIN: Final = 15.0  # seconds, even if little was added


class DevicesPanel(Lines, can_focus=True):
    """GPUs, or the machine, and the ranks of running jobs; or a table of one job's ranks."""

    BORDER_TITLE = "devices"
    BINDINGS: ClassVar = [
        Binding("j,down", "scroll_down", show=False, tooltip="Scroll down", id="panel.down"),
        Binding("k,up", "scroll_up", show=False, tooltip="Scroll up", id="panel.up"),
    ]

    def __init__(self) -> None:
        super().__init__(id="devices")
        self.of_ranks = False  # whether the selected job's ranks are shown in place of the devices
        self._snapshot: Snapshot | None = None
        self._selected: int | None = None

    def update_from(self, snapshot: Snapshot, selected: int | None = None) -> None:
        self._snapshot, self._selected = snapshot, selected
        width = self.scrollable_content_region.width
        if not width:
            return
        view = snapshot.find(selected)
        of_ranks = self.of_ranks and view is not None
        room = self._room()
        head = device_head(snapshot, width, room)
        if (fixed := int(of_ranks or head is not None)) != self.fixed:
            self.fixed = fixed
            self.scroll_to(y=0, animate=False, force=True)
            self.refresh()
        if view is not None and of_ranks:
            self.show_titles(escape(rank_title(view, snapshot.t)), "GiB · R: devices")
            self.show(rank_table(view, snapshot.gpus, snapshot.t, width))
            return
        rows = device_rows(snapshot, width, room - (head is not None), selected)
        mixed = any(span.text[:1] in (OURS, OTHERS) for row in rows for span in row)
        legend = LEGEND if mixed and width >= 96 else ""
        self.show_titles(escape(devices_title(snapshot)), legend)
        self.show(rows if head is None else (head, *rows))

    def _room(self) -> int:
        """Return the lines that it may use, as in `dashboard.tcss`."""
        height = self.screen.size.height
        if self.screen.has_class("-short") and self.screen.has_class("-many-jobs"):
            return 3
        if self.screen.has_class("-wide") and not self.screen.has_class("-short"):
            return max(3, height // 2 - 2)
        return max(3, int(height * 0.3) - 2)

    def on_resize(self, event: Resize) -> None:
        if self._snapshot is not None:
            self.update_from(self._snapshot, self._selected)

    def toggle_ranks(self) -> None:
        """Switch between the selected job's ranks and the devices."""
        self.of_ranks = not self.of_ranks
        if self._snapshot is not None:
            self.update_from(self._snapshot, self._selected)

    def watch_has_focus(self, focused: bool) -> None:
        super().watch_has_focus(focused)
        self.screen.set_class(focused, "-devices")  # a low screen then gives the panel more lines


class ActivityPanel(Lines):
    """Shows what the selected job is doing."""

    def __init__(self) -> None:
        super().__init__(id="activity")
        self._view: JobView | None = None
        self._now: float | None = None
        self._expected: Expected | None = None

    def update_from(
        self,
        view: JobView | None,
        now: float | None = None,
        expected: Expected | None = None,
    ) -> None:
        """Show a job; `now`, in Unix seconds, is used for the duration of its phase."""
        self._view, self._now, self._expected = view, now, expected
        self.show(activity_rows(view, self.size.width, now, expected))

    def on_resize(self, event: Resize) -> None:
        self.update_from(self._view, self._now, self._expected)


class CurvePanel(Lines):
    """The loss of the selected job, redrawn whenever it grows by a column."""

    BORDER_TITLE = "loss"

    def __init__(self, *, id: str = "curve", numbers: bool = True) -> None:  # noqa: A002
        """
        Args:
            id: The widget's id.
            numbers: Show the newest values in the border.
        """
        super().__init__(id=id)
        self._numbers = numbers
        self._curve = Curve(-1)
        self._drawn: Curve | None = None
        self._drawn_at = 0.0
        self._later: Timer | None = None
        self._due = 0.0  # time of the next redraw

    def update_from(self, curve: Curve | None) -> None:
        self._curve = curve or Curve(-1)
        if self._curve is self._drawn:
            return
        self._caption()  # at once: the jobs table shows the same values
        other_job = self._drawn is None or self._drawn.job != self._curve.job
        if other_job or not self._drawn or not self._drawn.steps:
            self._draw()
            return
        width, height = self.size
        drawn, now = len(self._drawn.steps), len(self._curve.steps)
        due = self._drawn_at + redraw_after(drawn, now, width, height)
        if (wait := due - time.monotonic()) <= 0:
            self._draw()
        elif self._later is None or due < self._due:
            self._put_off()
            self._due, self._later = due, self.set_timer(wait, self._draw)

    def _put_off(self) -> None:
        if self._later is not None:
            self._later.stop()
            self._later = None

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        self._put_off()
        if not self.size:  # not laid out yet; a drawing made now would stay
            return
        self._drawn, self._drawn_at = self._curve, time.monotonic()
        steps = self._curve.steps
        losses = [step.loss for step in steps]
        width, height = self.size
        rows = chart([step.step for step in steps], losses, width, height)
        self.show(rows or ((Span("no steps yet" if self._curve.job >= 0 else "", "dim"),),))
        self._caption()

    def _caption(self) -> None:
        title, subtitle = "loss", ""
        if self._curve.steps and self._numbers:
            last = self._curve.steps[-1]
            title = self._title(last.loss, newest_average(self._curve.steps))
            extra = [
                f"lr {number(last.lr)}" if last.lr is not None else "",
                f"grad {number(last.grad_norm, 3)}" if last.grad_norm is not None else "",
                f"{number(last.images_per_second, 3)} img/s" if last.images_per_second else "",
            ]
            subtitle = " · ".join(part for part in extra if part)
        self.show_titles(title, subtitle)

    def _title(self, loss: float, average: float | None) -> str:
        """Return a title with the newest loss, the average, and the validation loss if it fits."""
        title = f"loss {number(loss)} · [b]avg {number(average)}[/b]"
        if self._curve.validation is None:
            return title
        held_out = number(self._curve.validation, 3)
        longest = f"{title} · val {held_out}"
        if len(longest) - len("[b][/b]") <= self.size.width - 2:
            return longest
        return f"[b]avg {number(average, 3)}[/b] · val {held_out}"  # the table shows the loss


def newest_average(steps: Sequence[Step]) -> float | None:
    """Return the smoothed loss at the newest step."""
    span = smoothing_span(len(steps))
    losses = [step.loss for step in steps[-10 * span :]]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return ema(finite, span)[-1] if finite else None


def redraw_after(drawn: int, steps: int, width: int, height: int) -> float:
    """Return the seconds until a curve is redrawn. Pure.

    Args:
        drawn: Steps in the drawing.
        steps: Steps so far.
        width, height: Size in cells.
    """
    least = max(_REDRAW_EVERY, width * height / _CELLS_A_SECOND)
    longer_by_a_column = (steps - drawn) * max(1, width) >= drawn
    return least if longer_by_a_column else max(least, _REDRAW_WITHIN)
