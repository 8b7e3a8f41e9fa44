"""What the dashboard's threads are at, by what each of them waits for and not by the clock."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import thread as pool
from typing import TYPE_CHECKING, Final

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_BOOTSTRAP: Final = threading.Thread._bootstrap.__code__  # type: ignore[attr-defined]
_PACKAGES: Final = (str(ROOT / "tui"), str(ROOT / "jobs"))
# Threads that run in these look, wait for a while, and look again.
_RETURNING: Final = {
    str(ROOT / "tui" / name)
    for name in ("look/collector.py", "look/job_look.py", "log/watch.py", "plots/reading.py")
}


def busy(rested: set[int]) -> list[str]:
    """Threads of the dashboard that do not wait, and where they are.

    Args:
        rested: Threads that look again and again and were seen at rest: they are not busy, and
            those that rest now are added. On a slow machine they hardly ever rest all at once.
    """
    found = []
    for ident, frame in _frames().items():
        files = [one.f_code.co_filename for one in _callers(frame)]
        if _waits(frame):
            if not _RETURNING.isdisjoint(files):
                rested.add(ident)
        elif ident not in rested and (_begins(frame) or any(map(_is_ours, _callers(frame)))):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return found


def collecting() -> bool:
    """Whether a thread looks at the jobs or tends the queue, or rests between two times."""
    return running("look/collector.py")


def running(module: str) -> bool:
    """Whether a thread is in a module of the dashboard, at work or waiting."""
    frames = [one for frame in _frames().values() for one in _callers(frame)]
    return any(one.f_code.co_filename == str(ROOT / "tui" / module) for one in frames)


def _frames() -> dict[int, FrameType]:
    """Where each other thread is."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _begins(frame: FrameType) -> bool:
    """Whether a thread has not come to what it is to do: that may be something of ours."""
    codes = [one.f_code for one in _callers(frame)]
    run = threading.Thread.run.__code__
    return codes[-1] is _BOOTSTRAP and (run not in codes or codes[0] is run)


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    return code is pool._worker.__code__ or code.co_filename.startswith(_PACKAGES)


def _waits(frame: FrameType) -> bool:
    """Whether a thread waits for work, or for an event that has not come.

    Either may have come without the thread having noticed, on a busy machine.
    """
    if frame.f_code is pool._worker.__code__:
        known = frame.f_locals
        queue = known.get("work_queue")
        return known.get("work_item") is None and (queue is None or queue.empty())
    if frame.f_code is not threading.Condition.wait.__code__:
        return False
    caller = frame.f_back
    if caller is None or caller.f_code is not threading.Event.wait.__code__:
        return False
    return not caller.f_locals["self"].is_set()
