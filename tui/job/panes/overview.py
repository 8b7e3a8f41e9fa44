"""The overview tab: a job at a glance; below, its setup, memory and files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.worker import get_current_worker

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.memory import question
from jobs.memory.calibration import facts_of
from jobs.memory.estimate import estimate
from jobs.queue.states import State
from jobs.spec.file.load import load_spec
from jobs.units import ranges
from tui.dashboard.panels import CurvePanel
from tui.job.panes import glance_rows
from tui.job.panes.text_pane import fact, heading, moment
from tui.keys.key_table import Key, bindings_of, scrolling
from tui.look.collector import where_of
from tui.look.snapshot import Snapshot
from tui.text.format import Span, duration, plain, size
from tui.text.tables import batch_line, memory_table, prediction_lines
from tui.widgets.job_actions import JobActions
from tui.widgets.lines import Lines
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult
    from textual.events import Resize

    from jobs.memory.ladder import Step
    from jobs.queue.store import Job
    from jobs.run.rundir import RankStatus
    from jobs.run.samples import Sample
    from tui.job.sample_table import Loaded
    from tui.look.job_look import Look
    from tui.terminal.image import Picture
    from tui.text.format import Row


# -- overview rows --------------------------------------------------------------------------
# The rows of the overview below the glance: setup, memory, files. Pure.


_BAR: Final = 40
_NODES: Final = 4  # nodes named
_BLANK: Final[Row] = ()


def detail_rows(look: Look, gpus: str, width: int) -> list[Row]:
    """List the details below the glance.

    Args:
        look: The job.
        gpus: Its devices, as text.
        width: Columns.
    """
    rows = [*_warnings(look, width), *_how(look, gpus, width)]
    rows += [*_memory(look), *_predicted(look)]
    return [*rows, _BLANK, *_paths(look, width)]


def _warnings(look: Look, width: int) -> list[Row]:
    warnings = list(dict.fromkeys(look.report.warnings))
    if look.push.problem:
        warnings.append(f"the last push to the hub failed: {look.push.problem}")
    if not warnings:
        return []
    rows = [heading("warnings")]
    for words in warnings:
        rows += fact("  !", words, width, "warn")
    return [*rows, _BLANK]


def _how(look: Look, gpus: str, width: int) -> list[Row]:
    job, report = look.job, look.report
    ranks = f"{job.ranks} rank{'s' * (job.ranks != 1)}"
    rows = [heading("setup"), *fact("ranks", f"{ranks} on {gpus}", width)]
    if report.strategy:
        rows += fact("strategy", f"{report.strategy}: {report.reason}", width)
    if report.global_batch:
        rows += fact("batch", batch_line(report.global_batch, report.accumulation), width)
    if units := report.sharding.get("units"):
        named = ", ".join(f"{count} {name}" for name, count in units.items())
        held = size(report.sharding.get("local_bytes"))
        rows += fact("weights", f"{held} on each rank; units: {named}", width)
    times = [f"queued {moment(job.queued)}"]
    times += [f"started {moment(job.started)}"] if job.started else []
    times += [f"ended {moment(job.ended)}"] if job.ended else []
    rows += fact("times", " · ".join(times), width)
    if job.started:
        until = job.ended or look.t
        attempts = sum(change.after is State.STARTING for change in look.history)
        spent = duration(until - job.started) + (f", attempt {attempts}" if attempts > 1 else "")
        rows += fact("took" if job.ended else "running", spent, width)
    return rows


def peaks_of(look: Look) -> tuple[dict[str, list[int]], str]:
    """Return the peak memory per phase and rank, and how it was measured; so far, if it runs."""
    if look.report.peaks:
        return look.report.peaks, look.report.measure
    ranks = [rank for rank in look.view.ranks if rank.peaks]
    if not ranks or len(ranks) < len(look.view.ranks):
        return {}, ""
    names = [name for name in ranks[0].peaks or {} if all(name in (r.peaks or {}) for r in ranks)]
    peaks = {name: [(rank.peaks or {})[name] for rank in ranks] for name in names}
    return peaks, "rss" if _on_cpu(ranks) else "allocated"


def nodes_words(ranks: Sequence[RankStatus]) -> str:
    """Return the nodes that a Slurm job's ranks report: `n1, n2 (4 × NVIDIA H100)`."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    if not hosts:
        return "Slurm's nodes"
    kinds = Counter(rank.gpu for rank in ranks if rank.gpu)
    gpus = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    more = f" and {len(hosts) - _NODES} more" if len(hosts) > _NODES else ""
    return f"{', '.join(hosts[:_NODES])}{more}{f' ({gpus})' if gpus else ''}"


def _on_cpu(ranks: Sequence[RankStatus]) -> bool:
    return all(rank.device_uuid is None and rank.allocated is None for rank in ranks)


def _memory(look: Look) -> list[Row]:
    peaks, measure = peaks_of(look)
    if not peaks:
        return []
    title = "peak memory per phase and rank" + ("" if look.report.peaks else ", so far")
    if measure == "rss":
        title += " (RSS)"
    head, *lines = memory_table(peaks).splitlines()
    table: list[Row] = [(Span(f"  {head}", "dim"),), *((Span(f"  {line}"),) for line in lines)]
    return [_BLANK, heading(title), *table]


def _predicted(look: Look) -> list[Row]:
    """Return rows that compare a rank's predicted and measured memory."""
    if look.predicted is None:
        return []
    peaks, measure = peaks_of(look)
    first, *phases = prediction_lines(**facts_of(look.predicted, measure, peaks))
    title = f"memory: {' '.join(first.split())}"
    return [_BLANK, heading(title), *((Span(line),) for line in phases)]


def _paths(look: Look, width: int) -> list[Row]:
    job = look.job
    rows = [heading("files"), *fact("directory", str(job.run_dir.root), width)]
    inside = [
        ("job file", "job.yaml"),
        ("events", "events.jsonl"),
        ("logs", "logs/rank0.log …, logs/launcher.log, logs/supervisor.log"),
    ]
    if look.newest is not None:
        inside.append(("newest", f"checkpoints/step-{look.newest}"))
    if look.exported:
        inside.append(("exports", "export/"))
    if look.push.pushed:
        inside.append(("on the hub", f"{look.push.repo}: {ranges(look.push.pushed)}"))
    for label, words in inside:
        rows += fact(label, words, width, "dim")
    return rows


# -- newest samples -------------------------------------------------------------------------
# The newest samples of a job, side by side.


_EACH: Final = 24  # columns of an image, at least
_MOST_SAMPLES: Final = 4
_ROOMY: Final = 40  # columns from which the title is complete
_LONGEST: Final = 512  # pixels


class NewestSamples(Vertical):
    """Shows as many of the newest step's images as fit, the first prompts first."""

    BORDER_TITLE = "samples"

    def __init__(self) -> None:
        super().__init__(id="overview-samples")
        self._samples: Sequence[Sample] = ()
        self._shown: list[Sample] = []
        self._pictures: list[Picture] = []

    def update_from(self, samples: Sequence[Sample]) -> None:
        """Show the newest of these samples."""
        if samples is not self._samples:
            self._samples = samples
            self._fill()

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def _fill(self) -> None:
        from tui.job.sample_table import Loading  # importing image libraries takes a while
        from tui.terminal.image import Picture
        from tui.terminal.image_protocol import for_many

        width = self.size.width
        if not self._samples or not width:
            return
        step = max(sample.step for sample in self._samples)
        newest = sorted((s for s in self._samples if s.step == step), key=lambda s: s.number)
        shown = newest[: max(1, min(_MOST_SAMPLES, width // _EACH))]
        if shown == self._shown:
            return
        more = f" · {len(shown)} of {len(newest)}" if len(shown) < len(newest) else ""
        long, short = f"samples of step {step}{more} · 5: all", f"step {step}{more}"
        self.border_title = long if width >= _ROOMY else short
        if len(shown) != len(self._pictures):
            self._pictures = [Picture(for_many()) for _ in shown]
            with self.app.batch_update():
                self.remove_children()
                self.mount(Horizontal(*self._pictures))
        self._shown = shown
        for picture in self._pictures:
            picture.say("…")
        Loading(self, _LONGEST).want(shown)

    def on_loaded(self, message: Loaded) -> None:
        """Show an image once it is decoded, or why it cannot be."""
        message.stop()
        for sample, picture in zip(self._shown, self._pictures, strict=True):
            if sample == message.sample and picture.is_mounted:
                if message.image is not None:
                    picture.show(message.image)
                else:
                    picture.say(message.problem, bad=True)


# -- what would fit -------------------------------------------------------------------------


_FITS: Final = 3  # changes offered, with keys that otherwise open tabs


def find_fits(job: Job, snapshot: Snapshot, cancelled: Callable[[], bool]) -> list[Step]:
    """Predict which changes let a job that ran out of memory fit; takes seconds, or a minute.

    Args:
        job: The job.
        snapshot: The machine's state.
        cancelled: Whether to give up.

    Raises:
        UserError: Such a job cannot be predicted.
        ToolError: The prediction failed.
        Cancelled: `cancelled` returned true.
    """
    asked = estimate(
        load_spec(job.run_dir.job_file),
        question.shared(),
        present=snapshot.gpus,
        ours=snapshot.our_pids,
        claims=snapshot.claims,
        cancelled=cancelled,
    )
    return list(islice(asked.alternatives(), _FITS))


# -- overview -------------------------------------------------------------------------------


_LEAST, _MOST = 8, 24  # lines of curve and samples
_DEVICES: Final = 0.3  # share of the lines, at most
_AIRY: Final = 30  # lines from which blank lines separate sections
_NEWS: Final = 5  # lines, including the checkpoint


class OverviewPane(Pane):
    """State, loss, newest samples, devices and events on one screenful; more when scrolled."""

    KEYS: ClassVar = (
        *scrolling(),
        *(
            Key(
                f"try_fit({number})",
                str(number + 1),
                str(number + 1),
                f"change {number + 1}",
                f"Resume with change {number + 1} of those predicted to fit",
                line=False,
            )
            for number in range(_FITS)
        ),
        Key("fold", "space", "space", "traceback", "Show or fold the traceback", line=False),
        Key("read_log", "enter", "enter", "log", "Read the failed rank's log", line=False),
        Key("edit_job", "e", "e", "edit", "Edit a queued job; copy any other", line=False),
        Key("copy_path", "y", "y", "copy path", "Copy the run directory's path"),
        Key("copy_all", "Y,shift+y", "Y", "copy all", "Copy the full overview as text"),
    )
    BINDINGS: ClassVar = bindings_of("overview", KEYS)

    @dataclass
    class Fitting(Message):
        """A thread has predicted what would fit; empty if nothing would, or if that is unknown."""

        steps: list[Step]

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
        self._fits: list[Step] | None = None
        self._asked: float | None = None  # the end of the attempt for which that was predicted
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
        if glance_rows.out_of_memory(look) and self._asked != look.job.ended:
            self._asked, self._fits = look.job.ended, None
            work = partial(self._predict, look.job, self._snapshot or Snapshot(t=look.t))
            self.run_worker(work, group="fits", exclusive=True, exit_on_error=False, thread=True)
        self.fill()

    def _predict(self, job: Job, snapshot: Snapshot) -> None:
        """Predict in a thread."""
        worker, steps = get_current_worker(), []
        try:
            steps = find_fits(job, snapshot, lambda: worker.is_cancelled)
        except Cancelled:
            return
        except (UserError, ToolError):
            pass  # the general advice needs no prediction
        self.post_message(self.Fitting(steps))

    @on(Fitting)
    def _predicted(self, message: Fitting) -> None:
        self._fits = message.steps
        self.fill()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.fill)

    def fill(self) -> None:
        """Show the newest data; unchanged lines are not repainted."""
        look, width = self.look, self.lines.scrollable_content_region.width
        if look is None or not width:
            return
        height = self.page.size.height
        snapshot = self._snapshot or Snapshot(t=look.t)
        head = glance_rows.head_rows(look, width)
        urgent = glance_rows.start_rows(look, width)
        urgent += glance_rows.failure_rows(look, width, unfolded=self._unfolded, fits=self._fits)
        gap = [_BLANK] if height >= _AIRY else []
        head += [*gap, *urgent] if urgent else []
        devices = glance_rows.device_part(look, snapshot, width, max(3, int(height * _DEVICES) - 1))
        news = glance_rows.news_rows(look, width, _NEWS)
        parts = [part for part in (devices, news) if part]
        rows = [row for part in parts for row in (*gap, *part)]
        self.head.show(head)
        self._show_pictures(look, height - len(head) - len(rows))
        self.lines.show([*rows, _BLANK, *detail_rows(look, self._gpus(look), width)])

    def _show_pictures(self, look: Look, room: int) -> None:
        """Size curve and samples to fill the rest of the first screenful."""
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

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave number keys to the tabs while they offer no change."""
        if action != "try_fit":
            return True
        offered = (
            self._fits if self.look is not None and glance_rows.out_of_memory(self.look) else None
        )
        return isinstance(parameters[0], int) and parameters[0] < len(offered or ())

    def action_try_fit(self, number: int) -> None:
        """Ask whether to resume with a change, or to copy the job if a resume cannot make it."""
        if self._fits and isinstance(self.screen, JobActions):
            self.screen.resume_with(self._fits[number].changes)

    async def action_read_log(self) -> None:
        """Open the log of the failed rank, or of the first rank if none has failed."""
        if self.look is not None:
            await self.screen.run_action(f"show_log({glance_rows.failed_rank(self.look) or 0})")

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
