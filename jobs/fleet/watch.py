"""All boxes at once: one thread reads what they say. It holds no truth; each box does of itself."""

from __future__ import annotations

import os
import selectors
import threading
import time
from typing import TYPE_CHECKING, Final

from jobs.fleet.link import ENDS_IN, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.fleet.config import Fleet
    from jobs.fleet.link import BoxView

# Between two reads: what a box says in a burst is shown once, and one that talks without end
# costs no core.
_REST: Final = 0.05


class FleetWatch:
    """Connections to the boxes, and what is known about each."""

    def __init__(self, fleet: Fleet) -> None:
        self.links = [Link(box, fleet.interval) for box in fleet.machines]
        self._retry_requested = threading.Event()
        self._closed = threading.Event()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def views(self) -> tuple[BoxView, ...]:
        return tuple(link.view for link in self.links)

    def run(self, publish: Callable[[tuple[BoxView, ...]], None]) -> None:
        """Call `publish` with each change, until `close`."""
        shown: tuple[BoxView, ...] = ()
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                if self._retry_requested.is_set():
                    self._retry_requested.clear()
                    for link in self.links:
                        link.hurry(now)
                for link in self.links:
                    link.tend(now)
                if self.views != shown:
                    shown = self.views
                    publish(shown)
                self._wait()
        finally:
            for link in self.links:
                link.end()
            until = time.monotonic() + ENDS_IN
            for link in self.links:
                link.forget(until)
            os.close(self._woken)

    def _wait(self) -> None:
        """Until something comes, or is due."""
        due = min((link.due for link in self.links), default=float("inf"))
        left = None if due == float("inf") else max(0.0, due - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for link in self.links:
                for file in link.files():
                    selector.register(file, selectors.EVENT_READ, link)
            for key, _ in selector.select(left):
                if key.data is None:
                    os.read(self._woken, 4096)
                elif key.fd in key.data.files():  # else it has failed over the other one
                    key.data.read(key.fd, time.monotonic())
        if not self._retry_requested.is_set():
            self._closed.wait(_REST)

    def retry(self) -> None:
        """Try the boxes that are away or silent now. From any thread."""
        self._retry_requested.set()
        self._wake()

    def close(self) -> None:
        """End, with every ssh, whatever the thread does now. From any thread, once."""
        self._closed.set()
        for link in self.links:
            link.end()
        self._wake()
        os.close(self._wakes)

    def _wake(self) -> None:
        try:
            os.write(self._wakes, b".")
        except OSError:  # full, or over
            return
