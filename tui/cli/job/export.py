"""`fsdp-tui export`: a checkpoint as what stock tools load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import click

from jobs.export import export_checkpoint
from jobs.queue.store import Store
from jobs.spec.keys.export import ExportDtype, ExportFormat
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import JSON
from tui.cli.common.progress_line import ProgressLine


@click.command()
@click.argument("job_id", metavar="ID", type=int)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step of the checkpoint to export (default: the newest).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Output directory (default: a new one in the run directory).",
)
@click.option(
    "--dtype",
    type=click.Choice([*get_args(ExportDtype), "fp8"]),
    help="Precision (default: the job's export_dtype); fp8 for single files.",
)
@click.option(
    "--as",
    "kind",
    type=click.Choice(["diffusers", "single-file"]),
    default="diffusers",
    help="A full model as a diffusers directory, or as one file for ComfyUI and Forge.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(get_args(ExportFormat)),
    help="Key names of the LoRA's tensors; can be repeated.",
)
@click.option("--no-ema", is_flag=True, help="Export the raw weights, not their average.")
@JSON
def export(
    job_id: int,
    step: int | None,
    output: Path | None,
    dtype: ExportDtype | Literal["fp8"] | None,
    kind: str,
    formats: tuple[ExportFormat, ...],
    no_ema: bool,
    as_json: bool,
) -> None:
    """Export a checkpoint for other tools and print its path.

    The job may be running. A LoRA is written with the key names of diffusers and of other tools, a
    full model as a pipeline for from_pretrained, or with --as single-file as one file of its
    transformer for ComfyUI and Forge. Every file is read back and compared.
    """
    with ProgressLine("exporting") as line:
        made = export_checkpoint(
            Store().get(job_id),
            step,
            output=output,
            dtype=dtype,
            formats=formats,
            ema=not no_ema,
            single_file=kind == "single-file",
            progress=lambda done, total: line(done, total, f"{done} %"),
        )
    for warning in made.warnings:
        echo(f"fsdp-tui: warning: {warning}", err=True)
    echo(json.dumps(asdict(made) | {"path": str(made.path)}) if as_json else str(made.path))
