"""`python -m tui`: the same as the `fsdp-tui` command."""

from tui.cli import main

main()
