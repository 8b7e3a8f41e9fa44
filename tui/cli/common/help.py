"""`fsdp-tui --help`: commands by what they are for, examples, exit statuses."""

from __future__ import annotations

from typing import Final

import click

_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Begin": (
        "demo",
        "toy",
        "doctor",
        "selftest",
        "notify",
        "import",
        "families",
        "detect",
        "templates",
        "keys",
        "fetch",
    ),
    "Train": ("submit", "run", "data", "estimate", "resume", "export", "push"),
    "Look": ("list", "show", "logs", "samples", "diff", "checkpoints", "gpus", "fleet", "web"),
    "Steer": ("edit", "stop", "save-now", "sample-now", "hold", "release", "move", "pause"),
    "Clean up": ("remove", "prune", "cache"),
    "Set up": ("settings", "completion"),
}
_OTHERS: Final = "More"

EXAMPLES: Final = """\b
Examples:
  fsdp-tui demo                                     try it, no GPU needed
  fsdp-tui toy t && fsdp-tui run --pretrained_model_name_or_path t/model --dataset t/data
  fsdp-tui submit job.yaml --gpus=0,1 --lora-rank 32
  fsdp-tui submit job.yaml --dry-run                validate and print the job, queue nothing
  fsdp-tui show 3 --as flags                        flags that recreate job 3
  fsdp-tui --on trainer2 submit job.yaml            on another machine; see fsdp-tui fleet --help
"""
STATUSES: Final = """\b
Exit status:
  0  done; of run: the job completed     2    bad input: the error is on stderr
  1  failed; of run: the job failed      4    of estimate: the job does not fit
  3  of run: the job was stopped         130  interrupted
"""


class Sections(click.Group):
    """A group whose help lists its commands by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {
            name: command
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        }
        for title, names in _SECTIONS.items():
            _write(formatter, title, {n: left.pop(n) for n in names if n in left})
        _write(formatter, _OTHERS, left)


def _write(formatter: click.HelpFormatter, title: str, commands: dict[str, click.Command]) -> None:
    if not commands:
        return
    room = formatter.width - 6 - max(map(len, commands))
    rows = [(name, command.get_short_help_str(room)) for name, command in commands.items()]
    with formatter.section(title):
        formatter.write_dl(rows)
