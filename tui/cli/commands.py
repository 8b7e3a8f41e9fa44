"""The `fsdp-tui` command. Each subcommand reads its words, calls `jobs.service`, and prints.

Exit status: 0 done (for `run`: completed) · 1 failed · 2 bad input · 3 stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from jobs import service
from jobs.errors import UserError
from jobs.hub.pushes import Push
from jobs.launch.replay import FORMS, Form, replay, replay_facts, resolved
from jobs.machine import devices
from jobs.machine.engine_tools import ToolError
from jobs.memory.kept_prediction import facts as predicted_facts
from jobs.paths import state_home
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.queue.summaries import report_of
from jobs.queue.tables import trouble
from jobs.run.disk_space import directory_size
from jobs.service.plan import plan_submit
from jobs.slurm.answer import slurm_facts
from jobs.untrusted.text import one_line
from tui.app.start import open_dashboard
from tui.cli.common.echo import echo
from tui.cli.common.help import EXAMPLES, STATUSES
from tui.cli.common.job_arguments import FLAGS, ID, JSON, TEMPLATE, WORDS, JobCommand, read_job
from tui.cli.completion import completion
from tui.cli.fleet.fleet import fleet
from tui.cli.fleet.on_box import ON, OnBoxes, open_on
from tui.cli.job.checkpoints import checkpoints, resume, tell
from tui.cli.job.edit import edit
from tui.cli.job.export import export
from tui.cli.job.follow import follow_job, follow_log
from tui.cli.job.push import push
from tui.cli.job.queue import COMMANDS
from tui.cli.job.samples import samples
from tui.cli.job.watch import watch, watch_machine
from tui.cli.machine.cache import cache
from tui.cli.machine.doctor import doctor
from tui.cli.machine.gpus import gpus
from tui.cli.machine.notify import notify
from tui.cli.machine.selftest import selftest
from tui.cli.machine.settings import settings
from tui.cli.machine.web import web
from tui.cli.prepare.data import data
from tui.cli.prepare.detect import detect
from tui.cli.prepare.diff import diff
from tui.cli.prepare.estimate import estimate_job
from tui.cli.prepare.families import families
from tui.cli.prepare.fetch import FETCH, fetch, offer
from tui.cli.prepare.import_job import import_job
from tui.cli.prepare.keys import keys
from tui.cli.prepare.templates import templates
from tui.text.tables import describe, job_table

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> NoReturn:
    """Run the command line; what a person did wrong is one line on standard error, status 2."""
    try:
        status = cli.main(standalone_mode=False, prog_name="fsdp-tui")
    except UserError as error:
        _complain(str(error), 2)
    except ToolError as error:
        _complain(str(error), 1)
    except sqlite3.Error as error:
        _complain(str(trouble(error)), 1)
    except click.ClickException as error:
        _complain(_with_way_out(error), 2)
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted", 130)
    except BrokenPipeError:  # `fsdp-tui list | head`
        sys.stderr.close()
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


def _with_way_out(error: click.ClickException) -> str:
    """Add a pointer to --help where click suggests nothing."""
    message = error.format_message()
    if not message.startswith("No such") or "Did you mean" in message:
        return message
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "fsdp-tui"
    return f"{message.rstrip('.')}; `{path} --help` lists the options"


@click.group(
    cls=OnBoxes,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{EXAMPLES}\n{STATUSES}",
)
@click.version_option(package_name="fsdp-tui", prog_name="fsdp-tui")
@click.option("--read-only", is_flag=True, help="Open the dashboard in read-only mode.")
@click.option("--ascii", "plain", is_flag=True, help="Draw the dashboard in ASCII only.")
@ON
@click.pass_context
def cli(context: click.Context, read_only: bool, plain: bool, on: str | None) -> int | None:
    """Train diffusion models on several GPUs from the terminal.

    Without a command, opens the dashboard. Jobs run on their own: close the dashboard or the
    connection, and come back to them later.
    """
    if context.invoked_subcommand is None:
        if on is not None:
            return open_on(on, ["--read-only"] * read_only + ["--ascii"] * plain)
        open_dashboard(Store(), read_only=read_only, plain=plain)
    elif read_only or plain:
        raise click.UsageError(
            "--read-only and --ascii apply to the dashboard only, not to commands"
        )
    return None


@cli.command()
@click.option(
    "--headless", is_flag=True, help="Follow the job here instead of opening the dashboard."
)
def demo(headless: bool) -> int:
    """Teach a small FLUX.1 to draw hearts: a LoRA on 2 ranks, in about 2 minutes without a GPU."""
    from tui.cli.demo import results_of, start_demo

    store = Store()
    job = start_demo(store, say=echo)
    if headless:
        status = follow_job(store, job.id)
    else:
        open_dashboard(store, select=job.id)
        status = 0
    for line in results_of(job):
        echo(line)
    return status


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--family", default="flux", show_default=True, help="Model family.")
@click.option("--flavour", help="Model flavour (default: the family's main one).")
@JSON
def toy(directory: Path, family: str, flavour: str | None, as_json: bool) -> None:
    """Write a small real model (DIRECTORY/model) and captioned images (DIRECTORY/data)."""
    from tui.cli.demo import write_toy

    where = write_toy(directory, family, flavour)
    echo(json.dumps(where) if as_json else f"{where['model']}\n{where['data']}")


@cli.command(cls=JobCommand, context_settings=FLAGS)
@click.option(
    "--dry-run",
    "--dry_run",
    is_flag=True,
    help="Validate and print the complete job; queue nothing.",
)
@FETCH
@TEMPLATE
@JSON
@WORDS
def submit(
    words: tuple[str, ...], template: str | None, fetch: bool, dry_run: bool, as_json: bool
) -> None:
    """Queue a job and print its id.

    Every key of a job file is also a flag (`fsdp-tui keys` lists them); flags win over the file.
    Spelling is flexible: --lora_rank=8 and --lora-rank 8 are the same. A switch takes true, yes,
    on, 1 or no value; =no or --no-KEY turns it off. None unsets a key. Lists may use commas or
    JSON, or repeat the flag. An invalid flag is an error, and nothing is queued. The file may be
    - for standard input.

    \b
    fsdp-tui submit job.yaml --gpus=0,1 --strategy=fsdp2
    fsdp-tui submit job.yaml --fsdp-state-dict-type full --no-gradient-checkpointing
    fsdp-tui submit job.yaml --accelerate_config=my_config.yaml --dry-run
    fsdp-tui submit --template "my flux" --dataset=cats
    """
    spec = read_job(words, template=template)
    with _looked_at() if dry_run else contextlib.nullcontext(Store()) as store:
        plan = plan_submit(store, spec, offer(spec, fetch=fetch, dry_run=dry_run))
    tell(plan)
    if dry_run:
        values = plan.spec.to_dict()
        echo(json.dumps(values) if as_json else resolved(plan.spec), nl=as_json)
        return
    job = service.carry_out(store, plan)
    if as_json:
        facts = {"id": job.id, "run_dir": str(job.run_dir.root), "changes": plan.changes}
        echo(json.dumps(facts))
    else:
        echo(str(job.id))


@cli.command(cls=JobCommand, context_settings=FLAGS)
@FETCH
@TEMPLATE
@WORDS
def run(words: tuple[str, ...], template: str | None, fetch: bool) -> int:
    """Queue a job and follow it until it ends.

    Takes the same flags as submit. Ctrl-C asks the job to stop; again forces it.
    Exit status: 0 completed, 3 stopped, 1 failed, 2 bad input.

    \b
    fsdp-tui run job.yaml --max_train_steps=10 && fsdp-tui list
    """
    store, spec = Store(), read_job(words, template=template)
    plan = plan_submit(store, spec, offer(spec, fetch=fetch))
    tell(plan)
    return follow_job(store, service.carry_out(store, plan).id)


@cli.command(name="list")
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
@JSON
def list_jobs(forever: bool, interval: float, machine: bool, as_json: bool) -> None:
    """List all jobs, newest first.

    --watch prints plain sentences and redraws nothing, for screen readers and logs. With --json,
    the JSON objects of all jobs come first, one per line, then those that changed. With --machine
    too, later lines have only what changed, and each update ends with a line that has its time.
    """
    if machine and not (forever and as_json):
        raise click.UsageError("--machine needs --watch and --json")
    store = Store()
    if forever:
        with contextlib.suppress(KeyboardInterrupt):  # as it is meant to end
            if machine:
                watch_machine(store, interval)
            else:
                watch(store, interval, as_json=as_json)
        return
    service.refresh(store)
    present = devices.gpus()
    rows = service.as_dicts(store, store.all(), present)
    echo(json.dumps(rows) if as_json else job_table(rows))


@cli.command()
@ID
@click.option(
    "--as",
    "form",
    type=click.Choice(FORMS),
    help="Print the job to recreate it elsewhere: as a file, as flags, or as a shell "
    "script with the accelerate launch command.",
)
@JSON
def show(job_id: int, form: Form | None, as_json: bool) -> None:
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
        echo(json.dumps(replay_facts(job, form)) if as_json else replay(job, form))
        return
    facts = service.as_dict(store, job, devices.gpus()) | slurm_facts(store, job)
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
    facts["sharding"], facts["warnings"] = report.sharding, list(report.warnings)
    facts["validation"] = [[step, _finite(loss)] for step, loss in report.validations]
    facts["memory"] = {"measure": report.measure, "peaks": report.peaks}
    facts["prediction"] = predicted_facts(job.run_dir, report.measure, report.peaks)
    echo(json.dumps(facts) if as_json else describe(facts))


@cli.command()
@ID
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@click.option("--rank", type=int, default=0, show_default=True, help="Which log to show.")
@click.option("--launcher", is_flag=True, help="Show the log of accelerate launch.")
@click.option("--supervisor", is_flag=True, help="Show the log of the supervisor.")
def logs(job_id: int, follow: bool, rank: int, launcher: bool, supervisor: bool) -> None:
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
    follow_log(store, job_id, path, forever=follow)


@cli.command()
@ID
@click.option("--now", is_flag=True, help="Send SIGKILL immediately, without a checkpoint.")
def stop(job_id: int, now: bool) -> None:
    """Stop a job after the current step, with a checkpoint. Again: SIGTERM, then SIGKILL."""
    echo(service.stop(Store(), job_id, now=now))


for command in (
    data,
    detect,
    doctor,
    estimate_job,
    fleet,
    gpus,
    families,
    fetch,
    cache,
    resume,
    checkpoints,
    export,
    push,
    import_job,
    keys,
    completion,
    settings,
    web,
    samples,
    diff,
    edit,
    templates,
    selftest,
    notify,
    *COMMANDS,
):
    cli.add_command(command)


@contextlib.contextmanager
def _looked_at() -> Iterator[Store]:
    """The jobs, for who changes nothing: where there are none yet, no database is made for it."""
    if (state_home() / "jobs.db").exists():
        yield Store()
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as none:
        yield Store(Path(none))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _complain(text: str, status: int) -> NoReturn:
    echo(f"fsdp-tui: {one_line(' '.join(text.split()))}", err=True)
    sys.exit(status)
