"""Hand the terminal to another machine's fsdp-tui, and take it back."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from jobs.fleet.ssh import FAILED, shared_answers, ssh_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.fleet.config import Box

# A dashboard that loses its connection leaves its screen, mouse mode and hidden cursor behind.
_RESET: Final = "\x1b[?1000;1002;1003;1006;2004l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m\r\n"


def visit(box: Box, words: Sequence[str] = (), *, stay: bool = False) -> int:
    """Run fsdp-tui on a box in this terminal until it ends; without arguments, its dashboard.

    Its output is not filtered: as with any `ssh -t`, whoever controls the box controls the
    terminal meanwhile.

    Args:
        box: The box.
        words: Arguments for fsdp-tui.
        stay: Wait for a key after a failure, before the screen hides ssh's message.

    Returns:
        The exit status of ssh.
    """
    # Ctrl-C is for ssh while it connects; the default handler would end this process.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        share = shared_answers(box)
        command = ssh_command(box, words, terminal=True, ask=True, share=share)
        status = subprocess.call(command, stdout=sys.__stderr__)
    finally:
        signal.signal(signal.SIGINT, before)
    if status == FAILED and sys.__stderr__ is not None:
        sys.__stderr__.write(_RESET)
        sys.__stderr__.flush()
    if status and stay and sys.__stdin__ is not None and sys.__stderr__ is not None:
        sys.__stderr__.write("fsdp-tui: press Enter to go back\n")
        sys.__stderr__.flush()
        sys.__stdin__.readline()
    return status
