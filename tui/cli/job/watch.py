"""`fsdp-tui list --watch`: report changes of jobs line by line, for screen readers and logs.

Plain output: no colors, symbols or cursor movement; only changes are printed.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import UserError
from jobs.fleet.lines import ReportWriter
from jobs.machine import devices
from jobs.queue.states import ENDED
from jobs.service.outlook import Forecast
from tui.cli.echo import echo, pause
from tui.text.format import number, pace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jobs.machine.devices import Gpu
    from jobs.queue.store import Store

# Transient errors, such as a locked database.
_PASSES: Final = (UserError, OSError, sqlite3.Error)
_GRAIN: Final = 1 << 26  # bytes
_ENDED: Final = {str(state) for state in ENDED}
_UNITS: Final = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def watch(store: Store, every: float, *, as_json: bool = False) -> None:
    """Print the current jobs, then changes, until interrupted or until nobody reads the output.

    Args:
        store: The jobs.
        every: Seconds between refreshes.
        as_json: Print a JSON object for each job instead of sentences: first all jobs, then those
            that changed.
    """
    seen: dict[int, str] = {}
    first, problem, forecast = True, "", Forecast()
    while True:
        before = problem
        try:
            rows, problem = look(store, forecast), ""
        except _PASSES as error:
            problem = str(error) or type(error).__name__
            if problem != before:
                echo(f"fsdp-tui: warning: cannot read the jobs: {problem}; retrying", err=True)
            pause(every)
            continue
        if before:
            echo("fsdp-tui: the jobs can be read again", err=True)
        if as_json:
            lines = list(changed_objects(rows, seen))
        else:
            lines = list(changed_sentences(rows, seen, first=first))
        for line in lines:
            echo(line if as_json else f"{time.strftime('%H:%M')}  {line}")
        first = False
        pause(every)


def watch_machine(store: Store, every: float) -> None:
    """Print this machine for a fleet screen, then its changes; see `jobs.fleet.lines`.

    Args:
        store: The jobs.
        every: Seconds between refreshes.
    """
    teller, forecast = ReportWriter(), Forecast()
    echo(teller.head(version("fsdp-tui"), socket.gethostname(), devices.host().cores, every))
    while True:
        try:
            jobs, present = look(store, forecast), devices.gpus()
            claims, paused = store.claims(), store.paused
            gpus = [brief_gpu(gpu, claims) for gpu in present]
            lines = list(teller.look(time.time(), jobs, gpus, paused))
        except _PASSES as error:
            problem = str(error) or type(error).__name__
            lines = [teller.trouble(time.time(), f"cannot read the jobs: {problem}")]
        echo("\n".join(lines))
        pause(every)


def brief_gpu(gpu: Gpu, claims: Mapping[str, int]) -> dict[str, Any]:
    """Return a GPU's values for a fleet screen; memory in 64 MiB steps means fewer changes."""
    used = gpu.memory_used
    return {
        "gpu": gpu.index,
        "name": gpu.name,
        "memory_total": gpu.memory_total,
        "memory_used": None if used is None else round(used / _GRAIN) * _GRAIN,
        "utilisation": gpu.utilisation,
        "job": claims.get(gpu.uuid),
        "others": bool(devices.foreign_users([gpu], (), claims)),
        "problem": gpu.unusable,
    }


def look(store: Store, forecast: Forecast) -> list[dict[str, Any]]:
    """Return all jobs as in `list --json`, the oldest first."""
    service.refresh(store)
    present = devices.gpus()
    return service.as_dicts(store, store.all()[::-1], present, forecast)


def changed_objects(rows: Sequence[Mapping[str, Any]], seen: dict[int, str]) -> Iterator[str]:
    """Yield the objects that differ from `seen`, and update `seen`."""
    for row in rows:
        if seen.get(row["id"]) != (text := json.dumps(row)):
            seen[row["id"]] = text
            yield text
    for gone in seen.keys() - {row["id"] for row in rows}:
        del seen[gone]
        yield json.dumps({"id": gone, "state": "removed"})


def changed_sentences(
    rows: Sequence[Mapping[str, Any]], seen: dict[int, str], *, first: bool
) -> Iterator[str]:
    """Yield the sentences that differ from `seen`, and update `seen`.

    Args:
        rows: Jobs, the oldest first.
        seen: What was printed last, by job.
        first: Whether nothing was printed yet; if so, ended jobs are only counted.
    """
    ended = 0
    for row in rows:
        before, text = seen.get(row["id"]), sentence(row)
        seen[row["id"]] = text
        if first and row["state"] in _ENDED:
            ended += 1
        elif before != text:
            yield text
    for gone in sorted(seen.keys() - {row["id"] for row in rows}):
        del seen[gone]
        yield f"job {gone} was removed"
    if first:
        if not rows:
            yield "no jobs"
        elif ended:
            more = "more " if len(rows) > ended else ""
            yield f"{ended} {more}{'jobs have' if ended > 1 else 'job has'} ended"


def sentence(row: Mapping[str, Any]) -> str:
    """Describe a job: `job 3 cats is running on GPU 0: step 40 of 200, loss 0.412`."""
    state = str(row["state"])
    parts = [f"job {row['id']} {row['name']} is {state}"]
    if row["gpus"] and state not in _ENDED:
        parts[0] += f" on GPU{'s' * (len(row['gpus']) > 1)} {_and(row['gpus'])}"
    if row["step"]:
        of = f" of {row['total_steps']}" if row["total_steps"] else ""
        parts.append(f"step {row['step']}{of}")
        if row["loss"] is not None:
            parts.append(f"loss {number(row['loss'])}")
        if row["seconds_per_step"] is not None and state not in _ENDED:
            parts.append(f"{pace(row['seconds_per_step'])} seconds per step")
    about = "at least" if row["eta_at_least"] else "about"
    if row["eta"] is not None:
        parts.append(f"{about} {in_words(row['eta'])} left")
    if row["starts_in"] is not None:
        parts.append(f"starts in {about} {in_words(row['starts_in'])}")
    if row["reason"]:
        parts.append(str(row["reason"]))
    return ", ".join(parts)


def in_words(seconds: float) -> str:
    """Write a duration in its largest unit: `2 hours`, `1 minute`."""
    whole = max(1, round(seconds))
    for size, name in _UNITS:
        if whole >= size:
            count = round(whole / size)
            return f"{count} {name}{'s' * (count > 1)}"
    return "1 second"


def _and(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]
