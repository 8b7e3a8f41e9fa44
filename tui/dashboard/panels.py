"""The panels that show rows of a snapshot: devices, activity, loss curve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final

from textual.binding import Binding

from tui.dashboard.activity_rows import activity_rows
from tui.dashboard.device_rows import device_rows
from tui.format import Span, number
from tui.plot import chart, ema, smoothing_span
from tui.snapshot import Curve
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from textual.events import Resize
    from textual.timer import Timer

    from tui.snapshot import JobView, Snapshot

_REDRAW_EVERY: Final = 2.0  # seconds; a curve is the most expensive thing on the screen


class DevicesPanel(Lines, can_focus=True):
    """GPUs, or the machine, and the ranks of running jobs."""

    BORDER_TITLE = "devices"
    BINDINGS: ClassVar = [
        Binding("j,down", "scroll_down", show=False),
        Binding("k,up", "scroll_up", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="devices")
        self._snapshot: Snapshot | None = None

    def update_from(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if self.size.width:
            room = max(3, int(self.screen.size.height * 0.3) - 2)
            self.show(device_rows(snapshot, self.scrollable_content_region.width, room))

    def on_resize(self, event: Resize) -> None:
        if self._snapshot is not None:
            self.update_from(self._snapshot)


class ActivityPanel(Lines):
    """What the selected job does now."""

    def __init__(self) -> None:
        super().__init__(id="activity")
        self._view: JobView | None = None

    def update_from(self, view: JobView | None) -> None:
        self._view = view
        self.show(activity_rows(view, self.size.width))

    def on_resize(self, event: Resize) -> None:
        self.update_from(self._view)


class CurvePanel(Lines):
    """The loss of the selected job, drawn again when it changed, at most every two seconds."""

    BORDER_TITLE = "loss"

    def __init__(self) -> None:
        super().__init__(id="curve")
        self._curve = Curve(-1)
        self._drawn: Curve | None = None
        self._drawn_at = 0.0
        self._later: Timer | None = None
        self._captions = ("", "")

    def update_from(self, curve: Curve | None) -> None:
        self._curve = curve or Curve(-1)
        if self._curve is self._drawn:
            return
        other_job = self._drawn is None or self._drawn.job != self._curve.job
        wait = self._drawn_at + _REDRAW_EVERY - time.monotonic()
        if other_job or wait <= 0 or not self._drawn or not self._drawn.steps:
            self._draw()
        elif self._later is None:
            self._later = self.set_timer(wait, self._draw)

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._later is not None:
            self._later.stop()
            self._later = None
        self._drawn, self._drawn_at = self._curve, time.monotonic()
        steps = self._curve.steps
        losses = [step.loss for step in steps]
        width, height = self.size
        rows = chart([step.step for step in steps], losses, width, height)
        self.show(rows or ((Span("no steps yet" if self._curve.job >= 0 else "", "dim"),),))
        self._caption(losses)

    def _caption(self, losses: list[float]) -> None:
        title, subtitle = "loss", ""
        if losses:
            finite = [loss for loss in losses if loss == loss and abs(loss) != float("inf")]
            average = ema(finite, smoothing_span(len(finite)))[-1] if finite else None
            last = self._curve.steps[-1]
            title = self._title(losses[-1], average)
            extra = [
                f"lr {number(last.lr)}" if last.lr is not None else "",
                f"grad {number(last.grad_norm, 3)}" if last.grad_norm is not None else "",
                f"{number(last.images_per_second, 3)} img/s" if last.images_per_second else "",
            ]
            subtitle = " · ".join(part for part in extra if part)
        if (title, subtitle) != self._captions:
            self._captions = title, subtitle
            self.border_title, self.border_subtitle = title, subtitle

    def _title(self, loss: float, average: float | None) -> str:
        """The newest loss, their average, and where there is room that on what is held out."""
        title = f"loss {number(loss)} · [b]avg {number(average)}[/b]"
        if self._curve.validation is None:
            return title
        held_out = number(self._curve.validation, 3)
        longest = f"{title} · val {held_out}"
        if len(longest) - len("[b][/b]") <= self.size.width - 2:
            return longest
        return f"[b]avg {number(average, 3)}[/b] · val {held_out}"  # the loss is in the table
