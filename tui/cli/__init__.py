"""The `fsdp-tui` command."""

from tui.cli.commands import main

__all__ = ["main"]
