"""The rows of the overview below the glance: setup, memory, files. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from jobs.memory.kept_prediction import facts_of
from jobs.queue.states import State
from jobs.units import ranges
from tui.job.panes.text_rows import fact, heading, moment
from tui.text.format import Span, duration, size
from tui.text.tables import batch_line, memory_table, prediction_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.run.rundir import RankStatus
    from tui.look.job_look import Look
    from tui.text.format import Row

_TRACE: Final = 12  # lines of a traceback; its end says what happened
_BAR: Final = 40
_NODES: Final = 4  # that are named
_BLANK: Final[Row] = ()


def detail_rows(look: Look, gpus: str, width: int) -> list[Row]:
    """List the details beyond the glance.

    Args:
        look: The job.
        gpus: What it runs on, in words.
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
    """Peak memory per phase and rank, and how it was measured; of a running job, so far."""
    if look.report.peaks:
        return look.report.peaks, look.report.measure
    ranks = [rank for rank in look.view.ranks if rank.peaks]
    if not ranks or len(ranks) < len(look.view.ranks):
        return {}, ""
    names = [name for name in ranks[0].peaks or {} if all(name in (r.peaks or {}) for r in ranks)]
    peaks = {name: [(rank.peaks or {})[name] for rank in ranks] for name in names}
    return peaks, "rss" if _on_cpu(ranks) else "allocated"


def nodes_words(ranks: Sequence[RankStatus]) -> str:
    """Where a Slurm job's ranks say they are: `n1, n2 (4 × NVIDIA H100)`."""
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
    """Return rows that compare a rank's predicted memory with what has been measured."""
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
