"""`fsdp-tui cache`: what is cached, and clearing it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from jobs.queue.store import Store
from jobs.service.caches import clear as clear_caches
from jobs.service.caches import list_caches
from tui.cli.echo import echo
from tui.cli.job_arguments import JSON
from tui.text.format import size


@click.group()
def cache() -> None:
    """List and clear the caches."""


@cache.command(name="list")
@JSON
def list_command(as_json: bool) -> None:
    """List the caches with sizes and paths."""
    caches = list_caches(Store())
    if as_json:
        echo(json.dumps([asdict(cache) | {"path": str(cache.path)} for cache in caches]))
        return
    names = max(len(cache.name) for cache in caches)
    for cache in caches:
        counted = f"{size(cache.bytes):>10}  {cache.files:>8} files"
        echo(f"{cache.name:<{names}}  {counted}  {cache.title}  ({cache.path})")


@cache.command()
@click.argument("names", nargs=-1, metavar="[NAME …]")
@click.option("--force", is_flag=True, help="Clear them even if jobs may be using them.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@JSON
def clear(names: tuple[str, ...], force: bool, yes: bool, as_json: bool) -> None:
    """Clear the caches with these names (default: all).

    Jobs rebuild what they need. Refused while a job may be using a cache, also one of another state
    directory that shares it.
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"clear {', '.join(names) or 'all caches'}?", abort=True)
    freed = clear_caches(Store(), names, force=force)
    if as_json:
        echo(json.dumps(asdict(freed)))
    else:
        echo(f"freed {size(freed.bytes)} in {freed.files} files ({', '.join(freed.names)})")
