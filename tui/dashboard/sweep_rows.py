"""The lines of a sweep in the jobs table: a heading, and rows with the differences. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.queue.states import State
from jobs.queue.sweeps import best_job, short_text
from jobs.spec.families import compares_losses
from tui.text.format import (
    BEST,
    Row,
    Span,
    bar,
    left,
    number,
    right,
    state_text,
    steps_text,
)
from tui.widgets.job_rows import GLYPHS, eta_of, starts_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.service.outlook import Expected
    from tui.look.snapshot import JobView

_LOSS: Final = 8  # columns
_LEAST_MIDDLE: Final = 12
_LEAST_BAR: Final = 6
_LONGEST_BAR: Final = 20


class Shape(NamedTuple):
    """Widths of the columns of a sweep's rows; 0 hides one.

    Attributes:
        id: The jobs' numbers.
        label: The differences.
        middle: A job's progress, or why it waits.
        where: Its devices.
    """

    id: int
    label: int
    middle: int
    where: int


def label_of(view: JobView) -> str:
    """Return how a job differs from the others of its sweep: `lr 3e-5  r 16`."""
    texts = [short_text(key, value) for key, value in view.differs.items()]
    return "  ".join(texts) or view.job.name


def best_of(views: Sequence[JobView]) -> int | None:
    """Return the best job by what its checkpoints are judged by; None if nothing was measured."""
    measured = {view.job.id: view.judged for view in views}
    return best_job(measured, {view.job.id: view.differs for view in views})


def value_of(view: JobView) -> str:
    """Format the best of what a job's checkpoints are judged by."""
    best = view.judged.best()
    return number(best[1] if best else None)


def shape_of(views: Sequence[JobView], width: int) -> Shape:
    """Fit the columns of a sweep's jobs: differences come before progress."""
    ids = max(2, *(len(str(view.job.id)) for view in views))
    where = min(10, max(4, *(len(view.where) for view in views)))
    room = width - ids - 4 - 2 * (_LOSS + 1) - 4 - where
    label = max(8, *(len(label_of(view)) for view in views))
    label = max(8, min(label, room - _LEAST_MIDDLE))
    return Shape(ids, label, max(0, room - label), where)


def heading_row(name: str, views: Sequence[JobView], shape: Shape, *, folded: bool) -> Row:
    """Return a sweep's heading: its jobs and their differences; if collapsed, their states too."""
    words = [f"{len(views)} jobs"]
    before = shape.id + 1 + len(BEST) + 1 + shape.label + 1 + shape.middle
    if folded:
        counts = Counter(str(view.job.state) for view in views)
        words += [f"{count} {state}" for state, count in counts.items()]
        best = next((view for view in views if view.job.id == best_of(views)), None)
        if best is not None:
            words.append(f"{BEST} {label_of(best)}  {value_of(best)}")
        before += 2 * (_LOSS + 1)
    elif keys := list(views[0].differs):
        words.append(", ".join(keys))
    what = "both experts" if _is_pair(views) else "sweep"
    head = f"{'▸' if folded else '▾'} {name} {what}  "
    text = left(" · ".join(words), max(0, before - len(head)))
    row: Row = (Span(head, "title"), Span(text, "dim"))
    if not folded:
        column = next((view.judged.column for view in views if view.judged), "val")
        row = (*row, Span(f" {right('loss', _LOSS)} {right(column, _LOSS)}", "dim"))
    return row


def _is_pair(views: Sequence[JobView]) -> bool:
    """Return whether the jobs are two that train one expert of a model each.

    One of them may have been resumed with other values since.
    """
    flavours = [view.differs.get("model_flavour") for view in views]
    return len(views) == 2 and not compares_losses(flavours)


def sweep_row(
    view: JobView,
    shape: Shape,
    *,
    best: bool,
    place: str = "",
    expected: Expected | None = None,
    elsewhere: str = "",
) -> Row:
    """Return the row of a job of a sweep.

    Args:
        view: The job.
        shape: The columns.
        best: Whether it is the best of the sweep.
        place: Its position in the queue, `2nd`.
        expected: When it starts and ends.
        elsewhere: A reason that is shown elsewhere.
    """
    job = view.job
    glyph, role = GLYPHS[job.state]
    live = job.state.active
    return (
        Span(right(str(job.id), shape.id) + " ", "dim"),
        Span(BEST if best else " ", "good"),
        Span(" " + left(label_of(view), shape.label) + " ", "strong" if live or best else ""),
        *_middle(view, shape.middle, place, expected, elsewhere),
        Span(f" {right(number(view.progress.loss), _LOSS)}"),
        Span(f" {right(value_of(view), _LOSS)}", "good" if best else ""),
        Span(f"  {glyph} ", role),
        Span(left(view.where, shape.where), "accent" if live else "dim"),
    )


def _middle(view: JobView, room: int, place: str, expected: Expected | None, elsewhere: str) -> Row:
    """Return a job's progress, why it waits, or how it ended."""
    job, now = view.job, view.progress
    if job.state is State.QUEUED:
        reason = job.reason or "starts when the queue allows"
        words = [starts_words(expected, reason), "" if reason == elsewhere else reason]
        text = f"{place} {' · '.join(filter(None, words))}".strip()
        return (Span(left(text, room), "warn"),)
    if job.state.ended:
        return (Span(left(state_text(job.state, job.reason), room), "dim"),)
    steps = f" {steps_text(now.step, view.total_steps)}"
    tail = f"{steps}  {eta_of(view, expected)}"
    if view.doing and not now.step:
        return (Span(left(view.doing, room), "accent"),)
    length = min(_LONGEST_BAR, room - len(tail))
    if length < _LEAST_BAR:
        return (Span(left(tail.strip(), room)),)
    share = now.step / view.total_steps if view.total_steps else None
    return (*bar(share, length), Span(left(tail, room - length)))
