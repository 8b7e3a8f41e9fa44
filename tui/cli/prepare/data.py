"""`fsdp-tui data`: show what a job would train on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from jobs.preflight.data import look_at_data
from jobs.spec.data_tool import NOT_NEEDED
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import FLAGS, JSON, WORDS, JobCommand, read_job
from tui.text.data_text import data_text

_WIDEST = 100  # columns; longer lines are hard to read


@click.command(cls=JobCommand, context_settings=FLAGS)
@click.option("--all", "every_file", is_flag=True, help="List every skipped file.")
@click.option(
    "--sheet",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Write a contact sheet with images of every bucket, cropped as for training.",
)
@JSON
@WORDS
def data(words: tuple[str, ...], every_file: bool, sheet: Path | None, as_json: bool) -> None:
    """Show what a job would train on.

    Lists samples, buckets, crops, and which files are skipped and why. Queues nothing.
    The first read of a large dataset takes minutes; later ones are fast.
    """
    spec = read_job(words, ignoring=NOT_NEEDED)
    with ProgressLine("reading the data") as progress:
        report = look_at_data(spec, progress, sheet=sheet).report
    if as_json:
        echo(json.dumps(report))
        return
    columns = min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    echo(data_text(report, width=columns, every_file=every_file))
