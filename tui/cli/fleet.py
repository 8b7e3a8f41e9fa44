"""`fsdp-tui fleet`: all machines of machines.yaml, once."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from jobs.errors import UserError
from jobs.fleet.config import config_file, read_fleet
from jobs.fleet.watch import FleetWatch
from tui.cli.echo import echo
from tui.cli.job_arguments import JSON
from tui.fleet.words import counts_text, eta_of, gpus_text, order_of, status_text
from tui.text.format import number, state_text, steps_text
from tui.text.tables import table

if TYPE_CHECKING:
    from jobs.fleet.config import Fleet
    from jobs.fleet.watch import BoxView


@click.command()
@click.option(
    "--patience",
    type=click.FloatRange(min=1),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait for machines that do not answer.",
)
@JSON
def fleet(patience: float, as_json: bool) -> int:
    """Show the machines of machines.yaml with their GPUs and jobs.

    The dashboard shows the same under F. `fsdp-tui --on MACHINE` runs any command there, or opens
    its dashboard. Each needs fsdp-tui and ssh without a password. Exit status: 1 if one is away.

    \b
    machines:
      - trainer1                        # as ~/.ssh/config or DNS knows it
      - name: trainer2
        ssh: me@10.0.0.7                # where its name is no ssh alias
        command: ~/venv/bin/fsdp-tui    # where its shell does not find fsdp-tui
    interval: 5                         # seconds between updates
    """
    machines = read_fleet()
    if not machines.machines:
        raise UserError(f"no machines in {config_file()}", "`fsdp-tui fleet --help` shows how")
    views = _look(machines, patience)
    now = time.monotonic()
    echo(json.dumps([_facts(view, now) for view in views]) if as_json else _tables(views, now))
    return int(any(view.status_at(now) != "here" for view in views))


def _look(machines: Fleet, patience: float) -> tuple[BoxView, ...]:
    """Query all machines; returns as soon as all have answered or failed."""
    watch, done = FleetWatch(machines), threading.Event()

    def publish(views: tuple[BoxView, ...]) -> None:
        if all(view.status in ("here", "away") for view in views):
            done.set()

    reading = threading.Thread(target=watch.run, args=(publish,))
    reading.start()
    try:
        done.wait(patience)
        return watch.views
    finally:
        watch.close()
        reading.join()


def _facts(view: BoxView, now: float) -> dict[str, Any]:
    snapshot = view.snapshot
    return {
        "name": view.box.name,
        "status": view.status_at(now),
        "why": view.why,
        "host": snapshot.head.host if snapshot else None,
        "version": snapshot.head.version if snapshot else None,
        "cores": snapshot.head.cores if snapshot else None,
        "paused": snapshot.paused if snapshot else None,
        "gpus": [gpu.model_dump() for gpu in snapshot.gpus] if snapshot else None,
        "jobs": [job.model_dump() for job in snapshot.jobs] if snapshot else None,
    }


def _tables(views: tuple[BoxView, ...], now: float) -> str:
    boxes = [
        (view.box.name, status_text(view, now), gpus_text(view), counts_text(view), view.why)
        for view in views
    ]
    jobs = [
        (
            view.box.name,
            str(job.id),
            job.name,
            state_text(job.state, job.reason),
            steps_text(job.step, job.total_steps),
            number(job.loss),
            eta_of(job),
        )
        for view in views
        if view.snapshot is not None
        for job in order_of(view.snapshot.jobs)
        if job.state not in ("completed", "stopped")
    ]
    parts = [table(("MACHINE", "STATUS", "GPUS", "JOBS", "NOTE"), boxes)]
    if jobs:
        parts.append(table(("MACHINE", "ID", "NAME", "STATE", "STEP", "LOSS", "ETA"), jobs))
    return "\n\n".join(parts)
