"""The rows of the overview. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.memory.kept_prediction import facts_of
from jobs.queue.states import State
from jobs.run.diagnosis.why_failed import causes_of
from jobs.supervise.remedies import advice
from tui.job.panes.rank_rows import late_words
from tui.job.panes.text_rows import fact, heading, moment
from tui.text.format import Span, bar, duration, number, pace, size, state_text
from tui.text.tables import memory_table, prediction_lines
from tui.widgets.job_rows import GLYPHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.run.rundir import RankStatus
    from tui.look.job_look import Look
    from tui.text.format import Row

_TRACE: Final = 12  # lines of a traceback; its end says what happened
_BAR: Final = 40
_BLANK: Final[Row] = ()


def overview_rows(look: Look, gpus: str, width: int) -> list[Row]:
    """Everything worth knowing of a job at a glance.

    Args:
        look: The job.
        gpus: What it runs on, in words.
        width: Columns.
    """
    rows = [*_state(look, width), *_progress(look, width), *_trouble(look, width)]
    rows += [_BLANK, *_how(look, gpus, width)]
    rows += [*_memory(look), *_predicted(look)]
    return [*rows, _BLANK, *_paths(look, width)]


def _state(look: Look, width: int) -> list[Row]:
    job = look.job
    glyph, role = GLYPHS[job.state]
    words = f"{glyph} {state_text(job.state, job.reason)}"
    rows = fact("state", words, width, role)
    if todo := advice(job.state, look.failure):
        rows += fact("fix", todo, width, "accent")
    if job.state in (State.FAILED, State.LOST, State.STOPPED):
        newest = look.newest
        place = f"after step {newest}" if newest is not None else "from step 0"
        rows += fact("" if rows else "fix", f"s: resume {place}", width)
    return rows


def _progress(look: Look, width: int) -> list[Row]:
    view, now = look.view, look.view.progress
    total = view.job.total_steps
    share = now.step / total if total else 0.0
    count = f" step {now.step} of {total}  {share:.0%}"
    room = min(_BAR, width - 12 - len(count))
    rows: list[Row] = [
        (Span("progress".ljust(12), "dim"), *bar(share, room), Span(count, "strong"))
    ]
    if view.doing is not None and view.job.state.active:
        rows += fact("now", _doing(look), width, "accent")
    last = look.curve.steps[-1] if look.curve.steps else None
    facts = []
    if now.seconds_per_step is not None:
        facts.append(f"{pace(now.seconds_per_step)} s/step")
    if last is not None and last.images_per_second:
        facts.append(f"{number(last.images_per_second, 3)} images/s")
    if now.eta is not None:
        facts.append(f"{duration(now.eta)} left")
    if facts:
        rows += fact("pace", " · ".join(facts), width)
    if last is not None:
        losses = [f"loss {number(last.loss)}"]
        losses += [f"lr {number(last.lr)}"] if last.lr is not None else []
        losses += [f"grad norm {number(last.grad_norm, 3)}"] if last.grad_norm is not None else []
        if look.curve.validation is not None:
            losses.append(f"validation loss {number(look.curve.validation)}")
        rows += fact("latest", " · ".join(losses), width)
    return rows


def _doing(look: Look) -> str:
    phase = look.view.phase
    words = look.view.doing or ""
    if phase is None or not phase.total:
        return f"{words} …"
    left = f", {duration(phase.seconds_left)} left" if phase.seconds_left is not None else ""
    return f"{words} {phase.done} of {phase.total}{left}"


def _trouble(look: Look, width: int) -> list[Row]:
    """Late ranks, and the end of the traceback of the rank that failed first."""
    rows: list[Row] = []
    if look.job.state.active and (late := late_words(look.view.ranks, look.t)):
        rows += fact("late", f"! {late}", width, "bad")
    if look.job.state is State.FAILED and (errors := causes_of(look.errors)):
        lines = str(errors[0].get("trace", "")).rstrip().splitlines()[-_TRACE:]
        if lines:
            title = f"end of the traceback of rank {errors[0].get('rank')}"
            rows += [_BLANK, heading(f"{title} (3 shows its log)")]
            rows += [(Span(f"  {line}", "bad" if line is lines[-1] else "dim"),) for line in lines]
    if look.report.warnings:
        rows += [_BLANK, heading("warnings")]
        for words in dict.fromkeys(look.report.warnings):
            rows += fact("  !", words, width, "warn")
    return rows


def _how(look: Look, gpus: str, width: int) -> list[Row]:
    job, report = look.job, look.report
    ranks = f"{job.ranks} rank{'s' * (job.ranks != 1)}"
    rows = [heading("setup"), *fact("ranks", f"{ranks} on {gpus}", width)]
    if report.strategy:
        rows += fact("strategy", f"{report.strategy}: {report.reason}", width)
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
    """Peak memory per phase and rank, and how it was measured; of a running job, so far."""
    if look.report.peaks:
        return look.report.peaks, look.report.measure
    ranks = [rank for rank in look.view.ranks if rank.peaks]
    if not ranks or len(ranks) < len(look.view.ranks):
        return {}, ""
    names = [name for name in ranks[0].peaks or {} if all(name in (r.peaks or {}) for r in ranks)]
    peaks = {name: [(rank.peaks or {})[name] for rank in ranks] for name in names}
    return peaks, "rss" if _on_cpu(ranks) else "allocated"


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
    """What was predicted of a rank before it ran, beside what has been measured."""
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
    for label, words in inside:
        rows += fact(label, words, width, "dim")
    return rows
