"""Regular expressions that may take for ever are run in a process of their own, with a deadline.

`(a+)+$` needs longer than the universe for a line of forty letters, and Python's `re` lets no other
thread run meanwhile: the screen would stand still. The process ends itself when it is late.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from array import array
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from tui.log.finders import PatternFinder, compile_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.log.finders import Finder

SECONDS: Final = 2.0  # for one piece of a log, which takes milliseconds otherwise
_QUOTED: Final = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_CHOICES: Final = re.compile(r"[*+?{|]")
_GROUP_AGAIN: Final = re.compile(r"\)[*+?{]")
# Characters of a line in which a pattern with that number of choices is always found soon.
_MARKED_UP_TO: Final = {0: 1 << 20, 1: 1 << 20, 2: 200, 3: 60}
_NUMBER_BYTES: Final = 8


class TooSlowError(UserError):
    """A pattern took longer than it may."""


def choices(text: str) -> int:
    """How many places of a pattern leave open how it goes on there. Pure."""
    return len(_CHOICES.findall(_QUOTED.sub("", text)))


def marked_up_to(text: str) -> int:
    """Characters of the longest line in which matches may be looked for at once. Pure."""
    if _GROUP_AGAIN.search(_QUOTED.sub("", text)):
        return 0
    return _MARKED_UP_TO.get(choices(text), 0)


def pattern_finders(text: str) -> Callable[[], Finder]:
    """Makes finders of the lines that a pattern matches; one may raise `TooSlowError`."""
    pattern = compile_pattern(text)
    if choices(pattern.pattern) < 2:
        return partial(PatternFinder, pattern)
    searcher = _Searcher(pattern)
    return lambda: searcher


class _Searcher:
    """A `PatternFinder` in another process, which is started when it is needed."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._process: subprocess.Popen[bytes] | None = None

    def find(self, data: bytes) -> list[int]:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin.write, data)
            process.stdin.flush()
            found = array("Q", _receive(process.stdout.read))
        except (OSError, EOFError):
            self._process = None
            late = process.wait() == -signal.SIGALRM
            why = "takes too long" if late else "search failed"
            raise TooSlowError(f"“{self._pattern.pattern}” {why}", "simplify it") from None
        return found.tolist()

    def _start(self) -> subprocess.Popen[bytes]:
        words = json.dumps([self._pattern.pattern, self._pattern.flags, SECONDS])
        process = subprocess.Popen(
            [sys.executable, "-m", "tui.log.guarded", words],
            env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is the dashboard's
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _send(write: Callable[[bytes], object], data: bytes) -> None:
    write(len(data).to_bytes(_NUMBER_BYTES, "little"))
    write(data)


def _receive(read: Callable[[int], bytes]) -> bytes:
    """What was sent. Raises `EOFError` where the other side has ended."""
    count = read(_NUMBER_BYTES)
    data = read(int.from_bytes(count, "little")) if len(count) == _NUMBER_BYTES else b""
    if len(count) < _NUMBER_BYTES or len(data) < int.from_bytes(count, "little"):
        raise EOFError
    return data


def main() -> None:
    """Find lines in each piece that comes, until none comes; end in the middle when late."""
    text, flags, seconds = json.loads(sys.argv[1])
    finder = PatternFinder(re.compile(text, flags))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
    while True:
        try:
            data = _receive(sys.stdin.buffer.read)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)
        found = array("Q", finder.find(data))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(sys.stdout.buffer.write, found.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
