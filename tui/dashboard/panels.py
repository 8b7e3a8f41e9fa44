"""The panels that show rows of a snapshot: devices, activity, loss curve."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, ClassVar, Final

from textual.binding import Binding
from textual.markup import escape

from tui.dashboard.activity_rows import activity_rows
from tui.dashboard.device_rows import device_head, device_rows, devices_title
from tui.dashboard.memory_split import LEGEND, OTHERS, OURS
from tui.dashboard.rank_lines import rank_table, rank_title
from tui.look.snapshot import Curve
from tui.plots.line_chart import chart, ema, smoothing_span
from tui.text.format import Span, number
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Resize
    from textual.timer import Timer

    from jobs.run.events import Step
    from tui.look.snapshot import JobView, Snapshot

# A curve is the most expensive thing on the screen: seven bytes a cell, and all of it moves.
_REDRAW_EVERY: Final = 2.0  # seconds, at the least
_CELLS_A_SECOND: Final = 160
_REDRAW_WITHIN: Final = 15.0  # seconds, however little was added


class DevicesPanel(Lines, can_focus=True):
    """GPUs, or the machine, and the ranks of running jobs; or a table of one job's ranks."""

    BORDER_TITLE = "devices"
    BINDINGS: ClassVar = [
        Binding("j,down", "scroll_down", show=False, tooltip="Scroll down", id="panel.down"),
        Binding("k,up", "scroll_up", show=False, tooltip="Scroll up", id="panel.up"),
    ]

    def __init__(self) -> None:
        super().__init__(id="devices")
        self.of_ranks = False  # whether the selected job's ranks have the place of the devices
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
        """Lines that it may take, as `dashboard.tcss` has it."""
        height = self.screen.size.height
        if self.screen.has_class("-wide") and not self.screen.has_class("-short"):
            return max(3, height // 2 - 2)
        return max(3, int(height * 0.3) - 2)

    def on_resize(self, event: Resize) -> None:
        if self._snapshot is not None:
            self.update_from(self._snapshot, self._selected)

    def toggle_ranks(self) -> None:
        """Show the ranks of the selected job in place of the devices, or the devices again."""
        self.of_ranks = not self.of_ranks
        if self._snapshot is not None:
            self.update_from(self._snapshot, self._selected)

    def watch_has_focus(self, focused: bool) -> None:
        super().watch_has_focus(focused)
        self.screen.set_class(focused, "-devices")  # a low screen gives it more lines meanwhile


class ActivityPanel(Lines):
    """What the selected job does now."""

    def __init__(self) -> None:
        super().__init__(id="activity")
        self._view: JobView | None = None
        self._now: float | None = None

    def update_from(self, view: JobView | None, now: float | None = None) -> None:
        """Show a job; `now` in Unix seconds tells how long a phase has taken."""
        self._view, self._now = view, now
        self.show(activity_rows(view, self.size.width, now))

    def on_resize(self, event: Resize) -> None:
        self.update_from(self._view, self._now)


class CurvePanel(Lines):
    """The loss of the selected job, drawn again when it has become longer by a column."""

    BORDER_TITLE = "loss"

    def __init__(self, *, id: str = "curve", numbers: bool = True) -> None:  # noqa: A002
        """
        Args:
            id: Of the widget.
            numbers: Whether its border tells the newest values.
        """
        super().__init__(id=id)
        self._numbers = numbers
        self._curve = Curve(-1)
        self._drawn: Curve | None = None
        self._drawn_at = 0.0
        self._later: Timer | None = None
        self._due = 0.0  # when it is to be drawn again

    def update_from(self, curve: Curve | None) -> None:
        self._curve = curve or Curve(-1)
        if self._curve is self._drawn:
            return
        self._caption()  # at once: the same values stand in the table of jobs
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
        if not self.size:  # not laid out yet: what is drawn then would stay
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
        return f"[b]avg {number(average, 3)}[/b] · val {held_out}"  # the loss is in the table


def newest_average(steps: Sequence[Step]) -> float | None:
    """Return the smoothed loss at the newest step, of those that still count for it."""
    span = smoothing_span(len(steps))
    losses = [step.loss for step in steps[-10 * span :]]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return ema(finite, span)[-1] if finite else None


def redraw_after(drawn: int, steps: int, width: int, height: int) -> float:
    """Seconds after which a curve is drawn again. Pure.

    Args:
        drawn: Steps that it shows.
        steps: Steps that there are.
        width, height: Its size in cells.
    """
    least = max(_REDRAW_EVERY, width * height / _CELLS_A_SECOND)
    longer_by_a_column = (steps - drawn) * max(1, width) >= drawn
    return least if longer_by_a_column else max(least, _REDRAW_WITHIN)
