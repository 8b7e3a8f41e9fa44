"""`fsdp-tui templates`: what a new job can begin from, beside a job file of its own."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import click

from jobs.spec.file.templates import list_templates, templates_home
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import JSON, warn
from tui.text.format import cut

if TYPE_CHECKING:
    from jobs.spec.file.templates import Template


@click.command()
@JSON
def templates(as_json: bool) -> None:
    """List the templates for `submit --template NAME`: your own and the families' presets.

    Save your own in the dashboard's form (^t), or put job files into the directory printed
    at the end; they may be incomplete.
    """
    listed, problems = list_templates()
    for problem in problems:
        warn(problem)
    if as_json:
        echo(json.dumps([_facts(template) for template in listed]))
        return
    longest = max(len(template.name) for template in listed)
    room = max(20, shutil.get_terminal_size((100, 24)).columns - longest - 2)
    for template in listed:
        echo(f"{template.name.ljust(longest)}  {cut(template.about, room)}".rstrip())
    echo(f"\nYours are in {templates_home()}")


def _facts(template: Template) -> dict[str, object]:
    return {
        "name": template.name,
        "title": template.title,
        "about": template.about,
        "path": str(template.path) if template.path else None,
        "values": dict(template.values),
    }
