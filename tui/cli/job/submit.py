"""`fsdp-tui submit` and `run`: queue a job."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs import service
from jobs.paths import state_home
from jobs.queue.store import Store
from jobs.service.plan import plan_submit
from jobs.service.replay import resolved
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import FLAGS, JSON, TEMPLATE, WORDS, JobCommand, read_job
from tui.cli.job.checkpoints import tell
from tui.cli.job.follow import follow_job
from tui.cli.prepare.fetch import FETCH, offer

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command(cls=JobCommand, context_settings=FLAGS)
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


@click.command(cls=JobCommand, context_settings=FLAGS)
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


@contextlib.contextmanager
def _looked_at() -> Iterator[Store]:
    """Open the store for reading; where there is no database yet, none is created."""
    if (state_home() / "jobs.db").exists():
        yield Store()
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as none:
        yield Store(Path(none))
