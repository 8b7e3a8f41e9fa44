"""Open the dashboard: setup before Textual is imported, and before the application runs."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from jobs.doctor.checks.terminal import environment_at_start, is_utf8
from jobs.errors import UserError
from tui.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.queue.store import Store

_COLOUR_SYSTEMS: Final = {"16": "standard", "256": "256", "truecolor": "truecolor"}
_SIGNAL_TAKES: Final = 1.0  # seconds
_PARENT_EVERY: Final = 2.0  # seconds
_LOCALE: Final = ("LC_ALL", "LC_CTYPE", "LANG")
# Terminals with a limited character set.
_PLAIN_TERMINALS: Final = ("linux", "vt100", "vt102", "vt220", "ansi", "cons25", "sun")


def open_dashboard(
    store: Store, *, select: int | None = None, read_only: bool = False, plain: bool = False
) -> None:
    """Run the dashboard in this terminal, or in a browser's, until the user quits.

    Args:
        store: The jobs.
        select: The job that is selected at first.
        read_only: Change nothing, even if the settings allow it.
        plain: Draw with ASCII only, whatever the settings say.

    Raises:
        UserError: There is no terminal.
    """
    in_browser = "TEXTUAL_DRIVER" in os.environ
    # Textual reads standard input and draws on standard error.
    if not in_browser and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(
            "the dashboard needs a terminal",
            "use `fsdp-tui list` (--watch to follow), or connect with `ssh -t`",
        )
    if not in_browser and os.environ.get("TERM") == "dumb":
        raise UserError(
            "the dashboard cannot be drawn on this terminal (TERM=dumb)",
            "use `fsdp-tui list` (--watch to follow), or set TERM=xterm-256color if it can do more",
        )
    # A dashboard is useless without its terminal, even one started under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end, of = (_end_with, os.getppid()) if in_browser else (_end_without, sys.stdin.fileno())
    threading.Thread(target=end, args=(of,), daemon=True).start()
    read = read_settings()
    settings = read.settings
    if settings.colours in _COLOUR_SYSTEMS and not in_browser:
        os.environ["TEXTUAL_COLOR_SYSTEM"] = _COLOUR_SYSTEMS[settings.colours]  # read on import
    if settings.ascii is None and not in_browser:
        plain = plain or needs_ascii(environment_at_start())
    changes = {"read_only": settings.read_only or read_only, "ascii": settings.ascii or plain}
    # Textual takes half a second to import; other commands do not need it.
    from tui.app.app import FsdpTui
    from tui.terminal.image_protocol import prepare as prepare_pictures

    app = FsdpTui(
        store, select=select, settings=settings.model_copy(update=changes), problems=read.problems
    )
    # Queries the terminal, so nothing else may read from it yet.
    prepare_pictures(settings.pictures)
    gc.freeze()  # imported objects stay; collecting them would delay keys
    app.run(mouse=settings.mouse)


def _end_with(parent: int) -> None:
    """End, in a thread, when the web server does; its pipes do not report every kind of end."""
    while os.getppid() == parent:
        time.sleep(_PARENT_EVERY)
    _hang_up()


def _end_without(terminal: int) -> None:
    """End, in a thread, when the terminal is gone.

    Only the session that controls a terminal gets a signal. Any other one, as under `docker
    exec` or on a script's pseudo-terminal, would read end-of-file forever and use a whole core.
    """
    watch = select.poll()
    watch.register(terminal, 0)  # poll always reports a hang-up
    watch.poll()
    _hang_up()


def _hang_up() -> None:
    """Exit as on a hang-up, also as the first process of a container, which ignores signals."""
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(_SIGNAL_TAKES)
    os._exit(128 + signal.SIGHUP)


def needs_ascii(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal supports ASCII only. Pure.

    If no locale is set at all, as in most containers, the terminal type decides: current
    terminals support UTF-8.
    """
    if environ.get("TERM", "") in _PLAIN_TERMINALS:
        return True
    return any(environ.get(name) for name in _LOCALE) and not is_utf8(environ)
