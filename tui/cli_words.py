"""How the command line reads the words that describe a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from jobs.cascade import settle
from jobs.conflicts import find_warnings
from jobs.errors import UserError
from jobs.specfile import load_spec, parse_flags

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs.spec import JobSpec

FLAGS: Final = {"ignore_unknown_options": True, "allow_extra_args": True}
JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def read_job(words: tuple[str, ...], *, ignoring: Collection[str] = ()) -> JobSpec:
    """The job of `[JOB.yaml] [--key=value …]`; warnings about it go to standard error.

    Args:
        words: What stands on the command line.
        ignoring: Keys whose conflicts do not matter here.

    Raises:
        UserError: It cannot be run as written.
    """
    values, others = parse_flags(words)
    if len(others) > 1:
        raise UserError(f'expected one JOB.yaml, got "{others[0]}" and "{others[1]}"')
    if not others and not values:
        raise UserError("no job given", "name a JOB.yaml, or give --key=value flags")
    spec = load_spec(Path(others[0]) if others else None, values, ignoring=ignoring)
    for warning in find_warnings(spec):
        click.echo(f"fsdp-tui: warning: {warning}", err=True)
    return settle(spec)
