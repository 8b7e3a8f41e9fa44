"""Commands about checkpoints: list, verify, delete, resume from one."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from jobs import service
from jobs.errors import NotFoundError, UserError
from jobs.queue.store import Store
from jobs.resume.start_point import read_step
from jobs.run.checkpoint_list import free_bytes, list_all, verify
from jobs.service.plan import plan_resume
from jobs.spec.file.flags import parse_flags
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import FLAGS, ID, JSON, JobCommand
from tui.cli.common.progress_line import ProgressLine
from tui.text.checkpoint_text import checkpoint_table, plan_lines
from tui.text.format import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Job
    from jobs.run.checkpoint_list import Listed
    from jobs.service.plan import Plan


@click.command()
@ID
@click.argument("more", metavar="", nargs=-1)
@click.option(
    "--verify",
    "contents",
    is_flag=True,
    help="Read every byte; exit status 1 if anything is damaged.",
)
@click.option(
    "--delete",
    "names",
    multiple=True,
    metavar="STEP …",
    help="Delete these steps' checkpoints (set-aside ones by name).",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@JSON
def checkpoints(
    job_id: int,
    more: tuple[str, ...],
    contents: bool,
    names: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> int:
    """List a job's checkpoints: time, size, health, and which one a resume uses."""
    if more and not names:
        raise click.UsageError(
            f'"{more[0]}" is an extra argument; to delete it, use --delete {more[0]}'
        )
    store = Store()
    job = store.get(job_id)
    if not job.run_dir.root.is_dir():
        raise NotFoundError(
            f"the run directory of job {job_id} is gone: {job.run_dir.root}",
            f"forget the job with `fsdp-tui remove {job_id}`",
        )
    deleted = _delete(store, job, [*names, *more], ask=not yes) if names else []
    listed = list_all(job.run_dir)
    if contents:
        listed = _verify_all(listed)
    if as_json:
        facts = {
            "id": job_id,
            "checkpoints": [checkpoint.to_dict() for checkpoint in listed],
            "next": next((checkpoint.name for checkpoint in listed if checkpoint.next), None),
            "total_bytes": sum(checkpoint.bytes for checkpoint in listed),
            "free_bytes": free_bytes(job.run_dir),
            "deleted": [checkpoint.name for checkpoint in deleted],
        }
        echo(json.dumps(facts))
    else:
        for checkpoint in deleted:
            echo(f"deleted {checkpoint.name} ({size(checkpoint.bytes)})", err=True)
        echo(checkpoint_table(listed, free_bytes(job.run_dir)))
    return int(
        contents
        and any(checkpoint.damage and checkpoint.set_aside != "damaged" for checkpoint in listed)
    )


def _delete(store: Store, job: Job, words: Sequence[str], *, ask: bool) -> list[Listed]:
    names = [name for word in words for name in word.split(",") if name.strip()]
    deletable = service.find_deletable(store, job.id, names)
    if ask and sys.stdin.isatty():
        what = ", ".join(
            f"{checkpoint.name} ({size(checkpoint.bytes)})" for checkpoint in deletable
        )
        click.confirm(f"delete {what} of job {job.id} “{job.name}”?", abort=True)
    return service.delete_checkpoints(store, job.id, names)


def _verify_all(listed: Sequence[Listed]) -> list[Listed]:
    """Read all but those set aside as damaged; skip those deleted meanwhile."""
    unread = [checkpoint for checkpoint in listed if checkpoint.set_aside != "damaged"]
    total, done = sum(checkpoint.bytes for checkpoint in unread), 0
    with ProgressLine("reading checkpoints") as line:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            line(done, total, f"{size(done)} of {size(total)}")

        verified = []
        for checkpoint in listed:
            with suppress(NotFoundError):
                verified.append(verify(checkpoint, advance) if checkpoint in unread else checkpoint)
        return verified


@click.command(cls=JobCommand, context_settings=FLAGS)
@ID
@click.option(
    "--from",
    "back_to",
    metavar="STEP",
    help="Resume from this step (0: from the beginning); newer checkpoints are set "
    "aside, not deleted.",
)
@JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def resume(job_id: int, back_to: str | None, as_json: bool, words: tuple[str, ...]) -> None:
    """Resume an ended job from its newest checkpoint. [--key=value …] changes settings."""
    values, others = parse_flags(words)
    if others:
        raise UserError(f'"{others[0]}" is not a --key=value flag')
    step = read_step(back_to) if back_to is not None else None
    store = Store()
    plan = plan_resume(store, job_id, values, back_to=step)
    tell(plan)
    job = service.carry_out(store, plan)
    if as_json:
        echo(json.dumps(_resumed(job, plan)))
    else:
        echo(f"job {job.id} is {job.state}: {job.reason}")


def tell(plan: Plan) -> None:
    """Print what a submit or resume changes, on standard error."""
    for line in plan_lines(plan):
        echo(f"fsdp-tui: {line}", err=True)


def _resumed(job: Job, plan: Plan) -> dict[str, Any]:
    return {
        "id": job.id,
        "state": str(job.state),
        "reason": job.reason,
        "run_dir": str(job.run_dir.root),
        "step": plan.begin.step if plan.begin is not None else 0,
        "changes": plan.changes,
        "set_aside": [checkpoint.path.name for checkpoint in plan.rewound],
    }
