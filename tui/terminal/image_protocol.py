"""Choose the terminal's image protocol. Decided once, before Textual starts."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Protocol = Literal["kitty", "sixel", "blocks"]

VARIABLE: Final = "FSDP_TUI_PICTURES"
# Seconds. A later answer would be taken for keys, and its "?" opens the help.
_WITHIN: Final = 3.0
_KITTY_QUERY: Final = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\"
_CELL_QUERY: Final = b"\x1b[16t"
_ATTRIBUTES_QUERY: Final = b"\x1b[c"  # every terminal answers this query, which ends the wait
_ATTRIBUTES: Final = re.compile(rb"\x1b\[\?([\d;]*)c")
_CELL: Final = re.compile(rb"\x1b\[6;(\d+);(\d+)t")
_SIXEL: Final = b"4"  # among the device attributes
# Multiplexers pass images on only in some configurations; others print them as text.
_SILENT_TERMS: Final = ("dumb", "linux", "screen", "tmux", "vt", "cons", "unknown")
_PRINTS_QUERIES: Final = ("Apple_Terminal",)

_chosen: Protocol = "blocks"
_cell: tuple[int, int] | None = None


def prepare(preferred: str | None = None) -> Protocol:
    """Query the terminal's capabilities. Reads its answer, so nothing else may read from it.

    Args:
        preferred: kitty, sixel or blocks, overriding the terminal; `$FSDP_TUI_PICTURES` takes
            precedence. If neither names a protocol, the terminal is queried.
    """
    global _chosen, _cell
    answers: list[bytes] = []

    def ask() -> bytes:
        answers.append(ask_terminal())
        return answers[-1]

    interactive = all(
        stream is not None and stream.isatty() for stream in (sys.__stdin__, sys.__stdout__)
    )
    _chosen = choose(os.environ, preferred, interactive, ask)
    if _chosen != "blocks" and find_spec("textual_image") is None:
        _chosen = "blocks"
    if answers and (match := _CELL.search(answers[0])):
        _cell = (int(match[2]), int(match[1]))
    return _chosen


def current() -> Protocol:
    """Return the protocol that `prepare` chose; half blocks before that."""
    return _chosen


def for_many() -> Protocol:
    """Return the protocol for many images at once.

    Over SSH a page of real images is a megabyte, which delays keys on slow links, and sixel
    images are overwritten by changes near them.
    """
    remote = "SSH_CONNECTION" in os.environ or "SSH_TTY" in os.environ
    return "kitty" if _chosen == "kitty" and not remote else "blocks"


def cell_size() -> tuple[int, int] | None:
    """Return a character's width and height in pixels, if the terminal reported them."""
    return _cell


def choose(
    environment: Mapping[str, str],
    preferred: str | None,
    interactive: bool,
    ask: Callable[[], bytes],
) -> Protocol:
    """Return the protocol.

    Args:
        environment: The process environment.
        preferred: The user's choice, if any.
        interactive: Whether both input and output are a terminal.
        ask: Queries the terminal and returns its answers.
    """
    wish = (environment.get(VARIABLE, "").strip() or preferred or "").lower()
    for protocol in get_args(Protocol):
        if wish == protocol and interactive:
            return protocol  # type: ignore[no-any-return]
    term = environment.get("TERM", "")
    if (
        not interactive
        or wish in ("blocks", "half", "off")
        or "TMUX" in environment
        or "STY" in environment
        or "TEXTUAL_DRIVER" in environment  # in a browser
        or not term
        or term.startswith(_SILENT_TERMS)
        or environment.get("TERM_PROGRAM") in _PRINTS_QUERIES
    ):
        return "blocks"
    return read_answer(ask())


def read_answer(answer: bytes) -> Protocol:
    """Choose a protocol by a terminal's answers.

    Sixel first: several terminals claim kitty's protocol without the placeholders that we
    need, and those also support sixel; kitty itself does not.
    """
    match = _ATTRIBUTES.search(answer)
    if match is None:
        return "blocks"
    if _SIXEL in match[1].split(b";"):
        return "sixel"
    return "kitty" if b"_Gi=31;OK" in answer else "blocks"


def ask_terminal() -> bytes:
    """Query the terminal and wait briefly for its answer; return b"" if there is none."""
    import select
    import termios
    import time
    import tty

    assert sys.__stdin__ is not None
    assert sys.__stdout__ is not None
    source, answer = sys.__stdin__.fileno(), b""
    try:
        before = termios.tcgetattr(source)
    except termios.error:
        return b""
    try:
        tty.setcbreak(source, termios.TCSANOW)
        os.write(sys.__stdout__.fileno(), _KITTY_QUERY + _CELL_QUERY + _ATTRIBUTES_QUERY)
        deadline = time.monotonic() + _WITHIN
        while _ATTRIBUTES.search(answer) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                break
            if not (read := os.read(source, 1024)):
                break
            answer += read
    except OSError:
        return b""
    finally:
        termios.tcsetattr(source, termios.TCSAFLUSH, before)  # drop late answers
    return answer
