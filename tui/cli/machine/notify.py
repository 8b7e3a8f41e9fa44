"""`fsdp-tui notify`: try the notifications of `notify.yaml`."""

from __future__ import annotations

import click

from jobs.errors import UserError
from jobs.notify import config_file, deliver, read_config
from tui.cli.common.echo import echo

_FACTS = {
    "FSDP_TUI_EVENT": "test",
    "FSDP_TUI_JOB_ID": "0",
    "FSDP_TUI_JOB_NAME": "test",
    "FSDP_TUI_REASON": "sent by fsdp-tui notify",
    "FSDP_TUI_RUN_DIR": "",
    "FSDP_TUI_TITLE": "fsdp-tui: test notification",
    "FSDP_TUI_MESSAGE": "sent by fsdp-tui notify",
}


@click.command()
def notify() -> int:
    """Send a test notification to everything in notify.yaml.

    Supervisors notify you when a job has completed, stopped, failed or stalled. The file is in the
    configuration directory and must be readable only by you. Exit status: 0 if all were delivered,
    1 if not.

    \b
    command: ~/bin/tell-me            # facts in $FSDP_TUI_EVENT, _JOB_NAME, _REASON, …
    urls: [ntfy://my-topic]           # apprise's; pip install 'fsdp-tui[notify]'
    on: [completed, stopped, failed, stalled]
    stalled_after: 600                # seconds
    """
    config = read_config()
    if config is None:
        raise UserError(f"there is no {config_file()}", "`fsdp-tui notify --help` shows one")
    failed = 0
    for what, wrong in deliver(config, _FACTS):
        echo(f"{what}: {wrong or 'notified'}")
        failed += bool(wrong)
    return int(failed > 0)
