"""`fsdp-tui samples`: the pictures and videos that a job made of its prompts."""

from __future__ import annotations

import json

import click

from jobs.queue.store import Store
from jobs.run.samples import list_samples
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import ID, JSON
from tui.text.format import MISSING, cut, size
from tui.text.tables import table

_PROMPT = 40  # characters


@click.command()
@ID
@click.option("--step", type=click.IntRange(min=0), help="Only the samples of this step.")
@click.option("--newest", is_flag=True, help="Only the newest samples.")
@JSON
def samples(job_id: int, step: int | None, newest: bool, as_json: bool) -> None:
    """List a job's samples: step, prompt, size and path.

    \b
    fsdp-tui samples 3 --newest
    fsdp-tui samples 3 --json | jq -r '.[].picture'
    """
    found = list_samples(Store().get(job_id).run_dir)
    if newest and found:
        step = found[-1].step
    found = tuple(one for one in found if step is None or one.step == step)
    if as_json:
        echo(json.dumps([one.to_dict() for one in found]))
    elif not found:
        echo("no samples" if step is None else f"no samples of step {step}")
    else:
        rows = [
            (
                str(one.step),
                str(one.number + 1),
                cut(" ".join(one.prompt.split()) or MISSING, _PROMPT),
                "×".join(map(str, one.size)) if one.size else MISSING,
                size(one.bytes),
                str(one.video or one.picture),
            )
            for one in found
        ]
        echo(table(("STEP", "NO", "PROMPT", "PIXELS", "SIZE", "PATH"), rows))
