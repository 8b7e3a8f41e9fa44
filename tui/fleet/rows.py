"""The rows of the fleet screen: the boxes, and details of one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.queue.states import ACTIVE, State
from tui.fleet.words import brief_status, counts, eta_of, gpus_text, is_free, order_of, status_text
from tui.text.format import (
    Row,
    Span,
    bar,
    cut,
    gib,
    left,
    load_role,
    number,
    pace,
    percent,
    ranges,
    right,
    sparkline,
    steps_text,
)
from tui.widgets.job_rows import GLYPHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.fleet.lines import BoxGpu, BoxJob, Snapshot
    from jobs.fleet.watch import BoxView

_SIGNS: Final = {
    "here": ("●", "good"),
    "connecting": ("◔", "accent"),
    "silent": ("◑", "warn"),
    "away": ("✗", "bad"),
}
_MOST_CELLS: Final = 16  # of GPUs, one each
_MOST_NAME: Final = 20
_ROOMY: Final = 96  # cells of a line from which headings are whole words
_NUMBERS: Final = (("run", "wait", "fail"), 5), (("running", "queued", "failed"), 8)
_MOST_ENDED: Final = 50  # jobs
_ACTIVE: Final = frozenset(map(str, ACTIVE))
_MEMORY_BAR: Final = 16


def box_rows(views: Sequence[BoxView], now: float, width: int) -> list[Row]:
    """Return a heading, and a row for each box.

    Args:
        views: The boxes; at least one.
        now: Our monotonic clock.
        width: Cells of a line.
    """
    names = min(_MOST_NAME, max(7, *(len(view.box.name) for view in views)))
    most = max((len(view.snapshot.gpus) for view in views if view.snapshot), default=0)
    cells = max(4, min(_MOST_CELLS, most))
    free = max(9, *(len(gpus_text(view)) for view in views))
    words, number_width = _NUMBERS[width >= _ROOMY]
    head = (
        f"  {left('machine', names)}  {left('gpus', cells)} {left('', free)}"
        + "".join(right(word, number_width) for word in words)
        + "  doing"
    )
    return [
        (Span(cut(head, width), "title"),),
        *(_box_row(view, now, width, names, cells, free, number_width) for view in views),
    ]


def _box_row(
    view: BoxView, now: float, width: int, names: int, cells: int, free: int, number_width: int
) -> Row:
    status = view.status_at(now)
    sign, role = _SIGNS[status]
    row = [Span(f"{sign} ", role), Span(left(view.box.name, names) + "  ", "strong")]
    room = width - names - 4
    if view.snapshot is None:
        text = f"{status_text(view, now)}: {view.why}" if view.why else status_text(view, now)
        return (*row, Span(cut(text, room), role))
    stale = status not in ("here", "connecting")
    row += _gpu_cells(view.snapshot.gpus, cells, stale)
    row.append(Span(" " + left(gpus_text(view), free), "dim"))
    roles = ("good", "", "bad")
    for count, counted in zip(counts(view.snapshot.jobs), roles, strict=True):
        row.append(Span(right(str(count), number_width), counted if count and not stale else "dim"))
    room -= cells + 1 + free + 3 * number_width + 2
    if room > 0:
        doing, shade = (brief_status(view, now), role) if stale else _doing(view.snapshot)
        row.append(Span("  " + cut(doing, room), shade))
    return tuple(row)


def _gpu_cells(gpus: Sequence[BoxGpu], cells: int, stale: bool) -> list[Span]:
    """Return each GPU's utilization in a cell; old values are dim."""
    if not gpus or len(gpus) > cells:
        return [Span(" " * cells)]
    spans = []
    for gpu in gpus:
        role = "bad" if gpu.problem else "accent" if gpu.job is not None else "raw"
        sign = "✗" if gpu.problem else "?" if gpu.others else sparkline([gpu.utilisation], 1)
        spans.append(Span(sign, "dim" if stale else "warn" if gpu.others else role))
    return [*spans, Span(" " * (cells - len(gpus)))]


def _doing(snapshot: Snapshot) -> tuple[str, str]:
    """Describe the first active job, or the state of the box if there is none."""
    if snapshot.problem:
        return snapshot.problem, "bad"
    active = [job for job in order_of(snapshot.jobs) if job.state in _ACTIVE]
    if active:
        job = active[0]
        done = percent(100 * job.step / job.total_steps if job.total_steps else 0)
        return " ".join([done, *([eta_of(job)] if job.eta else []), job.name]), ""
    return ("queue paused" if snapshot.paused else "idle"), "dim"


def about_rows(view: BoxView, now: float, width: int) -> list[Row]:
    """Return the details of one box: name, status, GPUs, jobs.

    Args:
        view: The box.
        now: Our monotonic clock.
        width: Cells of a line.
    """
    status = view.status_at(now)
    role = _SIGNS[status][1]
    rows: list[Row] = [(Span(cut(_title(view), width), "title"),)]
    if status != "here" or view.why:
        why = f": {view.why}" if view.why else ""
        rows += _wrapped(status_text(view, now) + why, role if status != "here" else "bad", width)
    snapshot = view.snapshot
    if snapshot is None:
        return rows
    if snapshot.newer:
        text = f"some of what it says is not known here: its fsdp-tui is {snapshot.head.version}"
        rows += _wrapped(text, "warn", width)
    rows += [_gpu_row(gpu, width) for gpu in snapshot.gpus]
    if snapshot.gpus and snapshot.jobs:
        rows.append(())
    jobs = order_of(snapshot.jobs)
    ended = [job for job in jobs if job.state not in _ACTIVE and job.state != State.QUEUED]
    shown = [*jobs[: len(jobs) - len(ended)], *ended[:_MOST_ENDED]]
    if shown:
        rows += _job_rows(shown, width)
    else:
        rows.append((Span("no jobs", "dim"),))
    return rows


def _title(view: BoxView) -> str:
    """Return `big · 8 NVIDIA H200 · gpu-3.lab · fsdp-tui 0.9`."""
    if view.snapshot is None:
        return view.box.name
    head = view.snapshot.head
    names = sorted({gpu.name for gpu in view.snapshot.gpus if gpu.name})
    cards = f" · {len(view.snapshot.gpus)} {names[0]}" if len(names) == 1 else ""
    return f"{view.box.name}{cards} · {head.host} · fsdp-tui {head.version}"


def _gpu_row(gpu: BoxGpu, width: int) -> Row:
    if gpu.problem:
        return (Span(cut(f"GPU {gpu.gpu} {gpu.problem}", width), "bad"),)
    total = gpu.memory_total or None
    share = None if total is None or gpu.memory_used is None else gpu.memory_used / total
    user = f"job {gpu.job}" if gpu.job is not None else "other processes" if gpu.others else "free"
    role = "accent" if gpu.job is not None else "warn" if gpu.others else "dim"
    return (
        Span(f"GPU {right(str(gpu.gpu), 2)} "),
        Span(right(percent(gpu.utilisation), 4) + "  "),
        *bar(share, _MEMORY_BAR, load_role(share)),
        Span(f" {right(gib(gpu.memory_used), 6)}/{gib(total)} GiB  "),
        Span(cut(user, max(0, width - 50)), role),
    )


def _job_rows(jobs: Sequence[BoxJob], width: int) -> list[Row]:
    ids = max(2, *(len(str(job.id)) for job in jobs))
    names = min(max(4, *(len(job.name) for job in jobs)), max(8, width - 64))
    steps = max(4, *(len(steps_text(job.step, job.total_steps)) for job in jobs))
    head = (
        f"{right('id', ids)} {left('name', names)} {left('state', 11)} {right('step', steps)}"
        f" {right('loss', 8)} {right('s/step', 6)} {right('eta', 8)} gpus"
    )
    return [
        (Span(cut(head, width), "title"),),
        *(_job_row(job, width, ids, names, steps) for job in jobs),
    ]


def _job_row(job: BoxJob, width: int, ids: int, names: int, steps: int) -> Row:
    glyph, role = GLYPHS[State(job.state)] if job.state in set(State) else ("?", "dim")
    active = job.state in _ACTIVE
    on = ranges(job.gpus) or f"×{job.ranks}"
    row = [
        Span(right(str(job.id), ids) + " ", "dim"),
        Span(left(job.name, names) + " ", "strong" if active else ""),
        Span(left(f"{glyph} {job.state}", 11) + " ", role),
    ]
    used = ids + names + 14
    if job.state == State.QUEUED and not job.step:
        starts = f"{eta_of(job)} · " if job.starts_in is not None else ""
        return (*row, Span(cut(starts + (job.reason or "waits"), max(0, width - used)), "warn"))
    numbers = (
        f"{right(steps_text(job.step, job.total_steps), steps)} {right(number(job.loss), 8)}"
        f" {right(pace(job.seconds_per_step), 6)} {right(eta_of(job), 8)} "
    )
    row += [Span(numbers), Span(on, "accent" if active else "dim")]
    room = width - used - len(numbers) - len(on) - 2
    if job.reason and room >= 10:
        row.append(Span("  " + cut(job.reason, room), "dim"))
    return tuple(row)


def totals(views: Sequence[BoxView], now: float) -> str:
    """Return `3 machines · 5 of 24 GPUs free · 4 running, 2 queued · 1 away`."""
    snapshots = [
        view.snapshot
        for view in views
        if view.snapshot is not None and view.status_at(now) == "here"
    ]
    gpus = [gpu for snapshot in snapshots for gpu in snapshot.gpus]
    running, queued, _ = counts(job for snapshot in snapshots for job in snapshot.jobs)
    parts = [f"{len(views)} machine{'s' * (len(views) != 1)}"]
    parts += [f"{sum(map(is_free, gpus))} of {len(gpus)} GPUs free"] if gpus else []
    parts += [f"{running} running, {queued} queued"] if snapshots else []
    for status in ("away", "silent", "connecting"):
        if count := sum(view.status_at(now) == status for view in views):
            parts.append(f"{count} {status}")
    return " · ".join(parts)


def _wrapped(text: str, role: str, width: int) -> list[Row]:
    """Wrap a text into lines of at most `width` cells."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [(Span(cut(line, width), role),) for line in (*lines, line)]
