"""Copy a text so that it can be pasted on the user's own machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.paths import ensure_state_home
from jobs.run.rundir import write_atomic

if TYPE_CHECKING:
    from textual.app import App

_FILE: Final = "clipboard.txt"
_MOST: Final = 56_000  # bytes; terminals cut off longer sequences, xterm at 100 kB
_TMUX_WITHIN: Final = 5.0  # seconds


def copy(app: App[Any], text: str) -> str:
    """Copy a text in every way available, since no terminal reports whether it accepted it.

    OSC 52 reaches the clipboard of the user's machine, also over SSH; tmux drops it in its
    default configuration, so tmux is called itself; a file always works.

    Args:
        app: The application of the terminal.
        text: What to copy.

    Returns:
        A message for the user.
    """
    if not text:
        return "nothing to copy"
    fits = len(text.encode("utf-8", "replace")) <= _MOST
    if fits:
        app.copy_to_clipboard(text.encode("utf-8", "replace").decode("utf-8"))
    if "TMUX" in os.environ and not app.is_headless and not app.is_web:
        threading.Thread(target=_give_tmux, args=(text,), daemon=True).start()
    lines = text.count("\n") + (not text.endswith("\n"))
    what = f"{lines} lines" if lines > 1 else "1 line"
    try:
        path = _write(text)
    except (UserError, OSError) as error:
        return f"{what} copied" if fits else f"{what} cannot be copied: {error}"
    if not fits:
        return f"too long for the terminal's clipboard: {what} saved in {_short(path)}"
    return f"{what} copied; also saved in {_short(path)}"


def _write(text: str) -> Path:
    path = ensure_state_home() / _FILE
    write_atomic(path, text.encode("utf-8", "replace").decode("utf-8"))
    return path


def _give_tmux(text: str) -> None:
    """Copy in a thread; tmux keeps the text in a buffer, and passes it on to its terminal."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["tmux", "load-buffer", "-w", "-"],
            input=text.encode("utf-8", "replace"),
            capture_output=True,
            timeout=_TMUX_WITHIN,
            check=False,
        )


def _short(path: Path) -> str:
    """Abbreviate the home directory to `~`."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
