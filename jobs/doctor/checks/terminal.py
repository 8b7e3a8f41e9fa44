"""Check what the terminal can display. Runs in the process that owns the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.doctor.examine import Finding, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LEAST: Final = (80, 24)
_TRUE_COLOUR: Final = ("truecolor", "24bit")
_LOCALE: Final = ("LC_ALL", "LC_CTYPE", "LANG")  # the first one that is set takes precedence
_TMUX_WITHIN: Final = 2.0  # seconds


@dataclass(frozen=True)
class Tmux:
    """Capabilities that tmux passes through; None if unknown."""

    true_colour: bool | None = None
    mouse: bool | None = None


def check_terminal() -> Iterator[Finding]:
    """Check the terminal of this process."""
    environ = environment_at_start()
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        yield ok("terminal", "none; the dashboard needs one (`ssh -t`), jobs do not", tty=False)
        return
    size = shutil.get_terminal_size()
    tmux = ask_tmux() if environ.get("TMUX") else None
    yield from judge_terminal(environ, (size.columns, size.lines), tmux)


def environment_at_start() -> dict[str, str]:
    """Return the environment this process was started with.

    Unlike `os.environ`, it lacks the LC_CTYPE that Python sets if there is no locale.
    """
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def is_utf8(environ: Mapping[str, str]) -> bool:
    """Return whether the locale uses UTF-8. Pure."""
    value = next((environ[name] for name in _LOCALE if environ.get(name)), "")
    return "utf8" in value.lower().replace("-", "")


def judge_terminal(
    environ: Mapping[str, str], size: tuple[int, int], tmux: Tmux | None = None
) -> Iterator[Finding]:
    """Judge the terminal. Pure; `size` is columns and lines."""
    term = environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        yield warn(
            "terminal",
            f"TERM is {term or 'not set'}, so nothing can be drawn",
            "export TERM=xterm-256color, if your terminal supports it",
        )
        return
    columns, lines = size
    words = f"{term}, {columns} × {lines}"
    if columns < _LEAST[0] or lines < _LEAST[1]:
        yield warn(
            "terminal",
            f"{words} characters is too small",
            f"make it {_LEAST[0]} × {_LEAST[1]} or larger",
            size=list(size),
        )
    else:
        yield ok("terminal", f"{words} characters", size=list(size))
    yield _judge_colours(environ, term)
    if is_utf8(environ):
        yield ok("locale", "UTF-8 works")
    else:
        name = next((name for name in _LOCALE if environ.get(name)), "LANG")
        yield warn(
            "locale",
            f"{name} is {environ.get(name) or 'not set'}: lines and bars may show wrong characters",
            f"export {name}=C.UTF-8",
        )
    if tmux is not None:
        yield from _judge_tmux(tmux)
    elif environ.get("STY") or term.startswith("screen."):
        yield warn(
            "screen",
            "GNU screen shows at most 256 colors and no mouse wheel",
            "use tmux, or nothing: jobs run without a terminal",
        )


def _judge_colours(environ: Mapping[str, str], term: str) -> Finding:
    if environ.get("NO_COLOR"):
        return ok("colours", "NO_COLOR is set: shades of gray")
    if environ.get("COLORTERM", "").lower() in _TRUE_COLOUR or term.endswith("-direct"):
        return ok("colours", "all (COLORTERM)")
    few = "256" if "256color" in term else "16"
    ssh = ", because sshd does not forward it" if environ.get("SSH_CONNECTION") else ""
    return warn(
        "colours",
        f"only {few}: COLORTERM is not set{ssh}",
        "export COLORTERM=truecolor, if your terminal supports it (most do)",
    )


def _judge_tmux(tmux: Tmux) -> Iterator[Finding]:
    if tmux.true_colour is False:
        yield warn(
            "tmux",
            "does not pass true color through",
            "set -as terminal-features ',*:RGB' in ~/.tmux.conf",
        )
    if tmux.mouse is False:
        yield warn("tmux", "does not pass the mouse through", "set -g mouse on in ~/.tmux.conf")
    if tmux == Tmux(true_colour=True, mouse=True):
        yield ok("tmux", "passes true color and the mouse through")


def ask_tmux() -> Tmux:
    """Query the surrounding tmux for the capabilities of its client."""
    answer = _tmux("display-message", "-p", "#{client_termfeatures} #{?mouse,on,off}")
    if answer is None:
        return Tmux()
    features, _, mouse = answer.rpartition(" ")
    overrides = _tmux("show-options", "-gv", "terminal-overrides") or ""
    passes = "RGB" in features.split(",") or ":RGB" in overrides or ":Tc" in overrides
    return Tmux(passes, {"on": True, "off": False}.get(mouse))


def _tmux(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["tmux", *words], capture_output=True, text=True, timeout=_TMUX_WITHIN, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
