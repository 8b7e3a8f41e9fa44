"""`python -m tui`: the same as the `fsdp-tui` command."""

from tui.cli.commands import main

main()
