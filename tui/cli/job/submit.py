"""`fsdp-tui submit` and `run`: queue a job."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs import service
from jobs.errors import StateError, UserError
from jobs.hub.wanted import find_missing
from jobs.paths import state_home
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.service import edit as jobs_edit
from jobs.service.plan import plan_change, plan_submit
from jobs.service.replay import resolved
from jobs.service.sweep import advice, check_count, expand, plan_all, queue_all, read_sweeps
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.warnings import find_warnings
from tui.cli import job_arguments
from tui.cli.echo import echo
from tui.cli.job.follow import follow_job
from tui.cli.job.outputs import tell
from tui.cli.prepare.fetch import FETCH, offer
from tui.text.checkpoint_text import plan_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.queue.store import Job
    from jobs.spec.job_spec import DataPlanKeys, JobSpec
    from jobs.spec.values.hub_names import HubName


@click.command(cls=job_arguments.JobCommand, context_settings=job_arguments.FLAGS)
@click.option(
    "--dry-run",
    "--dry_run",
    is_flag=True,
    help="Validate and print the complete job; queue nothing.",
)
@click.option(
    "--sweep",
    "swept",
    multiple=True,
    metavar="KEY=VALUE,VALUE",
    help="Queue a job for each value, and for each combination with further --sweep; "
    "--sweep NAME names the group.",
)
@click.option("-y", "--yes", is_flag=True, help="Queue a sweep of more than 100 jobs.")
@job_arguments.AFTER
@FETCH
@job_arguments.TEMPLATE
@job_arguments.JSON
@job_arguments.WORDS
def submit(
    words: tuple[str, ...],
    swept: tuple[str, ...],
    yes: bool,
    after: tuple[int, ...],
    template: str | None,
    fetch: bool,
    dry_run: bool,
    as_json: bool,
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
    fsdp-tui submit job.yaml --sweep learning_rate=1e-5,3e-5,1e-4 --sweep lora_rank=8,16
    fsdp-tui submit second.yaml --after 3,4
    fsdp-tui submit wan22.yaml --both-experts
    """
    keys, group = read_sweeps(swept)
    if keys and not yes:
        check_count(keys, "add --yes to queue them all")
    if group and not keys:
        words = (*words, f"--sweep={group}")
    spec = job_arguments.load_job(words, template=template)
    if keys or spec.both_experts:
        _sweep(
            spec.to_dict(only_set=True),
            keys,
            group,
            after,
            fetch=fetch,
            dry_run=dry_run,
            as_json=as_json,
        )
        return
    spec = _checked(spec)
    with _looked_at() if dry_run else contextlib.nullcontext(Store()) as store:
        plan = plan_submit(store, spec, offer(spec, fetch=fetch, dry_run=dry_run), after)
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


def _sweep(
    base: dict[str, Any],
    keys: dict[str, list[Any]],
    group: str,
    after: tuple[int, ...],
    *,
    fetch: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Queue all jobs of a sweep, or none; print their ids, one a line."""
    agreed: dict[tuple[HubName, ...], list[HubName]] = {}

    def fetched(spec: DataPlanKeys) -> list[HubName]:
        """Ask once about what several jobs lack."""
        missing = tuple(find_missing(spec))
        if missing and missing not in agreed:
            agreed[missing] = offer(spec, fetch=fetch, dry_run=dry_run)
        return agreed.get(missing, [])

    with _looked_at() if dry_run else contextlib.nullcontext(Store()) as store:
        sweep = expand(store, base, keys, group=group)
        warnings = [line for spec in sweep.specs for line in find_warnings(spec)] + advice(sweep)
        for line in dict.fromkeys(warnings):
            job_arguments.warn(line)
        plans = plan_all(store, sweep, fetched, after)
    for line in dict.fromkeys(line for plan in plans for line in plan_lines(plan)):
        echo(f"fsdp-tui: {line}", err=True)
    if dry_run:
        values = [plan.spec.to_dict() for plan in plans]
        echo(json.dumps(values) if as_json else "\n".join(spec.name for spec in sweep.specs))
        return
    jobs = queue_all(store, plans, sweep.pairs)
    if as_json:
        made = [{"id": job.id, "name": job.name, "run_dir": str(job.run_dir.root)} for job in jobs]
        echo(json.dumps({"sweep": sweep.name, "jobs": made}))
        return
    for job in jobs:
        echo(str(job.id))
    echo(f"fsdp-tui: `fsdp-tui list --sweep {sweep.name}` compares them", err=True)
    for first, second in sweep.pairs:
        pair = f"{jobs[first].id} and {jobs[second].id}"
        export = f"`fsdp-tui export {jobs[first].id} --both-experts`"
        echo(f"fsdp-tui: {pair} are one model's experts; {export} exports both", err=True)


@click.command(cls=job_arguments.JobCommand, context_settings=job_arguments.FLAGS)
@job_arguments.AFTER
@FETCH
@job_arguments.TEMPLATE
@job_arguments.WORDS
def run(words: tuple[str, ...], after: tuple[int, ...], template: str | None, fetch: bool) -> int:
    """Queue a job and follow it until it ends.

    Takes the same flags as submit. Ctrl-C asks the job to stop; again forces it.
    Exit status: 0 completed, 3 stopped, 1 failed, 2 bad input.

    \b
    fsdp-tui run job.yaml --max_train_steps=10 && fsdp-tui list
    """
    store, spec = Store(), job_arguments.read_job(words, template=template)
    plan = plan_submit(store, spec, offer(spec, fetch=fetch), after)
    tell(plan)
    return follow_job(store, service.carry_out(store, plan).id)


@contextlib.contextmanager
def _looked_at() -> Iterator[Store]:
    """Open the store read-only; do not create a database."""
    if (state_home() / "jobs.db").exists():
        yield Store()
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as none:
        yield Store(Path(none))


# -- edit -----------------------------------------------------------------------------------
# `fsdp-tui edit`: change a queued job; it keeps its place in the queue.


_HEADER = """\
# Job {id} “{name}”, queued. Save and quit the editor to change it; quit without
# saving to keep it as it is. Missing keys have their defaults; `fsdp-tui keys` lists all.
"""


@click.command(cls=job_arguments.JobCommand, context_settings=job_arguments.FLAGS)
@job_arguments.ID
@click.option(
    "--dry-run",
    "--dry_run",
    is_flag=True,
    help="Validate and print the complete job; change nothing.",
)
@job_arguments.AFTER_INSTEAD
@job_arguments.JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def edit(
    job_id: int,
    words: tuple[str, ...],
    after: tuple[int, ...] | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Edit a queued job in place: [--key=value …], or its file in $EDITOR.

    \b
    fsdp-tui edit 4 --max_train_steps=500 --gpus=2,3
    fsdp-tui edit 4 --after 2,3
    fsdp-tui edit 4
    """
    values, others = parse_flags(words)
    if others:
        raise UserError(f'"{others[0]}" is not a --key=value flag')
    store = Store()
    job = store.get(job_id)
    if job.state is not State.QUEUED:
        raise StateError(
            f"job {job_id} is {job.state}; only a queued job can be edited",
            f"`fsdp-tui show {job_id} --as yaml` prints its file, to submit as a new job",
        )
    before = load_spec(job.run_dir.job_file)
    if values or after is not None:
        spec = _checked(load_spec(job.run_dir.job_file, values, on_note=job_arguments.warn))
        _carry_out(store, job_id, spec, before, dry_run, as_json, after)
        return
    path = _draft(job, before)
    spec_or_none = _from_editor(path)
    if spec_or_none is None:
        echo(f"job {job_id} is unchanged", err=as_json)
    else:
        try:
            _carry_out(store, job_id, spec_or_none, before, dry_run, as_json)
        except UserError as error:
            raise UserError(f"{error}; your text is in {path}") from error
    path.unlink()
    path.parent.rmdir()


def _carry_out(
    store: Store,
    job_id: int,
    spec: JobSpec,
    before: JobSpec,
    dry_run: bool,
    as_json: bool,
    after: tuple[int, ...] | None = None,
) -> None:
    if dry_run:
        plan = plan_change(store, job_id, spec, follows=after)
        tell(plan)
        facts = plan.spec.to_dict()
        echo(json.dumps(facts) if as_json else dump_spec(plan.spec), nl=as_json)
        return
    job, plan = jobs_edit.change(store, job_id, spec, before, follows=after)
    tell(plan)
    echo(json.dumps(_facts(job, plan.changes)) if as_json else f"job {job.id} changed")


def _checked(spec: JobSpec) -> JobSpec:
    """Validate the job as `submit` does."""
    for warning in find_warnings(spec):
        job_arguments.warn(warning)
    return settle(spec)


def _draft(job: Job, before: JobSpec) -> Path:
    """Return the file to edit.

    Raises:
        UserError: There is no terminal to edit it in.
    """
    if not sys.stdin.isatty():
        raise UserError(
            "nothing to change", f"pass --key=value flags: fsdp-tui edit {job.id} --lora_rank=32"
        )
    text = _HEADER.format(id=job.id, name=job.name) + dump_spec(before, only_set=True)
    path = Path(tempfile.mkdtemp(prefix=f"fsdp-tui-edit-{job.id}-"), "job.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def _from_editor(path: Path) -> JobSpec | None:
    """Let the user edit a job file; return None if it is unchanged.

    Raises:
        UserError: The edited file is not a valid job; the file is kept.
    """
    text = path.read_text(encoding="utf-8")
    while True:
        click.edit(filename=str(path))
        if path.read_bytes() == text.encode():
            return None
        try:
            return _checked(load_spec(path, on_note=job_arguments.warn))
        except UserError as error:
            echo(f"fsdp-tui: {error}", err=True)
            if not click.confirm("edit it again?", default=True, err=True):
                raise UserError(f"nothing has changed; your text is in {path}") from error


def _facts(job: Job, changes: list[str]) -> dict[str, Any]:
    return {
        "id": job.id,
        "state": str(job.state),
        "reason": job.reason,
        "run_dir": str(job.run_dir.root),
        "changes": changes,
    }
