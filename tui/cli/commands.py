"""The `fsdp-tui` command. Each subcommand parses its arguments, calls `jobs.service`, and prints.

Exit status: 0 done (for `run`: completed) · 1 failed · 2 bad input · 3 stopped.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

import tui.cli.completion  # noqa: F401  registers shell completion
from jobs.errors import UserError
from jobs.machine.engine_tools import ToolError
from jobs.queue.store import Store
from jobs.queue.tables import trouble
from jobs.untrusted.text import one_line
from tui.app.start import open_dashboard
from tui.cli.echo import echo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


# -- command group --------------------------------------------------------------------------
# The group of all commands. It imports only the one that runs; `--on` runs it elsewhere.


class CommandGroup(click.Group):
    """A group whose help lists its commands under headings.

    With `--on`, its commands run on another machine.
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
        # `get` would hide a KeyError raised by the command's own module.
        return self.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self._sections.items():
            room = formatter.width - 6 - max(map(len, names))
            rows = [(name, self.commands[name].get_short_help_str(room)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Leave the arguments after `--on BOX` to the box's fsdp-tui, whatever its version."""
        if ctx.params.get("on") is None or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        return args[0], _THERE, args


class _Commands(MutableMapping[str, click.Command]):
    """Commands by name. A command's module is imported on first access.

    Importing all of them would take a fifth of the dashboard's startup time. This is a mapping
    because click looks up similar names in it.
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
    from tui.cli.on_box import run_on  # needed only with --on

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
    from jobs.fleet.config import read_fleet  # needed only for shell completion

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


# -- commands -------------------------------------------------------------------------------


# Heading → command → `module:attribute`. A module is imported when its command is needed.
COMMANDS: Final[dict[str, dict[str, str]]] = {
    "Begin": {
        "demo": "tui.cli.demo:demo",
        "toy": "tui.cli.demo:toy",
        "doctor": "tui.cli.machine.doctor:doctor",
        "selftest": "tui.cli.machine.doctor:selftest",
        "notify": "tui.cli.machine.settings:notify",
        "import": "tui.cli.prepare.import_job:import_job",
        "families": "tui.cli.prepare.families:families",
        "detect": "tui.cli.prepare.detect:detect",
        "templates": "tui.cli.prepare.keys:templates",
        "keys": "tui.cli.prepare.keys:keys",
        "fetch": "tui.cli.prepare.fetch:fetch",
    },
    "Train": {
        "submit": "tui.cli.job.submit:submit",
        "run": "tui.cli.job.submit:run",
        "data": "tui.cli.prepare.data:data",
        "estimate": "tui.cli.prepare.estimate:estimate_job",
        "resume": "tui.cli.job.outputs:resume",
        "export": "tui.cli.job.outputs:export",
        "lora": "tui.cli.prepare.lora:lora",
        "push": "tui.cli.job.outputs:push",
    },
    "Look": {
        "list": "tui.cli.job.show:list_jobs",
        "show": "tui.cli.job.show:show",
        "logs": "tui.cli.job.show:logs",
        "samples": "tui.cli.job.outputs:samples",
        "diff": "tui.cli.prepare.keys:diff",
        "checkpoints": "tui.cli.job.outputs:checkpoints",
        "gpus": "tui.cli.machine.gpus:gpus",
        "fleet": "tui.cli.fleet:fleet",
        "web": "tui.cli.machine.web:web",
    },
    "Steer": {
        "edit": "tui.cli.job.submit:edit",
        "stop": "tui.cli.job.queue:stop",
        "save-now": "tui.cli.job.queue:save_now",
        "sample-now": "tui.cli.job.queue:sample_now",
        "hold": "tui.cli.job.queue:hold",
        "release": "tui.cli.job.queue:release",
        "move": "tui.cli.job.queue:move",
        "pause": "tui.cli.job.queue:pause",
    },
    "Clean up": {
        "remove": "tui.cli.job.queue:remove",
        "prune": "tui.cli.job.queue:prune",
        "cache": "tui.cli.machine.cache:cache",
    },
    "Set up": {
        "settings": "tui.cli.machine.settings:settings",
        "completion": "tui.cli.completion:completion",
    },
}

_EXAMPLES: Final = """\b
Examples:
  fsdp-tui demo                                     try it, no GPU needed
  fsdp-tui toy t                                    a small model and images, for the next line
  fsdp-tui run --pretrained_model_name_or_path t/model --dataset t/data --resolution 96
  fsdp-tui submit job.yaml --gpus=0,1 --lora-rank 32
  fsdp-tui submit job.yaml --dry-run                validate and print the job, queue nothing
  fsdp-tui show 3 --as flags                        flags that recreate job 3
  fsdp-tui --on trainer2 submit job.yaml            on another machine; see fsdp-tui fleet --help
"""
_STATUSES: Final = """\b
Exit status:
  0  done; of run: the job completed     2    bad input: the error is on stderr
  1  failed; of run: the job failed      4    of estimate: the job does not fit
  3  of run: the job was stopped         130  interrupted
"""


def main() -> NoReturn:
    """Run the command line; a user error is one line on standard error and exit status 2."""
    try:
        status = cli.main(standalone_mode=False, prog_name="fsdp-tui")
    except UserError as error:
        _complain(str(error), 2)
    except ToolError as error:
        _complain(str(error), 1)
    except sqlite3.Error as error:
        _complain(str(trouble(error)), 1)
    except _BARE_GROUP as error:
        echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        _complain(_with_way_out(error), 2)
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted", 130)
    except BrokenPipeError:  # for example `fsdp-tui list | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # for example a full or unresponsive disk
        place = f"{error.filename}: " if error.filename else ""
        _complain(f"{place}{error.strerror or error}", 1)
    sys.exit(status if isinstance(status, int) else 0)


# A group without a command raises its help as the message; older versions of click print it.
_BARE_GROUP: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())


def _with_way_out(error: click.ClickException) -> str:
    """Add a pointer to --help where click suggests nothing."""
    message = error.format_message()
    if not message.startswith("No such") or "Did you mean" in message:
        return message
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "fsdp-tui"
    return f"{message.rstrip('.')}; `{path} --help` lists the options"


@click.group(
    cls=CommandGroup,
    sections=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{_EXAMPLES}\n{_STATUSES}",
)
@click.version_option(package_name="fsdp-tui", prog_name="fsdp-tui")
@click.option("--read-only", is_flag=True, help="Open the dashboard in read-only mode.")
@click.option("--ascii", "plain", is_flag=True, help="Draw the dashboard in ASCII only.")
@ON
@click.pass_context
def cli(context: click.Context, read_only: bool, plain: bool, on: str | None) -> int | None:
    """Train diffusion models on several GPUs from the terminal.

    Without a command, opens the dashboard. Jobs run on their own: close the dashboard or the
    connection, and come back to them later.
    """
    if context.invoked_subcommand is None:
        if on is not None:
            from tui.cli.on_box import open_on  # needed only with --on

            return open_on(on, ["--read-only"] * read_only + ["--ascii"] * plain)
        open_dashboard(Store(), read_only=read_only, plain=plain)
    elif read_only or plain:
        raise click.UsageError(
            "--read-only and --ascii apply to the dashboard only, not to commands"
        )
    return None


def _complain(text: str, status: int) -> NoReturn:
    echo(f"fsdp-tui: {one_line(' '.join(text.split()))}", err=True)
    sys.exit(status)
