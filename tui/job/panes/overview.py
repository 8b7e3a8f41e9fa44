"""The overview tab: a job at a glance; further down how it was set up, its memory, its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual.containers import Horizontal, VerticalScroll

from tui.dashboard.panels import CurvePanel
from tui.job.panes.glance_rows import (
    device_part,
    failed_rank,
    failure_rows,
    head_rows,
    news_rows,
    start_rows,
)
from tui.job.panes.newest_samples import NewestSamples
from tui.job.panes.overview_rows import detail_rows, nodes_words
from tui.keys.key_table import Key, bindings_of, scrolling
from tui.look.collector import where_of
from tui.look.snapshot import Snapshot
from tui.text.format import plain
from tui.widgets.lines import Lines
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.events import Resize

    from tui.look.job_look import Look
    from tui.text.format import Row

_BLANK: Final[Row] = ()
_LEAST, _MOST = 8, 24  # lines of curve and samples
_DEVICES: Final = 0.3  # of the lines, at most
_AIRY: Final = 30  # lines from which on blank ones part what belongs together
_NEWS: Final = 5  # lines, with the checkpoint


class OverviewPane(Pane):
    """State, loss, newest samples, devices, events: one screenful. More of it when scrolled."""

    KEYS: ClassVar = (
        *scrolling(),
        Key("fold", "space", "space", "traceback", "Show or fold the traceback", line=False),
        Key("read_log", "enter", "enter", "log", "Read the failed rank's log", line=False),
        Key("edit_job", "e", "e", "edit", "Edit a queued job; copy any other", line=False),
        Key("copy_path", "y", "y", "copy path", "Copy the run directory's path"),
        Key("copy_all", "Y,shift+y", "Y", "copy all", "Copy the full overview as text"),
    )
    BINDINGS: ClassVar = bindings_of("overview", KEYS)

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.page = VerticalScroll(id="overview-page", can_focus=True)
        self.head = Lines(id="overview-head")
        self.curve = CurvePanel(id="overview-curve", numbers=False)
        self.samples = NewestSamples()
        self.pictures = Horizontal(self.curve, self.samples, id="overview-pictures")
        self.lines = Lines(id="overview-lines")
        self.look: Look | None = None
        self._snapshot: Snapshot | None = None
        self._unfolded = False
        self._lines = 0  # of curve and samples

    def compose(self) -> ComposeResult:
        with self.page:
            yield self.head
            yield self.pictures
            yield self.lines

    def on_mount(self) -> None:
        self.pictures.display = False
        self._snapshot = self.app.dashboard.snapshot
        self.app.snapshots.subscribe(self, self._machine_looked)

    def _machine_looked(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def update_from(self, look: Look) -> None:
        self.look = look
        self.fill()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.fill)

    def fill(self) -> None:
        """Show the newest look; unchanged lines are not painted again."""
        look, width = self.look, self.lines.scrollable_content_region.width
        if look is None or not width:
            return
        height = self.page.size.height
        snapshot = self._snapshot or Snapshot(t=look.t)
        head = head_rows(look, width)
        urgent = start_rows(look, width)
        urgent += failure_rows(look, width, unfolded=self._unfolded)
        gap = [_BLANK] if height >= _AIRY else []
        head += [*gap, *urgent] if urgent else []
        devices = device_part(look, snapshot, width, max(3, int(height * _DEVICES) - 1))
        news = news_rows(look, width, _NEWS)
        parts = [part for part in (devices, news) if part]
        rows = [row for part in parts for row in (*gap, *part)]
        self.head.show(head)
        self._show_pictures(look, height - len(head) - len(rows))
        self.lines.show([*rows, _BLANK, *detail_rows(look, self._gpus(look), width)])

    def _show_pictures(self, look: Look, room: int) -> None:
        """Curve and samples, as high as what else is on the first screenful leaves."""
        has_curve, has_samples = bool(look.curve.steps), bool(look.samples)
        lines = max(_LEAST, min(_MOST, room))
        if lines != self._lines:
            self._lines = lines
            self.pictures.styles.height = lines
        self.pictures.display = has_curve or has_samples
        self.curve.display, self.samples.display = has_curve, has_samples
        if has_curve:
            self.curve.update_from(look.curve)
        if has_samples:
            self.samples.update_from(look.samples)

    def _gpus(self, look: Look) -> str:
        job, present = look.job, self.app.dashboard.snapshot.gpus
        if job.wanted is None:
            return "the CPU"
        if not job.here:
            return nodes_words(look.view.ranks)
        names = {gpu.name for gpu in present if gpu.uuid in job.gpus}
        kind = f" ({', '.join(sorted(names))})" if names else ""
        return f"GPUs {where_of(job, present)}{kind}"

    # -- keys ------------------------------------------------------------------------------

    def action_scroll_by(self, lines: int) -> None:
        self.page.scroll_relative(y=lines, animate=False)

    def action_fold(self) -> None:
        self._unfolded = not self._unfolded
        self.fill()

    async def action_read_log(self) -> None:
        """Open the log of the failed rank, or of the first rank if none has failed."""
        if self.look is not None:
            await self.screen.run_action(f"show_log({failed_rank(self.look) or 0})")

    def action_edit_job(self) -> None:
        """Open the dashboard's form; closing it returns to this screen."""
        from tui.form.opening import open_edit

        if self.look is not None:
            open_edit(self.app.dashboard, self.look.job.id)

    def action_copy_path(self) -> None:
        if self.look is not None:
            self.copy(str(self.look.job.run_dir.root))

    def action_copy_all(self) -> None:
        self.copy(self.as_text())

    def as_text(self) -> str:
        """Return everything shown, without the images."""
        rows: Sequence[Row] = (*self.head.rows, *self.lines.rows)
        return "\n".join(plain(row).rstrip() for row in rows)
