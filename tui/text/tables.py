"""Plain tables for the command line, readable by people and by `grep`. Pure."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jobs.machine.devices import foreign_users
from jobs.queue.sweeps import short_text, short_value
from jobs.run.judging import LOSS, TITLES, Measurements
from tui.text import format as formats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu

_MOST_RANK_COLUMNS = 4  # fits beside a phase's name in 60 columns


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table; columns are as wide as their widest cell, two spaces apart."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *rows]
    ]
    return "\n".join(lines)


def job_table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `fsdp-tui list`."""
    if not jobs:
        return "no jobs yet; `fsdp-tui demo` starts one, `fsdp-tui submit JOB.yaml` queues your own"
    validated = any(job.get("best") for job in jobs)
    best = ["BEST"] if validated else []
    head = ("ID", "NAME", "STATE", "STEP", "LOSS", "S/STEP", "ETA", *best, "ON", "REASON")
    rows = [
        (
            str(job["id"]),
            job["name"],
            job["state"],
            formats.steps_text(job["step"], job["total_steps"]),
            formats.number(job["loss"]),
            formats.pace(job["seconds_per_step"]),
            _eta(job),
            *([best_mark(job["best"])] if validated else []),
            _where(job),
            job["reason"],
        )
        for job in jobs
    ]
    return table(head, rows)


def sweep_table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return `fsdp-tui list --sweep NAME`: a column for each key that differs."""
    keys = list(jobs[0]["differs"]) if jobs else []
    named = [key.upper() for key in keys] or ["NAME"]
    best = {job["id"]: job["lowest"] or job["highest"] or {} for job in jobs}
    by = next((job["by"] for job in jobs if best[job["id"]]), jobs[0]["by"] if jobs else LOSS)
    judged = Measurements(by=by)
    column = judged.column.upper()
    head = ("", "ID", *named, "STATE", "STEP", "LOSS", column, "AT", "REASON")
    rows = [
        (
            formats.BEST if job["best_of_sweep"] else "",
            str(job["id"]),
            *([short_value(job["differs"].get(key)) for key in keys] or [job["name"]]),
            job["state"],
            formats.steps_text(job["step"], job["total_steps"]),
            formats.number(job["loss"]),
            formats.number(best[job["id"]].get("loss", best[job["id"]].get("score"))),
            str(best[job["id"]].get("step", formats.MISSING)),
            job["reason"],
        )
        for job in jobs
    ]
    lines = [table(head, rows)]
    if any(job["best_of_sweep"] for job in jobs):
        words = f"{judged.extreme} {judged.title}" + (f" ({column})" if by == LOSS else "")
        lines.append(f"{formats.BEST} marks the {words}, measured at step AT")
    elif by == LOSS and any(job["lowest"] for job in jobs):
        lines.append("the two experts see other noise levels, so their losses cannot be compared")
    elif by == LOSS:
        lines.append(
            "no validation loss yet: jobs measure one if validation_fraction holds data out"
        )
    else:
        lines.append(f"no {judged.title} yet: it is measured where samples are made")
    return "\n".join(lines)


def best_mark(best: Mapping[str, Any] | None) -> str:
    """Return a job's best checkpoint: `★ 500 0.3521`."""
    if not best:
        return formats.MISSING
    return f"{formats.BEST} {best['step']} {formats.number(best.get('loss', best.get('score')))}"


def describe(job: Mapping[str, Any]) -> str:
    """Return the text of `fsdp-tui show`."""
    lines = [
        f"job {job['id']}  {job['name']}",
        f"state        {formats.state_text(job['state'], job['reason'])}",
        f"step         {job['step']} of {job['total_steps'] or 'as many as its epochs have'}",
        f"loss         {formats.number(job['loss'])}",
        f"pace         {formats.pace(job['seconds_per_step'])} s/step",
        *([f"time left    {words}"] if (words := when(job)) else []),
        f"on           {_where(job)}",
        f"files        {job['run_dir']} ({formats.size(job['disk_bytes'])})",
        f"checkpoints  {formats.ranges(job['checkpoints']) or 'none'}",
    ]
    if job["sweep"]:
        own = ", ".join(short_text(key, value) for key, value in job["differs"].items())
        lines.insert(1, f"sweep        {job['sweep']}{own and f': {own}'}")
    if best := job["best"]:
        by = best.get("by", LOSS)
        what = "loss" if by == LOSS else "score"
        at = best[f"{what}_step"]
        there = "" if at == best["step"] else f", measured at step {at}"
        value = formats.number(best[what])
        lines.append(
            f"best         {formats.BEST} step {best['step']}: {TITLES[by]} {value}{there}"
        )
    if job["hub"]["pushed"]:
        lines.append(f"on the hub   {job['hub']['repo']}: {formats.ranges(job['hub']['pushed'])}")
    if job["hub"]["problem"]:
        lines.append(f"hub          the last push failed: {job['hub']['problem']}")
    if job["strategy"]:
        lines.insert(6, f"strategy     {job['strategy']}: {job['strategy_reason']}")
    if job.get("global_batch"):
        lines.insert(6, f"batch        {batch_line(job['global_batch'], job['accumulation'])}")
    if job.get("slurm"):
        lines.insert(6, f"slurm        {slurm_line(job['slurm'])}")
    if job["scores"]:
        lines.insert(4, f"scores       {scores_line(job['scores'])}")
    if job["validation"]:
        lines.insert(4, f"validation   {validation_line(job['validation'])}")
    if job["memory"]["peaks"]:
        lines.append(f"memory       {memory_line(**job['memory'])}")
    if job.get("prediction"):
        lines += prediction_lines(**job["prediction"])
    lines += [f"warning      {text}" for text in job["warnings"]]
    if job["traceback"]:
        lines.append(f"traceback    {job['traceback']}")
    lines.append("history")
    lines += [
        f"  {_when(change['t'])}  {change['to']:<10} {change['reason']}"
        for change in job["history"]
    ]
    return "\n".join(lines)


def _eta(job: Mapping[str, Any]) -> str:
    """Return when a job ends or, if it is queued, when it starts."""
    if job["starts_in"] is not None:
        return f"starts in {formats.eta(job['starts_in'], job['eta_at_least'])}"
    if job["after"] is not None:
        return f"after job {job['after']}"
    left = job["eta"] if job["eta"] is not None else job["ends_in"]
    return formats.eta(left, job["eta_at_least"])


def when(job: Mapping[str, Any]) -> str:
    """Return when a job ends and starts: `starts in 0:21, done in 3:12`."""
    if job["eta"] is not None:
        return formats.left_words(job["eta"], job["eta_parts"], job["eta_at_least"])[0]
    facts = [_eta(job)] if job["starts_in"] is not None or job["after"] is not None else []
    if job["ends_in"] is not None:
        facts.append(f"done in {formats.eta(job['ends_in'], job['eta_at_least'])}")
    return ", ".join(facts)


def batch_line(samples: int, forwards: int | None) -> str:
    """Describe a step: `8 samples per step, 4 forwards on each rank`."""
    words = f"{samples} sample{'s' * (samples != 1)} per step"
    return f"{words}, {forwards} forwards on each rank" if (forwards or 1) > 1 else words


def slurm_line(facts: Mapping[str, Any]) -> str:
    """Describe a Slurm job: `job 17, RUNNING on n[1-2], asked 0:12 ago`."""
    parts = [f"job {facts['job']}"]
    if state := facts.get("state"):
        parts.append(f"{state} on {facts['nodes']}" if facts.get("nodes") else str(state))
    if facts.get("reason"):
        parts.append(str(facts["reason"]))
    if facts.get("place"):
        parts.append(f"place {facts['place']}")
    if facts.get("age") is not None:
        parts.append(f"asked {formats.duration(facts['age'])} ago")
    return ", ".join(parts)


def validation_line(measured: Sequence[Sequence[Any]]) -> str:
    """Format validation losses, the newest first: `0.231 at step 40; 0.245 at 20`."""
    newest, *before = reversed([(formats.number(loss), step) for step, loss in measured])
    return "; ".join(
        [f"{newest[0]} at step {newest[1]}", *(f"{loss} at {step}" for loss, step in before)]
    )


def scores_line(measured: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """Format the newest scores: `CLIP-T 0.3123, DINO-I 0.6121 at step 40`."""
    step, scores = measured[-1]
    each = [f"{TITLES[name]} {formats.number(value)}" for name, value in scores.items()]
    return f"{', '.join(each)} at step {step}"


def memory_line(peaks: Mapping[str, Sequence[int]], measure: str) -> str:
    """Format the highest peak of each phase: `load 1.2 GiB · forward 3.4 GiB`."""
    what = "resident" if measure == "rss" else measure
    each = " · ".join(f"{phase} {formats.size(max(ranks))}" for phase, ranks in peaks.items())
    return f"{each} ({what}, peak of any rank)"


def prediction_lines(
    strategy: str, ranks: int, device: Sequence[int], phases: Sequence[Mapping[str, Any]], **_: Any
) -> list[str]:
    """Return a rank's predicted peak per phase, and the highest measured one."""
    least, most = formats.size(device[0]), formats.size(device[1])
    lines = [f"predicted    {least} to {most} on each GPU ({strategy} on {ranks} ranks)"]
    for phase in phases:
        line = f"  {phase['name']:<13}{formats.size(phase['predicted']):>9}"
        if phase["measured"]:
            measured = formats.size(max(phase["measured"]))
            line += f"  measured {measured:>9}  {(phase['ratio'] - 1) * 100:+.1f} %"
        lines.append(line)
    return lines


def memory_table(peaks: Mapping[str, Sequence[int]]) -> str:
    """Return a row for each phase, with a column for each rank.

    If there are many ranks, show only the minimum and the maximum.
    """
    ranks = len(next(iter(peaks.values()), ()))
    if ranks <= _MOST_RANK_COLUMNS:
        head = ("phase", *(f"rank {rank}" for rank in range(ranks)))
        return table(
            head, [(phase, *map(formats.size, numbers)) for phase, numbers in peaks.items()]
        )
    rows = [
        (phase, formats.size(min(numbers)), formats.size(max(numbers)))
        for phase, numbers in peaks.items()
    ]
    return table(("phase", "least", "most"), rows)


def gpu_table(present: Sequence[Gpu], claims: Mapping[str, int]) -> str:
    """Return the table of `fsdp-tui gpus`."""
    head = ("GPU", "NAME", "MEMORY", "UTIL", "TEMP", "POWER", "USED BY")
    others = foreign_users(present, (), claims)
    rows = [
        (
            str(gpu.index),
            gpu.name,
            f"{formats.size(gpu.memory_used)} of {formats.size(gpu.memory_total)}",
            formats.MISSING if gpu.utilisation is None else f"{gpu.utilisation} %",
            formats.MISSING if gpu.temperature is None else f"{gpu.temperature} °C",
            formats.MISSING if gpu.power is None else f"{gpu.power:.0f} W",
            _holder(gpu, claims, others),
        )
        for gpu in present
    ]
    return table(head, rows)


def _holder(gpu: Gpu, claims: Mapping[str, int], others: Mapping[str, str]) -> str:
    """Return our job on the GPU, its other user, or why it is unavailable."""
    if gpu.uuid in claims:
        return f"job {claims[gpu.uuid]}"
    return gpu.unusable or others.get(gpu.uuid, "free")


def _where(job: Mapping[str, Any]) -> str:
    if job["gpus"]:
        return f"gpu {formats.ranges(job['gpus'])}"
    return f"{job['ranks']} rank{'s' * (job['ranks'] != 1)}"


def _when(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def gpu_facts(gpu: Gpu, claims: Mapping[str, int]) -> dict[str, Any]:
    """Return a GPU as JSON values (`gpus --json`)."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_total": gpu.memory_total,
        "memory_used": gpu.memory_used,
        "utilisation": gpu.utilisation,
        "temperature": gpu.temperature,
        "power": gpu.power,
        "power_limit": gpu.power_limit,
        "clock": gpu.clock,
        "throttle": gpu.throttle,
        "problem": gpu.problem,
        "mig": [asdict(instance) for instance in gpu.mig],
        "job": claims.get(gpu.uuid),
        "processes": [asdict(process) for process in gpu.processes],
    }
