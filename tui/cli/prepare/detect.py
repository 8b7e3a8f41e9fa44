"""`fsdp-tui detect`: list the repeated blocks of a model."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from jobs.errors import UserError
from jobs.models.blocks import detect_blocks
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import JSON
from tui.text.format import cut, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.models.blocks import BlockClass, Detection

_OTHERS = 5  # rows for classes that are not recommended; --all shows the rest


@click.command()
@click.argument("path", required=False)
@click.option(
    "--model_family", "--model-family", metavar="FAMILY", help="Model family, as in a job file."
)
@click.option(
    "--model_flavour",
    "--model-flavour",
    metavar="FLAVOUR",
    help="Published flavour (default: the family's first).",
)
@click.option(
    "--pretrained_model_name_or_path",
    "--pretrained-model-name-or-path",
    "pretrained",
    metavar="MODEL",
    help="Same as PATH.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of ranks to show sizes for.",
)
@click.option("--refresh", is_flag=True, help="Detect again, ignoring the cache.")
@click.option("--all", "every", is_flag=True, help="Show every class.")
@JSON
def detect(
    path: str | None,
    model_family: str | None,
    model_flavour: str | None,
    pretrained: str | None,
    ranks: int,
    refresh: bool,
    every: bool,
    as_json: bool,
) -> None:
    """Find a model's repeated blocks, without its weights.

    PATH is a model directory, its config.json, or a hub id in the local cache; a family and
    flavour name a published model. Put the recommended classes into
    fsdp_transformer_layer_cls_to_wrap.
    """
    if path and pretrained and path != pretrained:
        raise UserError(f'expected one model, got "{path}" and "{pretrained}"')
    with ProgressLine("building the model") as progress:
        detection = detect_blocks(
            model_family=model_family,
            model_flavour=model_flavour,
            pretrained_model=path or pretrained,
            refresh=refresh,
            progress=progress,
        )
    if as_json:
        echo(json.dumps(facts(detection, ranks)))
        return
    for line in text(detection, ranks, every=every).splitlines():
        # The paths are examples, so cutting them is fine.
        echo(cut(line, shutil.get_terminal_size().columns) if sys.stdout.isatty() else line)


def facts(detection: Detection, ranks: int) -> dict[str, Any]:
    """Return what `--json` prints; sizes in bytes of the stored weights."""
    does, width = detection.coverage(detection.recommended), detection.dtype_bytes
    values = {name: value for name, value in vars(detection).items() if name != "parts"}
    return values | {
        "classes": [
            asdict(block) | {"bytes_per_rank": _each(block.params_total, ranks) * width}
            for block in detection.classes
        ],
        "ranks": ranks,
        "recommended": detection.recommended,
        "coverage": {
            "share": does.share,
            "units": does.units,
            "largest_unit_params": does.largest,
            "largest_unit_bytes": does.largest * width,
            "root_params": does.root,
            "root_bytes": does.root * width,
            "bytes_per_rank": _each(detection.total_params, ranks) * width,
        },
    }


def text(detection: Detection, ranks: int, *, every: bool = False) -> str:
    """Return a readable description of a model's blocks."""
    does, width = detection.coverage(detection.recommended), detection.dtype_bytes
    others = [block for block in detection.classes if not block.recommended]
    shown = others if every else others[:_OTHERS]
    lines = [
        f"{detection.pretrained_model}: {detection.model_class}, "
        f"{detection.total_params / 1e9:.3f} B parameters{', cached' if detection.cached else ''}",
        "",
        *_table(
            [block for block in detection.classes if block.recommended], shown, detection, ranks
        ),
    ]
    if len(shown) < len(others):
        lines.append(f"  and {len(others) - len(shown)} more (--all)")
    if not detection.recommended:
        return "\n".join([*lines, "", "no repeated class is worth wrapping"])
    return "\n".join(
        [
            *lines,
            "",
            f"recommended: {','.join(detection.recommended)}",
            f"wraps {does.share:.1%} in {does.units} units; largest unit "
            f"{size(does.largest * width)}; root {size(does.root * width)} gathered on each rank",
        ]
    )


def _table(
    chosen: Iterable[BlockClass], others: Iterable[BlockClass], detection: Detection, ranks: int
) -> list[str]:
    wrapped = f"a rank of {ranks}" if ranks > 1 else "bytes"
    rows = [("", "class", "count", "each", "total", "share", wrapped, "e.g.")]
    rows += [
        (
            "*" if block.recommended else "",
            block.class_name,
            str(block.count),
            f"{block.params_each / 1e6:.1f} M",
            f"{block.params_total / 1e6:.1f} M",
            f"{block.share:.1%}",
            size(_each(block.params_total, ranks) * detection.dtype_bytes),
            block.sample_paths[0] if block.sample_paths else "",
        )
        for block in (*chosen, *others)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in (0, 1, 7) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _each(count: int, ranks: int) -> int:
    """Return the largest number of items on any rank."""
    return -(-count // ranks)
