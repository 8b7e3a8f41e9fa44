"""The jobs table: a row for each job, and a cursor that stays on its job as the order changes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from textual import on
from textual.binding import Binding
from textual.markup import escape
from textual.message import Message
from textual.widgets import Input

from jobs.backends import backend
from jobs.queue.states import ACTIVE, State
from jobs.service.outlook import Outlook
from jobs.spec.job_spec import JobSpec
from jobs.units import ordinal
from tui.dashboard.sweep_rows import best_of, heading_row, shape_of, sweep_row
from tui.keys.actions import bindings
from tui.text.format import Row, Span
from tui.widgets.job_rows import (
    Columns,
    columns,
    common_reason,
    header_row,
    job_row,
    short_names,
)
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.events import Click, Resize

    from jobs.machine.devices import Gpu
    from jobs.queue.store import Job
    from tui.look.snapshot import JobView, Snapshot


# -- job groups -----------------------------------------------------------------------------
# Group jobs by the GPUs they use or wait for. Pure.


_ENDED = "ended"
_FEW = 4  # jobs that fit a panel that does not grow


class Group(NamedTuple):
    """Jobs that share GPUs: running ones first, then waiting ones in queue order.

    With a name, the jobs of that sweep in numeric order.
    """

    title: str
    views: tuple[JobView, ...]
    sweep: str = ""


def job_groups(views: Sequence[JobView], gpus: Sequence[Gpu]) -> list[Group]:
    """Group jobs in the order of their GPUs, then jobs that take any GPUs, then ended jobs.

    Args:
        views: Jobs sorted by `tui.look.snapshot.in_order`.
        gpus: The machine's GPUs, for their indices.
    """
    index = {gpu.uuid: gpu.index for gpu in gpus}
    views_of: dict[str, list[JobView]] = {}
    places: dict[str, int] = {}  # title → first GPU
    owners: dict[str, str] = {}  # GPU → title of the group that runs on it
    swept = Counter(view.sweep for view in views if view.sweep)
    sweeps: dict[str, list[JobView]] = {}
    for view in views:
        job = view.job
        if swept[view.sweep] > 1:
            sweeps.setdefault(view.sweep, []).append(view)
            continue
        names = job.gpus or (job.wanted if isinstance(job.wanted, list) else [])
        if job.state.ended:
            title, place = _ENDED, 1 << 30
        elif not job.here:
            title, place = backend(job.backend).title, 1 << 21
        elif job.wanted is None and not names:
            title, place = "CPU", -1
        elif not names:
            title, place = "any GPUs", 1 << 20
        else:
            shared = next((owners[name] for name in names if name in owners), None)
            title = shared if shared and job.state is State.QUEUED else f"GPU {view.where}"
            place = min(index.get(name, 1 << 10) for name in names)
            for name in names:
                owners.setdefault(name, title)
        views_of.setdefault(title, []).append(view)
        places.setdefault(title, place)
    groups = [(places[title], Group(title, tuple(members))) for title, members in views_of.items()]
    for name, members in sweeps.items():
        ended = all(view.job.state.ended for view in members)
        members.sort(key=lambda view: view.job.id)
        # At the top while any of its jobs is to come, else just above the ended jobs.
        groups.append(((1 << 30) - 1 if ended else -2, Group(name, tuple(members), name)))
    return [group for _, group in sorted(groups, key=lambda placed: placed[0])]


def queue_places(views: Sequence[JobView]) -> Mapping[int, str]:
    """Return job → `1st`, `2nd`, … for jobs that wait here and may start, in queue order."""
    waiting = [
        view.job.id
        for view in views
        if view.job.state is State.QUEUED and not view.job.passed_over and view.job.here
    ]
    return {job: ordinal(place) for place, job in enumerate(waiting, 1)}


# -- jobs panel -----------------------------------------------------------------------------


_EMPTY: tuple[Row, ...] = (
    (),
    (Span("  No jobs yet.", "strong"),),
    (),
    (Span("  n", "accent"), Span("  creates and queues a job", "dim")),
    (
        Span("  fsdp-tui demo", "accent"),
        Span("  in a shell teaches a small model to draw hearts", "dim"),
    ),
)
_ON_GPUS: Row = (
    Span("  fsdp-tui selftest", "accent"),
    Span("  checks in 3 minutes that these GPUs can train", "dim"),
)


class JobsPanel(Lines, can_focus=True):
    """Shows the jobs of a snapshot and reports which one is selected."""

    BINDINGS = bindings("list")
    BORDER_TITLE = "jobs"

    @dataclass
    class Selected(Message):
        """Another job is selected."""

        job: int

    @dataclass
    class Opened(Message):
        """The selected job was clicked again."""

        job: int

    def __init__(self, selected: int | None) -> None:
        super().__init__(fixed=1, id="jobs")
        self.selected = selected
        self.awaited: int | None = None  # a new job, to be selected as soon as it is listed
        self.marks: set[int] = set()  # jobs that actions apply to, in place of the selected one
        self.prompt = JobFilter(self)
        self.families: dict[int, str] = {}  # job → its family, once a filter needs it
        self._words: tuple[str, ...] = ()  # the filter's words
        self._shown = 0  # jobs that match them
        self._names: dict[str, str] = {}  # shortened names, as displayed
        self._common = ("", 0)  # the reason that most queued jobs wait for, and their number
        self._groups: list[Group] = []
        self._folded: set[str] = set()  # sweeps of which only the heading is shown
        self._ids: list[int] = []  # in display order
        self._places: dict[int, int] = {}  # job → its position in that order
        self._lines: list[int | None] = []  # the job of each row; None for headings
        self._shaped: tuple[Sequence[JobView], int, Columns, Mapping[int, str]] | None = None
        self._made: dict[int, tuple[tuple[object, ...], JobView, Row]] = {}
        self._outlook = Outlook()
        self._snapshot: Snapshot | None = None
        self._drawn: tuple[object, ...] | None = None

    def update_from(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        # With thousands of idle jobs, unchanged rows are not rebuilt.
        index = {gpu.uuid: gpu.index for gpu in snapshot.gpus}
        same = self._drawn is not None and self._drawn[0] is snapshot.jobs
        same = same and self._outlook is snapshot.outlook
        self._outlook = snapshot.outlook
        now = snapshot.jobs, index, self._has_room, self._words, len(self.families)
        if same and self._drawn == now and self.awaited is None:
            return
        views = [view for view in snapshot.jobs if self._passes(view)]
        self._shown = len(views)
        self.marks &= {view.job.id for view in snapshot.jobs}
        # If headings do not fit, groups would only hide which job is next; sweeps keep theirs.
        groups = job_groups(views, snapshot.gpus)
        grouped = self._has_room or any(group.sweep for group in groups)
        self._groups = groups if grouped else [Group("", tuple(views))]
        self._place_jobs()
        if self.awaited in {view.job.id for view in views}:
            self._select(self.awaited)
            self._unfold(self.awaited)
            self.awaited = None
        if self.selected not in self._places:
            self._select(self._ids[0] if self._ids else None)
        self._fill()
        self._drawn = snapshot.jobs, index, self._has_room, self._words, len(self.families)

    def is_marked(self, index: int) -> bool:
        return index < len(self._lines) and self._lines[index] == self.selected is not None

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or not self._ids:
            return
        index = self.row_at(offset.y)
        job = self._lines[index] if index < len(self._lines) else None
        if job is not None:
            if job == self.selected and event.chain == 2:
                self.post_message(self.Opened(job))
            self._go(self._places[job])

    # -- keys ------------------------------------------------------------------------------

    def action_cursor_down(self) -> None:
        self._go(self._position + 1)

    def action_cursor_up(self) -> None:
        self._go(self._position - 1)

    def action_page_down(self) -> None:
        self._go(self._position + max(1, self.size.height // 2))

    def action_page_up(self) -> None:
        self._go(self._position - max(1, self.size.height // 2))

    def action_first(self) -> None:
        self._go(0)

    def action_last(self) -> None:
        self._go(len(self._ids) - 1)

    def action_fold(self) -> None:
        """Collapse the selected job's sweep to its heading, or expand it."""
        group = next((g for g in self._groups if g.sweep and self.selected in _ids_of(g)), None)
        if group is None:
            self.app.notify("the selected job belongs to no sweep", markup=False)
            return
        self._folded ^= {group.sweep}
        self._place_jobs()
        self._fill()

    # -- filter and marks ------------------------------------------------------------------

    def action_filter_jobs(self) -> None:
        self.prompt.open()

    def action_mark_job(self) -> None:
        if self.selected is not None:
            self.marks ^= {self.selected}
            self._go(self._position + 1)

    def action_clear_marks(self) -> None:
        if self._words:
            self.prompt.close()
        else:
            self.unmark()

    def unmark(self) -> None:
        """Clear all marks."""
        self.marks.clear()
        self._fill()

    @property
    def listed(self) -> list[Job]:
        """Return all jobs, whether or not they are shown."""
        return [view.job for view in self._snapshot.jobs] if self._snapshot else []

    def filter(self, text: str) -> None:
        """Show only jobs that have all these words in their id, name, state or family."""
        self._words = tuple(text.casefold().split())
        if self._snapshot is not None:
            self.update_from(self._snapshot)

    def _passes(self, view: JobView) -> bool:
        job = view.job
        family = self.families.get(job.id, "")
        text = f"{job.id} {job.name} {job.state} {family}".casefold() if self._words else ""
        return all(word in text for word in self._words)

    # -- inside ----------------------------------------------------------------------------

    def _place_jobs(self) -> None:
        """Give each selectable row its position; a collapsed sweep is one row."""
        self._ids = []
        for group in self._groups:
            ids = _ids_of(group)
            if group.sweep in self._folded and group.sweep:
                ids = [self.selected if self.selected in ids else ids[0]]
            self._ids += ids
        self._places = {job: place for place, job in enumerate(self._ids)}

    def _unfold(self, job: int | None) -> None:
        self._folded -= {group.sweep for group in self._groups if job in _ids_of(group)}
        self._place_jobs()

    @property
    def _position(self) -> int:
        return self._places.get(self.selected, 0) if self.selected is not None else 0

    def _go(self, position: int) -> None:
        if self._ids:
            self._select(self._ids[min(max(0, position), len(self._ids) - 1)])
            self._fill()

    def _select(self, job: int | None) -> None:
        if job == self.selected:
            return
        self.selected = job
        if job is not None:
            self.post_message(self.Selected(job))

    def _fill(self) -> None:
        snapshot = self._snapshot
        width = self.scrollable_content_region.width
        if snapshot is None or not width:
            return
        if not snapshot.jobs:
            self._caption(snapshot)
            self._lines = []
            self.show((*_EMPTY, _ON_GPUS) if snapshot.gpus else _EMPTY)
            return
        shaped = self._shaped
        if shaped is None or shaped[0] is not snapshot.jobs or shaped[1] != width:
            shape = columns(snapshot, width - 2)
            self._names = short_names((view.job.name for view in snapshot.jobs), shape.name)
            self._common = common_reason(snapshot.jobs)
            shaped = self._shaped = (snapshot.jobs, width, shape, queue_places(snapshot.jobs))
        _, _, shape, places = shaped
        rows: list[Row] = [(Span("  "), *header_row(shape))]
        lines: list[int | None] = [None]
        headed = self._headed
        for group in self._groups:
            if group.sweep:
                self._fill_sweep(group, rows, lines, width, places)
                continue
            if headed:
                rows.append(_heading(group.title, width))
                lines.append(None)
            for view in group.views:
                job = view.job.id
                rows.append(self._row(view, shape, places.get(job, "")))
                lines.append(job)
        self._lines = lines
        for gone in self._made.keys() - self._places.keys():
            del self._made[gone]
        self.show(rows)
        self._caption(snapshot)
        self._grow()
        self._keep_in_sight()

    def _fill_sweep(
        self,
        group: Group,
        rows: list[Row],
        lines: list[int | None],
        width: int,
        places: Mapping[int, str],
    ) -> None:
        """Add a sweep's heading and, unless it is collapsed, its jobs' rows."""
        shape, best = shape_of(group.views, width - 2), best_of(group.views)
        folded = group.sweep in self._folded
        shown = next((job for job in _ids_of(group) if job in self._places), None)
        heading = heading_row(group.sweep, group.views, shape, folded=folded)
        rows.append((self._mark(shown if folded else None), *heading))
        lines.append(shown if folded else None)
        for view in () if folded else group.views:
            job = view.job.id
            row = sweep_row(
                view,
                shape,
                best=job == best,
                place=places.get(job, ""),
                expected=self._outlook.jobs.get(job),
                elsewhere=self._common[0],
            )
            rows.append((self._mark(job), *row))
            lines.append(job)

    def _mark(self, job: int | None) -> Span:
        """Return the first two cells of a row: whether its job is selected, and whether marked."""
        selected, marked = job is not None and job == self.selected, job in self.marks
        return Span(f"{'▸' if selected else ' '}{'+' if marked else ' '}", "accent")

    def _row(self, view: JobView, shape: Columns, place: str) -> Row:
        """Return a job's row, rebuilt only when it has changed."""
        drawn = self._made.get(view.job.id)
        expected, mark = self._outlook.jobs.get(view.job.id), self._mark(view.job.id)
        name = self._names.get(view.job.name, "")
        facts = (id(view), shape, place, mark, expected, name, self._common[0])
        if drawn is not None and drawn[0] == facts:
            return drawn[2]
        row = (mark, *job_row(view, shape, place, expected, name=name, elsewhere=self._common[0]))
        self._made[view.job.id] = (facts, view, row)  # keep the view too, or its id could be reused
        return row

    @property
    def _has_room(self) -> bool:
        return not self.screen.has_class("-short")

    @property
    def _headed(self) -> bool:
        """Return whether groups have heading lines: on a GPU machine, if the screen has room."""
        return self._has_room and any(
            group.title.startswith(("GPU", "any")) for group in self._groups
        )

    def watch_has_focus(self, focused: bool) -> None:
        super().watch_has_focus(focused)
        self._grow()

    def _grow(self) -> None:
        """Take lines from the other panels of a low screen while focused with many jobs."""
        self.screen.set_class(self.has_focus and len(self._ids) > _FEW, "-many-jobs")

    def _keep_in_sight(self) -> None:
        seen = self.size.height - 1
        if seen <= 0 or self.selected not in self._lines:
            return
        at = self._lines.index(self.selected) - 1
        above = at - 1 if at and self._lines[at] is None else at  # including its heading
        top = self.scroll_offset.y
        if above < top:
            self.scroll_to(y=above, animate=False, force=True)
        elif at >= top + seen:
            self.scroll_to(y=at - seen + 1, animate=False, force=True)

    def _caption(self, snapshot: Snapshot) -> None:
        running, queued = snapshot.count(*ACTIVE), snapshot.count(State.QUEUED)
        ended = len(snapshot.jobs) - running - queued
        title = f"jobs · {running} running · {queued} queued · {ended} ended"
        if self._words:
            shown = f"{self._shown} of {len(snapshot.jobs)} have “{' '.join(self._words)}”"
            title = f"jobs · {escape(shown)} · esc shows all"
        reason, count = self._common
        below = escape(f"{count} queued: {reason}") if reason else ""
        if self.marks:
            below = f"{len(self.marks)} marked: actions take them · esc"
        self.show_titles(title, below)


def _ids_of(group: Group) -> list[int]:
    return [view.job.id for view in group.views]


def _heading(title: str, width: int) -> Row:
    return Span(f"  {title} ", "title"), Span("─" * max(0, width - len(title) - 3), "faint")


# -- filter ---------------------------------------------------------------------------------


class JobFilter(Input):
    """The input for the words that filter the jobs.

    Args:
        jobs: The panel that is filtered.
    """

    BINDINGS: ClassVar = [
        Binding("escape", "close", "show all", show=False, id="filter.close"),
        Binding("down,enter", "to_jobs", "to the jobs", show=False, id="filter.to_jobs"),
    ]

    @dataclass
    class Read(Message):
        """A thread has read the family of each job."""

        families: dict[int, str]

    def __init__(self, jobs: JobsPanel) -> None:
        super().__init__(placeholder="part of a name, id, state or family", id="filter")
        self.compact = True
        self.display = False
        self._jobs = jobs

    def open(self) -> None:
        """Show the input, and find out the jobs' families."""
        self.display = True
        self.screen.set_focus(self)  # at once: the next keys typed belong here
        unread = [job for job in self._jobs.listed if job.id not in self._jobs.families]

        def read() -> None:
            self.post_message(self.Read({job.id: _family(job) for job in unread}))

        if unread:
            self.run_worker(read, group="families", exit_on_error=False, thread=True)

    def close(self) -> None:
        """Show all jobs again."""
        self.screen.set_focus(self._jobs)
        self.value = ""
        self.display = False
        self._jobs.filter("")

    def action_close(self) -> None:
        self.close()

    def action_to_jobs(self) -> None:
        self.screen.set_focus(self._jobs)
        self.display = bool(self.value.strip())

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._jobs.filter(event.value)

    @on(Read)
    def _take(self, message: Read) -> None:
        self._jobs.families |= message.families
        self._jobs.filter(self.value)


def _family(job: Job) -> str:
    """Return the family that a job trains; reads the disk. "" if its file cannot be read."""
    with suppress(OSError, ValueError):
        default = JobSpec.model_fields["model_family"].default
        return job.run_dir.job_value("model_family") or str(default)
    return ""
