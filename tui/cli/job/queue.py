"""Commands about the queue, and requests to running jobs: stop, save, sample."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from jobs import service
from jobs.queue.job import why_after
from jobs.queue.store import Store
from tui.cli.echo import echo
from tui.cli.job_arguments import ID, IDS, IDS_TO_STOP, for_each

if TYPE_CHECKING:
    from jobs.queue.job import Place


@click.command()
@IDS_TO_STOP
@click.option("--now", is_flag=True, help="Send SIGKILL immediately, without a checkpoint.")
def stop(job_ids: tuple[int, ...], now: bool) -> int:
    """Stop jobs after the current step, with a checkpoint. Again: SIGTERM, then SIGKILL."""
    store = Store()
    return for_each(job_ids, lambda job: echo(service.stop(store, job, now=now)))


@click.command()
@IDS
def hold(job_ids: tuple[int, ...]) -> int:
    """Keep queued jobs waiting until they are released."""
    store = Store()

    def act(job_id: int) -> None:
        service.hold(store, job_id)
        echo(f"job {job_id} is held; `fsdp-tui release {job_id}` lets it start")

    return for_each(job_ids, act)


@click.command()
@IDS
@click.option("--now", is_flag=True, help="Also if it waits for jobs that may still complete.")
def release(job_ids: tuple[int, ...], now: bool) -> int:
    """Let held jobs start again.

    A job that is not held but waits for one that failed, was stopped, lost or removed (--after)
    no longer waits for any.
    """
    store = Store()

    def act(job_id: int) -> None:
        job = service.hold(store, job_id, False, now=now)
        waits = f": {why}" if (why := why_after(job)) else ""
        echo(f"job {job_id} is {job.state}{waits}")

    return for_each(job_ids, act)


@click.command()
@ID
@click.option("--first", "place", flag_value="first", help="Move it to the front.")
@click.option("--up", "place", flag_value="up", help="Move it one place up.")
@click.option("--down", "place", flag_value="down", help="Move it one place down.")
@click.option("--last", "place", flag_value="last", help="Move it to the back.")
@click.option("--priority", type=int, help="Jobs of higher priority start first.")
def move(job_id: int, place: Place | None, priority: int | None) -> None:
    """Move a queued job: --first, --up, --down, --last, or --priority N."""
    if place is None and priority is None:
        raise click.UsageError("choose one of --first, --up, --down, --last or --priority N")
    service.move(Store(), job_id, to=place, priority=priority)
    echo(f"job {job_id} moved")


@click.command()
@click.option("--off", is_flag=True, help="Start queued jobs again.")
def pause(off: bool) -> None:
    """Start no queued job until `pause --off`; running jobs continue."""
    service.pause(Store(), not off)
    paused = "the queue is paused; `fsdp-tui pause --off` resumes it"
    echo("the queue is running" if off else paused)


@click.command(name="save-now")
@ID
def save_now(job_id: int) -> None:
    """Ask a running job to write a checkpoint after the current step."""
    service.request(Store(), job_id, "save_now")
    echo(f"job {job_id} saves after the current step")


@click.command(name="sample-now")
@ID
def sample_now(job_id: int) -> None:
    """Ask a running job to sample after the current step."""
    service.request(Store(), job_id, "sample_now")
    echo(f"job {job_id} samples after the current step")


@click.command()
@IDS
@click.option("--keep-files", is_flag=True, help="Remove the job but keep its run directory.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def remove(job_ids: tuple[int, ...], keep_files: bool, yes: bool) -> int:
    """Remove ended jobs and delete their run directories."""
    store = Store()
    if not (yes or keep_files) and sys.stdin.isatty():
        roots = ", ".join(str(store.get(job_id).run_dir.root) for job_id in job_ids)
        click.confirm(f"delete {roots} with all checkpoints and exports?", abort=True)

    def act(job_id: int) -> None:
        service.remove(store, job_id, files=not keep_files)
        echo(f"job {job_id} removed")

    return for_each(job_ids, act)


@click.command()
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    required=True,
    metavar="N",
    help="Keep the newest N ended jobs.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def prune(keep_last: int, yes: bool) -> None:
    """Remove old ended jobs and their files."""
    store = Store()
    ended = [job for job in store.all() if job.state.ended][keep_last:]
    if ended and not yes and sys.stdin.isatty():
        names = ", ".join(f"{job.id} {job.name}" for job in ended[:8])
        more = f" and {len(ended) - 8} more" if len(ended) > 8 else ""
        click.confirm(f"delete {names}{more} with checkpoints and exports?", abort=True)
    removed = service.prune(store, keep_last)
    echo(f"removed {len(removed)} job{'s' * (len(removed) != 1)}")
