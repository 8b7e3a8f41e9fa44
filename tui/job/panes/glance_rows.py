"""The rows of the overview: a job at a glance. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jobs.queue.states import State
from jobs.run.failure import Cause
from jobs.run.rundir import PHASES
from jobs.run.why_failed import causes_of
from jobs.supervise.remedies import RESUME, advice
from tui.dashboard.device_rows import device_head, device_rows
from tui.dashboard.panels import newest_average
from tui.job.panes.history import history_rows
from tui.job.panes.ranks import late_words
from tui.job.panes.text_pane import fact, heading
from tui.look.snapshot import FIRST_STEP
from tui.text.estimate_text import word
from tui.text.format import (
    Span,
    bar,
    duration,
    eta,
    gib,
    left_words,
    number,
    pace,
    spent,
    state_text,
)
from tui.widgets.job_rows import GLYPHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.memory.ladder import Step
    from tui.look.job_look import Look
    from tui.look.snapshot import Snapshot
    from tui.text.format import Row

_BLANK: Final[Row] = ()
_NEWEST: Final = 8  # moments to read; fewer are shown
_LEAST_BAR, _LONGEST_BAR = 8, 60  # columns
_WIDE = 80  # columns from which the largest part of the remaining time is shown
_SEPARATOR, _NARROW = "  ·  ", " · "
_DONE, _NOW = "✓", "●"


def head_rows(look: Look, width: int) -> list[Row]:
    """Return state, progress and time left; below, the newest measurements and late ranks."""
    job = look.job
    glyph, role = GLYPHS[job.state]
    if job.state.active or not job.reason or job.state is State.FAILED:
        rows = [_state_row(look, width)]
    else:
        rows = fact(glyph, state_text(job.state, job.reason), width, role, label=2)
        rows.append(_state_row(look, width, with_state=False))
    if measured := _measured(look):
        rows.append(_line(measured, width))
    if job.state.active and (late := late_words(look.view.ranks, look.t)):
        rows += fact("", f"! {late}", width, "bad", label=0)
    if job.elsewhere:
        rows += fact("", job.reason, width, "dim", label=0)
    return rows


def _state_row(look: Look, width: int, *, with_state: bool = True) -> Row:
    """Return `● running   step 131 of 240  55%  ━━━━━━┄┄┄┄  0:40 left`."""
    job, view = look.job, look.view
    glyph, role = GLYPHS[job.state]
    words = [Span(f"{glyph} {job.state}   ", role)] if with_state else []
    doing = view.doing if job.state.active else None
    now, total = view.progress, view.total_steps
    done, of, what = now.step, total, "step "
    whole = ""
    if now.eta is not None and job.state.active:
        longest, *shorter = left_words(now.eta, now.eta_parts, bool(now.eta_unknown))
        whole = longest if width >= _WIDE else (shorter or [longest])[-1]
    tail = f"  {whole}" if whole else ""
    if job.state.ended and job.started and job.ended:
        tail = f"  took {duration(job.ended - job.started)}"
    phase = view.phase
    if doing is not None:
        since = view.doing_since
        lasts = f" {spent(look.t - since)}" if since is not None and look.t - since >= 1 else ""
        words.append(Span(f"{doing}{lasts}   ", "accent"))
        counted = phase is not None and not phase.finished and doing != FIRST_STEP
        if counted and phase is not None and phase.total:
            done, of, what = phase.done, phase.total, ""
            left = phase.seconds_left
            tail = f"  {duration(left)} left" if left is not None else ""
            if whole and width >= _WIDE:
                tail += f" · {eta(now.eta, bool(now.eta_unknown))} in all"
        elif not now.step:
            return (*words, Span("…", "accent"))
    share = done / of if of else 0.0
    count = f"{what}{done} of {of}  {share:.0%}  " if of else f"{what}{done}  "
    used = sum(len(span.text) for span in words) + len(count) + len(tail)
    cells = min(_LONGEST_BAR, width - used)
    drawn = bar(share, cells, "bar") if cells >= _LEAST_BAR else ()
    return (*words, Span(count, "strong"), *drawn, Span(tail, "dim"))


def _measured(look: Look) -> list[str]:
    """Return the newest measurements, the most important first."""
    steps = look.curve.steps
    if not steps:
        return []
    last, now = steps[-1], look.view.progress
    parts = [f"loss {number(last.loss)}"]
    if last.base_loss is not None:
        parts.append(f"to the base {number(last.base_loss)}")
    if (average := newest_average(steps)) is not None:
        parts.append(f"average {number(average)}")
    if look.curve.validation is not None:
        parts.append(f"validation loss {number(look.curve.validation)}")
    if now.seconds_per_step is not None:
        parts.append(f"{pace(now.seconds_per_step)} s/step")
    if last.images_per_second:
        parts.append(f"{number(last.images_per_second, 3)} images/s")
    if last.lr is not None:
        parts.append(f"lr {number(last.lr)}")
    if last.grad_norm is not None:
        parts.append(f"grad norm {number(last.grad_norm, 3)}")
    return parts


def _line(parts: Sequence[str], width: int) -> Row:
    """Join as many of the parts as fit; the least important ones are dropped."""
    between = _SEPARATOR if len(_SEPARATOR.join(parts)) <= width else _NARROW
    line = ""
    for part in parts:
        longer = f"{line}{between}{part}" if line else part
        if line and len(longer) > width:
            break
        line = longer
    return (Span(line),)


def start_rows(look: Look, width: int) -> list[Row]:
    """List the phases before a job's first step, and how long each took."""
    job, steps = look.job, look.curve.steps
    if not job.state.active or job.started is None or (steps and steps[-1].t >= job.started):
        return []
    # Phases of earlier attempts are over.
    stages = [
        stage for stage in look.stages if stage.name != "train" and stage.since >= job.started
    ]
    first = stages[0].since if stages else None
    launched = (first if first is not None else look.t) - job.started
    rows: list[Row] = [heading("start")]
    rows.append(_stage("starting the ranks", launched, going=first is None))
    for stage in stages:
        name = PHASES.get(stage.name, stage.name)
        seconds = stage.seconds if stage.seconds is not None else look.t - stage.since
        rows.append(_stage(name, seconds, going=stage.seconds is None))
    if look.view.doing == FIRST_STEP and look.view.doing_since is not None:
        rows.append(_stage(FIRST_STEP, look.t - look.view.doing_since, going=True))
    return rows


def _stage(name: str, seconds: float, *, going: bool) -> Row:
    role = "accent" if going else "good"
    sign = Span(f"  {_NOW if going else _DONE} ", role)
    return sign, Span(f"{name:<28}", "accent" if going else ""), Span(spent(seconds), "dim")


def failure_rows(
    look: Look, width: int, *, unfolded: bool, fits: Sequence[Step] | None = None
) -> list[Row]:
    """Show the cause, the lost steps, the keys that help, and the folded traceback.

    Args:
        look: The job.
        width: Columns.
        unfolded: Show the whole traceback.
        fits: Changes predicted to fit after running out of memory; None while unknown.
    """
    job = look.job
    if job.state not in (State.FAILED, State.LOST, State.STOPPED):
        return []
    rows: list[Row] = []
    if job.state is State.FAILED:
        rows += [heading("what is wrong"), *fact("  ✗", job.reason, width, "bad", label=4)]
        if lost := lost_words(look):
            rows += fact("", lost, width, "warn", label=4)
        if out_of_memory(look):
            rows += _fitting_rows(fits, width)
    rows.append(heading("what to do"))
    # Show the keys in place of the commands.
    for words in (text for text in advice(job.state, look.failure) if text != RESUME):
        rows += fact("  ·", words, width, label=4)
    newest = look.newest
    place = f"after step {newest}" if newest is not None else "from step 0"
    rows.append(_key("s", f"resume {place}"))
    rows.append(_key("S", "resume with other settings"))
    rows.append(_key("e", "change its settings in a copy"))
    if job.state is not State.FAILED:
        return rows
    failed = causes_of(look.errors) or list(look.errors)
    rank = failed_rank(look)
    rows.append(_key("enter", f"read the log{f' of rank {rank}' if rank is not None else ''}"))
    trace = str(failed[0].get("trace", "")).rstrip().splitlines() if failed else []
    if trace:
        what = "fold" if unfolded else f"show its {len(trace)} lines"
        rows += [(Span(f"  {'▾' if unfolded else '▸'} ", "dim"), Span(f"traceback of rank {rank}"))]
        rows[-1] = (*rows[-1], Span("   space", "accent"), Span(f" {what}", "dim"))
        if unfolded:
            rows += [(Span(f"    {line}", "dim"),) for line in trace[:-1]]
            rows += fact("", trace[-1], width, "bad", label=4)
    return rows


def lost_words(look: Look) -> str:
    """Say which steps a failure has lost, and why; "" if none."""
    done, newest, every = look.view.progress.step, look.newest or 0, look.saves_every
    lost = done - newest
    if look.job.state is not State.FAILED or lost <= 0:
        return ""
    which = f"{lost} step{'s' * (lost > 1)} {'are' if lost > 1 else 'is'} lost"
    if not every:
        return f"{which}: it saves only at the end" if every == 0 else which
    due = math.ceil(((done - 1) // every + 1) * every)  # a checkpoint that was due has failed
    first = "first" if look.newest is None else "next"
    return f"{which}: the {first} save was due at step {due}"


def out_of_memory(look: Look) -> bool:
    """Return whether the job failed because a GPU ran out of memory."""
    failure = look.failure
    failed = look.job.state is State.FAILED and failure is not None
    return failed and failure is not None and failure.cause is Cause.GPU_MEMORY


def _fitting_rows(fits: Sequence[Step] | None, width: int) -> list[Row]:
    """List the changes that would fit, each with its key."""
    if fits is None:
        return [heading("would fit"), (Span("  predicting …", "dim"),)]
    if not fits:
        return [heading("would fit"), (Span("  no change is predicted to be enough", "dim"),)]
    rows: list[Row] = [heading("would fit (predicted)")]
    for key, step in enumerate(fits, 1):
        changes = ", ".join(f"{name} {word(value)}" for name, value in step.changes.items())
        cost = f" · {step.cost}" if step.cost else ""
        text = f"{changes} · {gib(step.after.high)} GiB{cost}"
        head, *more = fact(f"  {key}", text, width, label=4)
        rows += [(Span(head[0].text, "accent"), *head[1:]), *more]
    return rows


def failed_rank(look: Look) -> int | None:
    """Return the rank that failed first; None if no single rank did."""
    if look.failure is not None and look.failure.rank is not None:
        return look.failure.rank  # one that was killed has reported nothing
    failed = causes_of(look.errors) or look.errors
    return int(failed[0]["rank"]) if failed else None


def _key(key: str, does: str) -> Row:
    return Span(f"  {key:<6}", "accent"), Span(does)


def device_part(look: Look, snapshot: Snapshot, width: int, room: int) -> list[Row]:
    """Return the rows of the job's GPUs as on the dashboard, or of its ranks on the CPU.

    Args:
        look: The job.
        snapshot: The dashboard's newest snapshot.
        width: Columns.
        room: Lines available.
    """
    if not look.job.state.active:
        return []
    gpus = tuple(gpu for gpu in snapshot.gpus if gpu.uuid in look.job.gpus)
    mine = replace(snapshot, t=look.t, jobs=(look.view,), gpus=gpus)
    head = device_head(mine, width, room)
    if not look.job.here:
        # Nodes other than this one are known only through their ranks.
        mine = replace(mine, host=None)
    rows = device_rows(mine, width, room - (head is not None), look.job.id)
    most = max(room, 1) * 2
    return [*([head] if head else []), *rows[:most]]


def news_rows(look: Look, width: int, room: int) -> list[Row]:
    """Show the newest checkpoint and the newest events, the latest last."""
    saved = f"step-{look.newest}" if look.newest is not None else "none yet"
    saved += "  ·  exported" if look.exported else ""
    saved += f"  ·  pushed step {look.push.pushed[-1]}" if look.push.pushed else ""
    saved += "  ·  6: all" if look.newest is not None else ""
    rows: list[Row] = [(Span("checkpoint  ", "title"), Span(saved))]
    happened = history_rows(look.history[-_NEWEST:], look.moments[-_NEWEST:], width)
    happened = [row for row in happened if row and row[0].role != "title"]  # drop the date rows
    return [*rows, *happened[-max(1, room - 1) :]]
