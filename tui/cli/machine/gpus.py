"""`fsdp-tui gpus`: the GPUs of this machine."""

from __future__ import annotations

import json

import click

from jobs import service
from jobs.machine import devices
from jobs.queue.store import Store
from tui.cli.echo import echo
from tui.cli.job_arguments import JSON
from tui.text.tables import gpu_facts, gpu_table


@click.command()
@JSON
def gpus(as_json: bool) -> None:
    """List the GPUs, their load, and the jobs that use them."""
    store = Store()
    service.refresh(store)
    present, claims = devices.gpus(), store.claims()
    if as_json:
        echo(json.dumps([gpu_facts(gpu, claims) for gpu in present]))
    else:
        echo(gpu_table(present, claims) if present else _no_gpus())


def _no_gpus() -> str:
    host = devices.host()
    return f"no GPUs on this machine; jobs run on CPU ranks ({host.cores} cores)"
