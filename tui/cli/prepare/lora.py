"""`fsdp-tui lora`: inspect, merge, resize and extract LoRA files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.service import loras
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import JSON
from tui.text.format import size

if TYPE_CHECKING:
    from collections.abc import Mapping

_OUTPUT = click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="What to write; must not exist.",
)
_RANK = click.option("--rank", type=click.IntRange(min=1), help="Largest rank of a layer.")
_ENERGY = click.option(
    "--energy",
    type=click.FloatRange(0, 1, min_open=True),
    help="Keep this share of each layer's squared singular values, instead of a rank.",
)
_DTYPE = click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Precision (default: the first file's; of an extracted one, bf16).",
)
_COMPONENT = click.option(
    "--component",
    type=click.Choice(["transformer", "transformer_2"]),
    help="Of a model with two denoisers: transformer is for high noise, transformer_2 for low.",
)


_CONFIG = "lora_adapter_metadata"  # peft's configuration, many lines of JSON


@click.group()
def lora() -> None:
    """Look at LoRA files; merge, resize or extract them.

    Files may have the names of diffusers, peft, kohya's scripts or ComfyUI. Models are read one
    layer at a time; a LoRA may be held in memory. What is written is read back before it gets its
    name.
    """


@lora.command("info")
@click.argument("file")
@JSON
def info(file: str, as_json: bool) -> None:
    """Show what a LoRA is for, its ranks, alphas, precision, norms and header."""
    facts = loras.info(file)
    echo(json.dumps(facts) if as_json else _described(facts))


@lora.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILE[=WEIGHT]...")
@click.option("--into", metavar="MODEL", help="Merge into a model: a directory or single file.")
@_COMPONENT
@_RANK
@_DTYPE
@_OUTPUT
@JSON
def merge(
    files: tuple[str, ...],
    into: str | None,
    component: str | None,
    rank: int | None,
    dtype: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Merge LoRAs into one, or into a model.

    One LoRA of several is exact: their ranks add, unless --rank says to cut them. Into a model, all
    are summed up in fp32 and rounded once to the model's precision.
    """
    with ProgressLine("merging") as line:
        made = loras.merge(
            files,
            output,
            into=into,
            component=component,
            rank=rank,
            dtype=dtype,
            progress=line,
        )
    _tell(made, as_json)


@lora.command("resize")
@click.argument("file")
@_RANK
@_ENERGY
@_DTYPE
@_OUTPUT
@JSON
def resize(
    file: str,
    rank: int | None,
    energy: float | None,
    dtype: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write the nearest LoRA of a lower rank, by singular values."""
    with ProgressLine("resizing") as line:
        made = loras.resize(file, output, rank=rank, energy=energy, dtype=dtype, progress=line)
    _tell(made, as_json)


@lora.command("extract")
@click.argument("tuned")
@click.argument("base")
@_RANK
@_ENERGY
@_COMPONENT
@_DTYPE
@_OUTPUT
@JSON
def extract(
    tuned: str,
    base: str,
    rank: int | None,
    energy: float | None,
    component: str | None,
    dtype: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write the LoRA that is nearest to the difference of a tuned model and its base.

    Compares the denoiser and, of SDXL and Stable Diffusion 1 and 2, the text encoders, if both
    models have them. Biases, norms and embeddings have no place in a LoRA; those that differ are
    counted. Other parts of a directory are not compared.
    """
    with ProgressLine("extracting") as line:
        made = loras.extract(
            tuned,
            base,
            output,
            rank=rank,
            energy=energy,
            component=component,
            dtype=dtype,
            progress=line,
        )
    if left := made["left_out"]:
        echo(
            f"fsdp-tui: warning: {left} other tensors differ (biases, norms, embeddings and the "
            "like), which have no place in a LoRA",
            err=True,
        )
    _tell(made, as_json)


def _tell(made: Mapping[str, Any], as_json: bool) -> None:
    for warning in made.get("warnings", ()):
        echo(f"fsdp-tui: warning: {warning}", err=True)
    if as_json:
        echo(json.dumps(made))
        return
    if kept := made.get("kept"):
        ranks = made["ranks"]
        shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        share = f" keep {kept['mean']:.2%} of the squared norm, at least {kept['least']:.2%}"
        share = share if made.get("cut", True) else ""
        echo(f"fsdp-tui: {made['modules']} modules of rank {shown}{share}", err=True)
    else:
        echo(f"fsdp-tui: {made['layers']} layers changed", err=True)
    echo(made["path"])


def _described(facts: Mapping[str, Any]) -> str:
    """Return a LoRA's facts as lines of text."""

    def counted(values: Mapping[str, int]) -> str:
        if len(values) == 1:
            return next(iter(values))
        return ", ".join(f"{value} ({count})" for value, count in values.items())

    of_texts = facts["text_modules"]
    lines = [
        f"{facts['path']} ({size(facts['bytes'])})",
        f"  family     {' or '.join(facts['families']) or 'unknown'}",
        f"  kind       {facts['kind']}, with names of {facts['names']}",
        f"  modules    {facts['modules']}" + (f", {of_texts} of text encoders" if of_texts else ""),
    ]
    if facts["ranks"]:
        lines.append(f"  rank       {counted(facts['ranks'])}")
        lines.append(f"  alpha      {counted(facts['alphas'])}")
    lines.append(f"  precision  {counted(facts['dtypes'])}")
    norms = facts["norm"]
    lines.append(f"  norm       {norms['mean']:.4g} on average; largest:")
    lines += [f"    {value:.4g}  {module}" for module, value in norms["largest"].items()]
    if facts["header"].keys() - {_CONFIG}:
        lines.append("  header")
        texts = {name: text for name, text in facts["header"].items() if name != _CONFIG}
        lines += [f"    {name}: {text}" for name, text in texts.items()]
    return "\n".join(lines)
