"""The group of all commands. It imports only the one that is run; `--on` runs it elsewhere."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class CommandGroup(click.Group):
    """A group whose help lists its commands under headings.

    Its commands run on another machine where `--on` names one.
    """

    def __init__(self, *, sections: Mapping[str, Mapping[str, str]], **options: Any) -> None:
        """
        Args:
            sections: Heading → command → `module:attribute`.
            options: See `click.Group`.
        """
        places = {name: place for names in sections.values() for name, place in names.items()}
        super().__init__(commands=_Commands(places), **options)
        self._sections = sections

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            return None
        return self.commands[cmd_name]  # `get` would hide a KeyError of the command's own module

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self._sections.items():
            room = formatter.width - 6 - max(map(len, names))
            rows = [(name, self.commands[name].get_short_help_str(room)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Leave the words after `--on BOX` to the box's fsdp-tui, whatever its version."""
        if ctx.params.get("on") is None or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        return args[0], _THERE, args


class _Commands(MutableMapping[str, click.Command]):
    """Commands by name. A command's module is imported on first access.

    To import all of them would take a fifth of the dashboard's start. A mapping, because click
    looks for similar names in it.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places: dict[str, str | click.Command] = dict(places)

    def __getitem__(self, name: str) -> click.Command:
        place = self._places[name]
        if isinstance(place, str):
            module, _, attribute = place.partition(":")
            place = self._places[name] = getattr(import_module(module), attribute)
        assert isinstance(place, click.Command)
        return place

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._places[name] = command

    def __delitem__(self, name: str) -> None:
        del self._places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _run_there(words: tuple[str, ...]) -> int:
    from tui.cli.fleet.on_box import run_on  # only where --on is given

    context = click.get_current_context().parent
    assert context is not None
    group = context.command
    assert isinstance(group, click.Group)
    return run_on(context.params["on"], list(words), group.get_command(context, words[0]))


_THERE: Final = click.Command(
    "on",
    params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
    callback=_run_there,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)


def _boxes(ctx: click.Context, param: click.Parameter, start: str) -> list[CompletionItem[str]]:
    from jobs.fleet.config import read_fleet  # only while a shell completes

    with suppress(UserError):
        names = [box.name for box in read_fleet().machines]
        return [CompletionItem(name) for name in names if name.startswith(start)]
    return []


ON: Final = click.option(
    "--on",
    metavar="BOX",
    shell_complete=_boxes,
    help="Run it on a machine of machines.yaml, over ssh.",
)
