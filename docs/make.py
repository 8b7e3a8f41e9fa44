"""Write the parts of the documents that come from the code: `python docs/make.py`.

A made part stands between `<!-- NAME: … -->` and `<!-- /NAME -->`. `tests/test_docs.py` fails when
one is out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import errors
import setups

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.spec.families import FAMILIES  # noqa: E402
from jobs.spec.job_spec import JobSpec  # noqa: E402
from tui.cli.commands import cli  # noqa: E402
from tui.cli.prepare.families import table  # noqa: E402
from tui.cli.prepare.keys import tables  # noqa: E402
from tui.keys.actions import ACTIONS, GROUP_TITLES  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WIDTH: Final = 80  # columns of a command's help


def main() -> int:
    """Write every file whose made part has changed, and name it; `--check` only names them.

    Returns:
        The exit status: 1 if `--check` found any.
    """
    check = sys.argv[1:] == ["--check"]
    changed = {p: text for p, text in made().items() if p.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(changed))


def made() -> dict[Path, str]:
    """The documents with made parts, as they should be."""
    return {
        path: _fill(path.read_text(encoding="utf-8"), name, make())
        for path, (name, make) in _PARTS.items()
    }


def _fill(text: str, name: str, part: str) -> str:
    """Put a made part between its two comments."""
    pattern = re.compile(rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- /{name} -->)", re.S)
    filled, count = pattern.subn(lambda found: f"{found[1]}{part}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"expected one part called {name}, found {count}")
    return filled


def _keys() -> str:
    return tables(JobSpec.model_fields)


def _families() -> str:
    return table(list(FAMILIES.values()))


def _actions() -> str:
    """What the dashboard's keys do, a table for each group."""
    parts = []
    for group, title in GROUP_TITLES.items():
        rows = [f"**{title}**", "", "| key | action |", "|---|---|"]
        rows += [f"| `{one.shown}` | {one.help} |" for one in ACTIONS if one.group == group]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _commands() -> str:
    """The help of every command."""
    return "\n\n".join(
        f"### {path}\n\n```text\n{text}\n```" for path, text in _helps(cli, "fsdp-tui", None)
    )


def _helps(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[tuple[str, str]]:
    """`(path, help)` of a command and of those below it."""
    context = click.Context(
        command,
        parent,
        name,
        max_content_width=_WIDTH,
        terminal_width=_WIDTH,
        **command.context_settings,
    )
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None and not found.hidden:
                yield from _helps(found, below, context)


_PARTS: Final[dict[Path, tuple[str, Callable[[], str]]]] = {
    ROOT / "docs/job-keys.md": ("keys", _keys),
    ROOT / "docs/families.md": ("families", _families),
    ROOT / "docs/dashboard-and-keys.md": ("actions", _actions),
    ROOT / "docs/command-line.md": ("commands", _commands),
    ROOT / "docs/errors.md": ("errors", errors.tables),
    ROOT / "docs/memory-and-estimate.md": ("setups", setups.table),
    ROOT / "docs/training.md": ("unlike", setups.unlike),
}


if __name__ == "__main__":
    sys.exit(main())
