"""`fsdp-tui completion`: print the script that completes commands, keys and values in a shell."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from tui.cli.echo import echo

_VARIABLE: Final = "_FSDP_TUI_COMPLETE"


class _Bash(BashComplete):
    """Completion for bash, which splits `--key=wo` into three words and replaces the last one."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, start = super().get_completion_args()
        return [word for word in args if word != "="], start


class _WholeWord(ShellComplete):
    """Completion for other shells, which replace all of `--key=wo`, so the key must be repeated."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        items = super().get_completions(args, incomplete)
        key, equals, _ = incomplete.partition("=")
        if not (equals and key.startswith("--")):
            return items
        return [
            CompletionItem(f"{key}={item.value}", type=item.type, help=item.help)
            if item.type == "plain"
            else item
            for item in items
        ]


class _Zsh(_WholeWord, ZshComplete):
    pass


class _Fish(_WholeWord, FishComplete):
    pass


_SHELLS: Final[dict[str, type[ShellComplete]]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
for _name, _kind in _SHELLS.items():
    add_completion_class(_kind, _name)


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell completion script for commands, job ids, keys and values.

    \b
    bash   fsdp-tui completion bash > ~/.local/share/bash-completion/completions/fsdp-tui
    zsh    fsdp-tui completion zsh > "${fpath[1]}/_fsdp-tui"
    fish   fsdp-tui completion fish > ~/.config/fish/completions/fsdp-tui.fish

    Takes effect in new shells. For this one: source <(fsdp-tui completion bash)
    """
    script = _SHELLS[shell](context.find_root().command, {}, "fsdp-tui", _VARIABLE).source()
    echo(script, nl=False)
