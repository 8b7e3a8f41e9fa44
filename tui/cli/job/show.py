"""`fsdp-tui list`, `show` and `logs`."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict

import click

from jobs import service
from jobs.backends import backend
from jobs.errors import UserError
from jobs.hub.pushes import Push
from jobs.machine import devices
from jobs.memory.calibration import facts as predicted_facts
from jobs.queue.job_list import report_of
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.run.disk_space import directory_size
from jobs.service.replay import FORMS, Form, replay, replay_facts
from tui.cli.echo import echo
from tui.cli.job.follow import follow_log
from tui.cli.job.watch import watch, watch_machine
from tui.cli.job_arguments import ID, JSON
from tui.text.tables import describe, job_table, sweep_table


@click.command(name="list")
@click.option(
    "-w",
    "--watch",
    "forever",
    is_flag=True,
    help="Keep running and print each change on its own line.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between updates (with --watch).",
)
@click.option(
    "--machine",
    is_flag=True,
    help="The machine and its GPUs too (with --watch --json), as the boxes screen reads it.",
)
@click.option("--sweep", metavar="NAME", help="Only a sweep's jobs: what differs, and how good.")
@click.option(
    "--state",
    "states",
    type=click.Choice([str(state) for state in State]),
    multiple=True,
    help="Only jobs in this state; can be repeated.",
)
@click.option("--name", metavar="TEXT", default="", help="Only jobs with this in their name.")
@click.option("-n", "count", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@JSON
def list_jobs(
    forever: bool,
    interval: float,
    machine: bool,
    sweep: str | None,
    states: tuple[str, ...],
    name: str,
    count: int | None,
    as_json: bool,
) -> None:
    """List all jobs, newest first.

    --watch prints plain sentences and redraws nothing, for screen readers and logs. With --json,
    the JSON objects of all jobs come first, one per line, then those that changed. With --machine
    too, later lines have only what changed, and each update ends with a line that has its time.
    """
    if machine and not (forever and as_json):
        raise click.UsageError("--machine needs --watch and --json")
    narrowed = bool(states or name or count)
    if forever and (narrowed or sweep is not None):
        raise click.UsageError("--watch shows all jobs; remove --state, --name, -n and --sweep")
    if narrowed and sweep is not None:
        raise click.UsageError("--sweep shows all jobs of a sweep; remove --state, --name and -n")
    store = Store()
    if forever:
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
            if machine:
                watch_machine(store, interval)
            else:
                watch(store, interval, as_json=as_json)
        return
    service.refresh(store)
    present = devices.gpus()
    if sweep is not None:
        rows = service.sweep_dicts(store, sweep, present)
        echo(json.dumps(rows) if as_json else sweep_table(rows))
        return
    jobs = [
        job
        for job in store.all()
        if (not states or job.state in states) and name.casefold() in job.name.casefold()
    ]
    rows = service.as_dicts(store, jobs[:count], present)
    echo(json.dumps(rows) if as_json else job_table(rows))


@click.command()
@ID
@click.option(
    "--as",
    "form",
    type=click.Choice(FORMS),
    help="Print the job to recreate it elsewhere: as a file, as flags, or as a shell "
    "script with the accelerate launch command.",
)
@click.option(
    "--public",
    is_flag=True,
    help="With --as yaml or flags: only what anyone may read; no paths, prompts or names.",
)
@JSON
def show(job_id: int, form: Form | None, public: bool, as_json: bool) -> None:
    """Show a job: state, progress, history, files.

    \b
    fsdp-tui show 3 --as yaml > again.yaml      the whole job, to edit and submit
    eval fsdp-tui submit "$(fsdp-tui show 3 --as flags)"
    fsdp-tui show 3 --as accelerate | bash      without the queue, in its own directory
    """
    store = Store()
    service.refresh(store)
    job = store.get(job_id)
    if form is not None:
        facts = replay_facts(job, form, public=public) if as_json else None
        echo(json.dumps(facts) if as_json else replay(job, form, public=public))
        return
    if public:
        raise UserError("--public goes with --as yaml or flags")
    facts = service.as_dict(store, job, devices.gpus()) | backend(job.backend).facts(store, job)
    changes = store.history(job_id)
    facts["history"] = [
        {"t": c.t, "from": c.before and str(c.before), "to": str(c.after), "reason": c.reason}
        for c in changes
    ]
    errors = job.run_dir.rank_errors() if job.state is State.FAILED else []
    facts["traceback"] = errors[0].get("traceback") if errors else None
    facts["disk_bytes"] = directory_size(job.run_dir.root)
    facts["checkpoints"] = [step for step, _ in job.run_dir.complete_checkpoints()]
    facts["hub"] = asdict(Push.read(job.run_dir))
    report = report_of(store, job)
    facts["strategy"], facts["strategy_reason"] = report.strategy, report.reason
    facts["global_batch"], facts["accumulation"] = report.global_batch, report.accumulation
    facts["sharding"], facts["warnings"] = report.sharding, list(report.warnings)
    facts["validation"] = [[step, _finite(loss)] for step, loss in report.validations]
    facts["scores"] = [
        [step, {name: _finite(score) for name, score in scores.items()}]
        for step, scores in report.scores
    ]
    facts["memory"] = {"measure": report.measure, "peaks": report.peaks}
    facts["prediction"] = predicted_facts(job.run_dir, report.measure, report.peaks)
    echo(json.dumps(facts) if as_json else describe(facts))


@click.command()
@ID
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", help="Begin with the last N lines."
)
@click.option("--rank", type=int, default=0, show_default=True, help="Which log to show.")
@click.option("--launcher", is_flag=True, help="Show the log of accelerate launch.")
@click.option("--supervisor", is_flag=True, help="Show the log of the supervisor.")
def logs(
    job_id: int, follow: bool, tail: int | None, rank: int, launcher: bool, supervisor: bool
) -> None:
    """Show the log of a rank."""
    store = Store()
    job = store.get(job_id)
    if not 0 <= rank < job.ranks:
        raise UserError(f"job {job_id} has ranks 0 to {job.ranks - 1}, not {rank}")
    path = job.run_dir.rank_log(rank)
    if launcher:
        path = job.run_dir.launcher_log
    elif supervisor:
        path = job.run_dir.supervisor_log
    if not follow and not path.exists():
        raise UserError(f"job {job_id} has no {path.name} yet ({job.state}: {job.reason})")
    follow_log(store, job_id, path, forever=follow, last=tail)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
