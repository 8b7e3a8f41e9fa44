"""`fsdp-tui settings`: show the settings, their values, and their file."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Final

import click

from jobs.errors import UserError
from jobs.notify import config_file, deliver, read_config
from jobs.paths import ensure_private_dir
from jobs.run.rundir import write_atomic
from tui.cli.echo import echo
from tui.cli.job_arguments import JSON, warn
from tui.settings import Settings, as_file, read_settings, settings_file, text_of

_UNSET: Final = {"theme": "last used", "ascii": "auto", "keymap": "none"}
_WIDEST: Final = 96  # columns


@click.command()
@click.option("--path", "only_path", is_flag=True, help="Print only the path of the file.")
@click.option(
    "--init", is_flag=True, help="Write a file with every setting commented out, to edit."
)
@click.option("--keys", is_flag=True, help="List the actions for `keymap`, with their keys.")
@JSON
def settings(only_path: bool, init: bool, keys: bool, as_json: bool) -> None:
    """Show the dashboard's settings and where they are stored.

    \b
    fsdp-tui settings --init && $EDITOR "$(fsdp-tui settings --path)"
    """
    if only_path:
        echo(str(settings_file()))
    elif init:
        _init()
    elif keys:
        _list_keys(as_json)
    else:
        _show(as_json)


def _show(as_json: bool) -> None:
    read = read_settings()
    from tui.app.themes import THEMES  # Textual takes half a second to import
    from tui.keys.keymap import known_bindings, settle_keymap

    problems = [*read.problems, *settle_keymap(read.settings, known_bindings()).problems]
    if as_json:
        facts = {
            "path": str(settings_file()),
            "exists": settings_file().exists(),
            "problems": problems,
            "values": read.settings.model_dump(),
            "help": {name: field.description for name, field in Settings.model_fields.items()},
        }
        echo(json.dumps(facts))
        return
    there = "" if settings_file().exists() else "  (none yet; --init writes it)"
    echo(f"{settings_file()}{there}")
    width = max(40, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))
    for name, field in Settings.model_fields.items():
        value = text_of(getattr(read.settings, name)) or _UNSET[name]
        mark = " *" if name in read.settings.model_fields_set else ""
        echo(f"\n{name}: {_UNSET[name] if value == '{}' else value}{mark}")
        echo(
            textwrap.fill(
                field.description or "", width - 4, initial_indent="    ", subsequent_indent="    "
            )
        )
    echo(f"\n* set in the file.  Themes: {', '.join(theme.name for theme in THEMES)}")
    for problem in problems:
        warn(problem)


def _list_keys(as_json: bool) -> None:
    from tui.keys.keymap import known_bindings  # Textual takes half a second to import

    bindings = sorted(known_bindings().values(), key=lambda binding: binding.id)
    if as_json:
        facts = [
            {"id": binding.id, "keys": list(binding.keys), "does": binding.does}
            for binding in bindings
        ]
        echo(json.dumps(facts))
        return
    longest = max(len(binding.id) for binding in bindings)
    for binding in bindings:
        echo(f"{binding.id.ljust(longest)}  {','.join(binding.keys):<24}  {binding.does}".rstrip())


def _init() -> None:
    path = settings_file()
    if path.exists():
        raise UserError(f"{path} already exists", "edit it, or move it away")
    ensure_private_dir(path.parent)
    try:
        write_atomic(path, as_file())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from error
    echo(str(path))


# -- notify ---------------------------------------------------------------------------------
# `fsdp-tui notify`: test the notifications of `notify.yaml`.


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
