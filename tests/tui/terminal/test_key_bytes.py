"""Every key arrives under its name, from the bytes that terminals send to the name an app gets."""

from __future__ import annotations

import json
import os
import string
import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.paths import ROOT
from tests.support.tui.terminal import terminal
from tests.support.waiting import eventually
from tui.keys.keymap import known_bindings

if TYPE_CHECKING:
    from pathlib import Path

# Writes the names of all keys that its driver reads, before anything is bound to them.
LISTENING: Final = """
import json, os, sys
sys.path.insert(0, {root!r})
from textual.app import App
from textual.events import Key
from textual.widgets import Static
from tui.terminal.driver import GovernedDriver
from tui.terminal.textual_fixes import fix_textual
fix_textual()
names = []
class Listening(GovernedDriver):
    def process_message(self, message):
        if not isinstance(message, Key):
            return super().process_message(message)
        names.append(message.key)
        with open({seen!r} + ".new", "w") as file:
            json.dump(names, file)
        os.replace({seen!r} + ".new", {seen!r})
class Ready(App):
    def compose(self):
        yield Static("ready")
Ready(driver_class=Listening).run()
"""

_SIGNS: Final = {
    "ampersand": "&",
    "colon": ":",
    "comma": ",",
    "equals_sign": "=",
    "full_stop": ".",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "less_than_sign": "<",
    "minus": "-",
    "plus": "+",
    "question_mark": "?",
    "right_square_bracket": "]",
    "slash": "/",
    "space": " ",
}
# What all of them send: characters, control characters, ESC and a digit.
_SAME: Final = (
    {one: one for one in string.ascii_letters + string.digits}
    | _SIGNS
    | {f"ctrl+{one}": chr(ord(one) & 31) for one in "abcdefgklnopqrstuvwxyz"}
    | {f"alt+{digit}": f"\x1b{digit}" for digit in string.digits}
    | {"enter": "\r", "tab": "\t", "shift+tab": "\x1b[Z", "delete": "\x1b[3~"}
    | {"pageup": "\x1b[5~", "pagedown": "\x1b[6~"}
    | {f"f{n}": f"\x1bO{'PQRS'[n - 1]}" for n in range(1, 5)}
    | {f"f{n}": f"\x1b[{code}~" for n, code in zip(range(5, 9), (15, 17, 18, 19), strict=True)}
)
_ARROWS: Final = dict(zip(("up", "down", "right", "left"), "ABCD", strict=True))
# With a modifier; screen hands on what it does not know.
_MODIFIED: Final = (
    {f"shift+{key}": f"\x1b[1;2{code}" for key, code in _ARROWS.items()}
    | {"ctrl+home": "\x1b[1;5H", "ctrl+end": "\x1b[1;5F"}
    | {"ctrl+pageup": "\x1b[5;5~", "ctrl+pagedown": "\x1b[6;5~"}
)
_OLD_HOME: Final = {"home": "\x1b[1~", "end": "\x1b[4~"}


def _without(table: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: sent for key, sent in table.items() if key not in keys}


# Terminal → key → what it sends; a multiplexer keeps the key that its own commands begin with.
# Compared with terminfo's xterm-256color, tmux-256color and screen-256color.
SENT: Final = {
    "xterm": _SAME
    | {key: f"\x1b[{code}" for key, code in _ARROWS.items()}
    | {"home": "\x1b[H", "end": "\x1b[F"}
    | _MODIFIED,
    "xterm, application keys": {key: f"\x1bO{code}" for key, code in _ARROWS.items()}
    | {"home": "\x1bOH", "end": "\x1bOF"},
    "tmux": _without(_SAME, "ctrl+b")
    | {key: f"\x1b[{code}" for key, code in _ARROWS.items()}
    | _OLD_HOME
    | _MODIFIED,
    "screen": _without(_SAME, "ctrl+a")
    | {key: f"\x1bO{code}" for key, code in _ARROWS.items()}
    | _OLD_HOME
    | _MODIFIED,
    # What terminals send that understand the keyboard protocol which Textual asks for.
    "kitty": {f"alt+{digit}": f"\x1b[{ord(digit)};3u" for digit in string.digits}
    | {"escape": "\x1b[27u", "ctrl+b": "\x1b[98;5u", "ctrl+r": "\x1b[114;5u"},
}
WHOLE: Final = ("xterm", "tmux", "screen")


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of all keys of all terminals, in the order of `SENT`; one app takes them all."""
    seen: Path = tmp_path_factory.mktemp("keys") / "seen"
    command = sys.executable, "-c", LISTENING.format(root=str(ROOT), seen=str(seen))
    sent = [keys for table in SENT.values() for keys in table.values()]

    def names() -> list[str]:
        return json.loads(seen.read_text()) if seen.exists() else []

    with terminal(command, dict(os.environ)) as shown:
        shown.wait_for(lambda text: "ready" in text)
        shown.press("".join(sent))
        shown.press("\x1b")  # alone, which only the end of the bytes tells from a longer one
        eventually(lambda: len(names()) > len(sent), told=names)
        return names()


def test_every_key_arrives_under_its_name(arrived: list[str]) -> None:
    names = iter(arrived)
    found = {which: {key: next(names, "") for key in table} for which, table in SENT.items()}
    wrong = {
        (which, key): came
        for which, table in found.items()
        for key, came in table.items()
        if came != key
    }
    assert not wrong
    assert list(names) == ["escape"]


@pytest.mark.parametrize("which", WHOLE)
def test_every_action_has_a_key_that_arrives_and_shows_one_that_does(which: str) -> None:
    table = {*SENT[which], "escape"}
    unreachable = [one.id for one in known_bindings().values() if not table & {*one.keys}]
    assert not unreachable
    # The first is the one that key lines and help name.
    misleading = {one.id: one.keys[0] for one in known_bindings().values()}
    assert not {name: key for name, key in misleading.items() if key not in table}
