"""The lines of the jobs table. Pure functions of a snapshot and a width."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.queue.states import State
from tui.text.format import (
    Row,
    Span,
    bar,
    cut,
    eta,
    left,
    number,
    pace,
    right,
    steps_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jobs.service.outlook import Expected
    from tui.look.snapshot import JobView, Snapshot

GLYPHS: Final[dict[State, tuple[str, str]]] = {
    State.QUEUED: ("◌", "dim"),
    State.STARTING: ("◔", "accent"),
    State.RUNNING: ("●", "good"),
    State.SAVING: ("◆", "accent"),
    State.STOPPING: ("◑", "warn"),
    State.COMPLETED: ("✓", "good"),
    State.STOPPED: ("■", "dim"),
    State.FAILED: ("✗", "bad"),
    State.LOST: ("?", "bad"),
}


_MANY: Final = 3  # queued jobs from which a shared reason is shown once


class Columns(NamedTuple):
    """Widths of the columns; 0 hides one. Chosen once for a width, so that rows align."""

    id: int
    name: int
    state: int
    bar: int
    step: int
    loss: int
    pace: int
    eta: int
    gpus: int
    why: int = 0


def columns(snapshot: Snapshot, width: int) -> Columns:
    """Fit the columns: the bar is dropped first, then pace, then ETA."""
    views = snapshot.jobs
    state = 14 if any(view.job.state is State.QUEUED for view in views) else 11  # `queued 12th`
    ids = max([2, *(len(str(view.job.id)) for view in views)])
    names = max([8, *(len(view.job.name) for view in views)])
    step = max([7, *(len(step_text(view)) for view in views)])
    gpus = max([4, *(len(view.where) for view in views)])
    chosen = Columns(ids, 0, state, 0, step, 8, 6, 8, min(gpus, 12))
    least = min(names, 10)
    if short_names((view.job.name for view in views), least):
        least = min(names, 16)  # what distinguishes the jobs of a sweep, before the bar
    for leave_out in ("pace", "eta", "loss"):
        if _used(chosen) + 1 + least > width:
            chosen = chosen._replace(**{leave_out: 0})
    if _used(chosen) + 1 + least > width:
        chosen = chosen._replace(state=11)
    spare = width - _used(chosen) - 1 - least
    name = least + max(0, min(names - least, spare - 7))  # long names before a long bar
    spare -= name - least
    chosen = chosen._replace(bar=min(14, spare - 1) if spare >= 6 else 0)
    chosen = chosen._replace(name=max(4, min(names, width - _used(chosen) - 1)))
    spare = width - _used(chosen) - chosen.name - 1 - 2
    return chosen._replace(why=spare if spare >= 16 else 0)


def short_names(names: Iterable[str], width: int) -> dict[str, str]:
    """Shorten long names so that those of a sweep stay distinguishable.

    A name loses its beginning if others begin alike, and its end if others end alike.
    """
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if len(name) > width:
            alike.setdefault(name[: width - 1], []).append(name)
    short: dict[str, str] = {}
    for group in alike.values():
        if len(group) < 2:
            continue
        tails = {name: f"…{name[1 - width :]}" for name in group}
        if len({*tails.values()}) < len(group):
            begin = _alike(group)
            end = _alike([name[begin:][::-1] for name in group])
            tails = {name: cut(f"…{name[begin : len(name) - end]}…", width) for name in group}
        short |= tails
    return short


def _alike(names: Sequence[str]) -> int:
    """Count the leading characters that all share."""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (sign, other) in pairs if sign != other), len(first))


def common_reason(views: Iterable[JobView]) -> tuple[str, int]:
    """Return the reason that most queued jobs share, and their number; "" if few do."""
    reasons = Counter(view.job.reason for view in views if view.job.state is State.QUEUED)
    reason, count = reasons.most_common(1)[0] if reasons else ("", 0)
    return (reason, count) if reason and count >= _MANY else ("", 0)


def header_row(shape: Columns) -> Row:
    parts = [
        (shape.id, "id", right),
        (shape.name, "name", left),
        (shape.state, "state", left),
        (shape.bar + 1 + shape.step if shape.bar else shape.step, "step", right),
        (shape.loss, "loss", right),
        (shape.pace, "s/step", right),
        (shape.eta, "eta", right),
        (shape.gpus, "gpus", left),
    ]
    return (Span(" ".join(fit(text, width) for width, text, fit in parts if width), "title"),)


def starts_words(expected: Expected | None, reason: str = "") -> str:
    """Say when a queued job starts: `starts in 0:21`, `after job 7`; "" if nobody knows.

    A reason that is shown with it may say already which job comes first.
    """
    if expected is None:
        return ""
    if expected.starts_in is not None:
        return f"starts in {eta(expected.starts_in, expected.at_least)}"
    words = f"after job {expected.after}" if expected.after is not None else ""
    return "" if reason.startswith("after job") else words


def job_row(
    view: JobView,
    shape: Columns,
    place: str = "",
    expected: Expected | None = None,
    *,
    name: str = "",
    elsewhere: str = "",
) -> Row:
    """Return a job's row; a job that has not started shows why it waits in place of progress.

    Args:
        view: The job.
        shape: The columns.
        place: Its position in the queue, `2nd`.
        expected: When it starts and ends.
        name: Its shortened name, if it is shortened.
        elsewhere: A reason that is shown elsewhere.
    """
    job, now = view.job, view.progress
    glyph, role = GLYPHS[job.state]
    share = now.step / view.total_steps if view.total_steps else 0.0
    live = job.state.active
    spans = [
        Span(right(str(job.id), shape.id) + " ", "dim"),
        Span(left(name or job.name, shape.name) + " ", "strong" if live else ""),
        Span(left(f"{glyph} {job.state} {place}".rstrip(), shape.state) + " ", role),
    ]
    waits = job.state is State.QUEUED and not now.step
    if waits:
        room = _doing_width(shape)
        reason = job.reason or "starts when the queue allows"
        words = [starts_words(expected, reason), "" if reason == elsewhere else reason]
        spans.append(Span(left(" · ".join(filter(None, words)), room), "warn"))
        spans.append(Span(" " + left(view.where, shape.gpus), "dim"))
        return tuple(spans)
    if shape.bar:
        spans += [*bar(share, shape.bar, "bar" if live else "dim"), Span(" ")]
    spans.append(Span(right(step_text(view), shape.step)))
    cells = [
        (shape.loss, number(now.loss), ""),
        (shape.pace, pace(now.seconds_per_step), ""),
        (shape.eta, eta_of(view, expected), ""),
    ]
    spans += [Span(" " + right(text, width), role) for width, text, role in cells if width]
    spans.append(Span(" " + left(view.where, shape.gpus), "accent" if live else "dim"))
    if shape.why and (why := view.doing if live else job.reason):
        spans.append(Span("  " + cut(why, shape.why), "accent" if live else "dim"))
    return tuple(spans)


def eta_of(view: JobView, expected: Expected | None) -> str:
    """Return the time left; before the first step, by the average of earlier jobs."""
    now = view.progress
    if now.eta is None and expected is not None and view.job.state.active:
        return eta(expected.ends_in, expected.at_least)
    return eta(now.eta, bool(now.eta_unknown))


def _doing_width(shape: Columns) -> int:
    """Return the cells from the bar to the ETA."""
    widths = [w for w in (shape.bar, shape.step, shape.loss, shape.pace, shape.eta) if w]
    return sum(widths) + len(widths) - 1


def step_text(view: JobView) -> str:
    return steps_text(view.progress.step, view.total_steps)


def _used(shape: Columns) -> int:
    """Return the cells of the fixed columns and the gaps between them, without the name."""
    widths = [width for width in shape._replace(name=0, why=0) if width]
    return sum(widths) + len(widths) - 1
