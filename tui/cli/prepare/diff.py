"""`fsdp-tui diff`: the settings in which two jobs differ."""

from __future__ import annotations

import json

import click

from jobs.queue.store import Store
from jobs.spec.file.diff import differences
from jobs.spec.file.load import load_spec
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import ID, JSON
from tui.text.tables import table
from tui.text.value_text import in_words


@click.command()
@ID
@click.argument("other", metavar="OTHER", type=int)
@JSON
def diff(job_id: int, other: int, as_json: bool) -> None:
    """Compare two jobs' settings, except their names.

    \b
    fsdp-tui diff 3 4
    """
    store = Store()
    ours, theirs = store.get(job_id), store.get(other)
    changed = differences(load_spec(ours.run_dir.job_file), load_spec(theirs.run_dir.job_file))
    if as_json:
        echo(json.dumps([difference.to_dict() for difference in changed]))
    elif not changed:
        echo(f"jobs {job_id} and {other} have the same settings")
    else:
        head = ("", "KEY", f"#{ours.id} {ours.name}", f"#{theirs.id} {theirs.name}")
        rows = [
            (
                difference.kind,
                difference.key,
                in_words(difference.before),
                in_words(difference.after),
            )
            for difference in changed
        ]
        echo(table(head, rows))
