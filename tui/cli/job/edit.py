"""`fsdp-tui edit`: describe a job that waits in the queue otherwise; it keeps its place."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.errors import StateError, UserError
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.service import edit as jobs_edit
from jobs.service.plan import plan_change
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.warnings import find_warnings
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import FLAGS, ID, JSON, JobCommand, warn
from tui.cli.job.checkpoints import tell

if TYPE_CHECKING:
    from jobs.queue.store import Job
    from jobs.spec.job_spec import JobSpec

_HEADER = """\
# Job {id} “{name}”, queued. Save and quit the editor to change it; quit without
# saving to keep it as it is. Missing keys have their defaults; `fsdp-tui keys` lists all.
"""


@click.command(cls=JobCommand, context_settings=FLAGS)
@ID
@click.option(
    "--dry-run",
    "--dry_run",
    is_flag=True,
    help="Validate and print the complete job; change nothing.",
)
@JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def edit(job_id: int, words: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Edit a queued job in place: [--key=value …], or its file in $EDITOR.

    \b
    fsdp-tui edit 4 --max_train_steps=500 --gpus=2,3
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
    if values:
        spec = _checked(load_spec(job.run_dir.job_file, values, on_note=warn))
        _carry_out(store, job_id, spec, before, dry_run, as_json)
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
    store: Store, job_id: int, spec: JobSpec, before: JobSpec, dry_run: bool, as_json: bool
) -> None:
    if dry_run:
        plan = plan_change(store, job_id, spec)
        tell(plan)
        facts = plan.spec.to_dict()
        echo(json.dumps(facts) if as_json else dump_spec(plan.spec), nl=as_json)
        return
    job, plan = jobs_edit.change(store, job_id, spec, before)
    tell(plan)
    echo(json.dumps(_facts(job, plan.changes)) if as_json else f"job {job.id} changed")


def _checked(spec: JobSpec) -> JobSpec:
    """As `submit` takes it."""
    for warning in find_warnings(spec):
        warn(warning)
    return settle(spec)


def _draft(job: Job, before: JobSpec) -> Path:
    """Return a file to edit.

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
    """Let the user edit a job file; None if it was not changed.

    Raises:
        UserError: What was written describes no job; it is kept.
    """
    text = path.read_text(encoding="utf-8")
    while True:
        click.edit(filename=str(path))
        if path.read_bytes() == text.encode():
            return None
        try:
            return _checked(load_spec(path, on_note=warn))
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
