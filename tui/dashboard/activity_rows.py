"""The line about the selected job: current phase, progress, or why it ended."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from jobs.queue.states import PAUSED, State
from tui.look.snapshot import FIRST_STEP
from tui.text.format import Row, Span, bar, cut, duration, pace, spent, state_text
from tui.widgets.job_rows import GLYPHS

if TYPE_CHECKING:
    from jobs.queue.store import Job
    from jobs.run.eventlog import Phase
    from tui.look.snapshot import JobView

_MOST_LINES = 3
_LEAST_BAR = 12  # columns
# What the next request to stop would do, by how often it was asked for.
_ON_X = {0: " · x twice: SIGTERM", 1: " · x twice: SIGTERM", 2: " · x again: SIGKILL"}


def activity_rows(view: JobView | None, width: int, now: float | None = None) -> tuple[Row, ...]:
    """Return one line for a running job; up to three with the reason of any other.

    Args:
        view: The job.
        width: Cells of a line.
        now: Unix seconds, to show how long a phase has taken.
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
        return _wrapped(head, _queued(job, width - _length(head)), width, "")
    hint = " · s: resume" if job.state is not State.COMPLETED else ""
    spent = f" · took {duration(job.ended - job.started)}" if job.ended and job.started else ""
    words = f"{state_text(job.state, job.reason)}{spent}{hint}"
    return _wrapped(head, words, width, "bad" if job.state in (State.FAILED, State.LOST) else "")


def _queued(job: Job, room: int) -> str:
    """Why a job waits, and the keys that change that; those of any job where there is room."""
    state = f"queued with priority {job.priority}" if job.priority else "queued"
    words = f"{state}: {job.reason or 'starts when the queue allows'}"
    if job.held:
        return f"{words} · H: release"
    if job.reason == PAUSED:
        return f"{words} · P: start queued jobs again"
    keys = " · h: hold · K J: move"
    return words + keys if len(words + keys) <= room else words


def doing_for(view: JobView, now: float | None) -> str | None:
    """Say what a job does other than steps, and for how long: `loading weights 12 s`."""
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
        done, total = view.phase.done, view.phase.total or None  # 0: nothing to do
        words, tails = doing, _shared(view.phase)
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
        tail = tails[-1]  # how long it takes says more than a longer bar
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
    """`  fsdp2: why`, or `  fsdp2`, or nothing, so that enough is left of the room for a bar."""
    if not view.strategy:
        return ""
    for words in (f"{view.strategy}: {view.strategy_reason}", view.strategy):
        if room - len(words) - 2 >= _LEAST_BAR:
            return f"  {words}"
    return ""


def _pace(view: JobView) -> list[str]:
    """How fast it trains and how long it still takes; the longest wording first."""
    now = view.progress
    if now.seconds_per_step is None:
        return []
    each = f"  {pace(now.seconds_per_step)} s/step"
    left = f"  {duration(now.eta)} left" if now.eta is not None else ""
    return [each + left, left or each]


def _shared(phase: Phase) -> list[str]:
    """How long a phase may still take and what each rank has done; the longest wording first."""
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
