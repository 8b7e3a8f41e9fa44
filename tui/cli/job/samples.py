"""`fsdp-tui samples`: the images and videos that a job made of its prompts."""

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
    chosen = list_samples(Store().get(job_id).run_dir)
    if newest and chosen:
        step = chosen[-1].step
    chosen = tuple(sample for sample in chosen if step is None or sample.step == step)
    if as_json:
        echo(json.dumps([sample.to_dict() for sample in chosen]))
    elif not chosen:
        echo("no samples" if step is None else f"no samples of step {step}")
    else:
        rows = [
            (
                str(sample.step),
                str(sample.number + 1),
                cut(" ".join(sample.prompt.split()) or MISSING, _PROMPT),
                "×".join(map(str, sample.size)) if sample.size else MISSING,
                size(sample.bytes),
                str(sample.video or sample.picture),
            )
            for sample in chosen
        ]
        echo(table(("STEP", "NO", "PROMPT", "PIXELS", "SIZE", "PATH"), rows))
