"""`fsdp-tui push`: a job's export on the hub, by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from jobs.hub.push import push_step
from jobs.queue.store import Store
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import ID, JSON
from tui.cli.common.progress_line import ProgressLine


@click.command()
@ID
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step of the checkpoint to push (default: the export, else the newest).",
)
@click.option("--repo", metavar="ORG/NAME", help="Repository (default: the job's hub_model_id).")
@click.option("--private", is_flag=True, help="Create the repository as a private one.")
@JSON
def push(job_id: int, step: int | None, repo: str | None, private: bool, as_json: bool) -> None:
    """Push a job's export to the Hugging Face hub with a model card, and print its address.

    Works for running and ended jobs, also without push_to_hub. What is there already is not sent
    again. The card has samples, settings and the number of training images, but no captions or
    paths; validation prompts stand beside their images.

    \b
    fsdp-tui push 3 --repo me/my-lora --private
    """
    with ProgressLine("pushing") as line:
        done = push_step(
            Store().get(job_id),
            step,
            repo=repo,
            private=private or None,
            progress=lambda done, total: line(done, total, f"exporting: {done} %"),
        )
    echo(json.dumps(asdict(done)) if as_json else done.url)
