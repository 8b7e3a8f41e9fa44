"""Wait while someone reads what is printed."""

from __future__ import annotations

import select
import sys
import time


def pause(seconds: float) -> None:
    """Wait, and end at once when the reader is gone: over ssh, nothing else tells.

    Raises:
        BrokenPipeError: Nobody reads standard output any more.
    """
    try:
        watched = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # a test's, or closed
        time.sleep(seconds)
        return
    poll = select.poll()
    poll.register(watched, 0)  # poll reports the end of a pipe unasked
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(seconds * 1000)):
        raise BrokenPipeError
