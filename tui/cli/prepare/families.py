"""`fsdp-tui families`: list what can be trained, also as JSON or as the docs' table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from jobs.memory.fit import IN_TABLES, KINDS, read_smallest
from jobs.models.published_sizes import PARAMETERS, billions, by_size
from jobs.spec.families import FAMILIES, get_family
from jobs.spec.values.value_types import read_family
from tui.cli.echo import echo
from tui.cli.job_arguments import JSON

if TYPE_CHECKING:
    from jobs.spec.families import Family

_CARDS = " / ".join(map(str, IN_TABLES))


@click.command()
@click.argument("names", nargs=-1, metavar="[FAMILY …]")
@click.option("--markdown", is_flag=True, help="Print the table of docs/families.md.")
@JSON
def families(names: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """List the model families and their published flavours."""
    chosen = [get_family(read_family(name)) for name in names] or list(FAMILIES.values())
    if as_json:
        echo(json.dumps([facts(family) for family in chosen]))
    elif markdown:
        echo(table(chosen))
    else:
        echo("\n\n".join(_paragraph(family) for family in chosen))


def facts(family: Family) -> dict[str, Any]:
    """Return a family as JSON values."""
    return {
        "name": family.name,
        "title": family.title,
        "makes": "videos" if family.frame_step else "pictures",
        "pipelines": list(family.pipelines),
        "denoiser": family.transformer,
        "blocks": list(family.blocks),
        "objective": family.objective,
        "context_parallel": family.context_parallel,
        "tread": bool(family.routed_blocks),
        "no_tread_because": family.not_routed or None,
        "model_types": ["lora", "full"],
        "smallest_gpus": _of_first(family),
        "defaults": dict(family.defaults),
        "flavours": {
            name: {
                "hub_id": flavour.hub_id,
                "parameters": PARAMETERS.get(flavour.hub_id),
                "smallest_gpus": smallest_of(family, name),
                "component": family.component_of(name),
                "note": flavour.note,
                "defaults": dict(flavour.defaults),
            }
            for name, flavour in family.flavours.items()
        },
    }


def _of_first(family: Family) -> dict[str, Any] | None:
    """Return the row of the first flavor."""
    rows = read_smallest().get(family.name)
    return rows and {key: value for key, value in rows.items() if key != "sizes"}


def table(chosen: list[Family]) -> str:
    """Return a Markdown table with a row for each size of a family."""
    lines = [
        f"| family | flavours | parameters | block classes | LoRA on {_CARDS} GB GPUs "
        "| 8-bit base | 4-bit base "
        f"| full on {_CARDS} GB GPUs | context parallel | `tread` |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in chosen:
        kind = " (video)" if family.frame_step else ""
        parallel = "yes" if family.context_parallel else "no"
        for size, names in by_size(family).items():
            flavours = ", ".join(f"`{name}`" for name in names)
            blocks = ", ".join(f"`{name}`" for name in family.blocks_of(names[0]))
            lines.append(
                f"| {family.title}{kind}<br>`{family.name}` | {flavours} | {size} | {blocks} "
                + "".join(f"| {_smallest(family, names[0], kind)} " for kind in KINDS)
                + f"| {parallel} | {'no' if family.not_routed_of(names[0]) else 'yes'} |"
            )
    return "\n".join(lines)


def _smallest(family: Family, flavour: str, kind: str) -> str:
    """Return the smallest sufficient number of each card: `1, 1, 1`."""
    counts = (smallest_of(family, flavour) or {}).get(kind, {})
    return ", ".join(str(counts.get(str(card)) or "–") for card in IN_TABLES)


def smallest_of(family: Family, flavour: str) -> dict[str, Any] | None:
    """Return the smallest number of cards of each of `KINDS` for a flavor, None if unknown."""
    rows = read_smallest().get(family.name, {})
    first = next(names[0] for names in by_size(family).values() if flavour in names)
    row = rows if rows.get("flavour") == first else rows.get("sizes", {}).get(first)
    return {kind: row[kind] for kind in KINDS} if row else None


def _paragraph(family: Family) -> str:
    """Describe a family in a few lines."""
    width = max((len(name) for name in family.flavours), default=0)
    kind = ", videos" if family.frame_step else ""
    lines = [f"{family.name}  {family.title}{kind}"]
    for name, flavour in family.flavours.items():
        note = f"  ({flavour.note})" if flavour.note else ""
        size = billions(PARAMETERS.get(flavour.hub_id))
        lines.append(f"  {name:<{width}}  {size:>6}  {flavour.hub_id}{note}")
    return "\n".join(lines)
