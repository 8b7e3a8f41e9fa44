"""Time that a test plays: the supervisor lives in a thread that runs only when the test lets it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

STEP: Final = 1.0
"""Seconds that each sleep takes at least, as on a busy machine: fewer looks, and a quicker test."""
_UNIX: Final = 1e9  # what the clock on the wall shows at the beginning, less `now`


class AbandonedError(BaseException):
    """Ends the supervisor's thread with its test; nothing that it catches."""


class PlayedClock:
    """The clock of the supervisor's thread. Only this thread or the test's runs at any time.

    Attributes:
        now: Seconds on the monotonic clock.
        wakes: When the supervisor wants to be woken.
        ended: Whether the supervisor has returned, or failed.
        failure: What it raised.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.wakes = 0.0
        self.ended = False
        self.failure: BaseException | None = None
        self._abandoned = False
        self._played: set[int] = set()
        self._thread: threading.Thread | None = None
        self._turn_of_thread = threading.Lock()
        self._turn_of_test = threading.Lock()
        self._turn_of_thread.acquire()
        self._turn_of_test.acquire()
        real = {name: getattr(time, name) for name in ("monotonic", "time", "sleep")}
        patch.setattr(time, "monotonic", self._or(real["monotonic"], lambda: self.now))
        patch.setattr(time, "time", self._or(real["time"], lambda: self.now + _UNIX))
        patch.setattr(time, "sleep", self._or(real["sleep"], self.sleep))

    def _or(self, real: Callable[..., Any], played: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *words: played(*words) if self.applies() else real(*words)

    # -- the supervisor's side -------------------------------------------------------------

    def applies(self) -> bool:
        """Whether the thread that asks lives on the played clock."""
        return threading.get_ident() in self._played

    def in_supervisor(self) -> bool:
        """Whether the thread that asks is the supervisor's."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def sleep(self, seconds: float) -> None:
        """Let the test go on until this much time has passed."""
        assert self.in_supervisor(), "only the supervisor may wait"
        self.wakes = self.now + max(seconds, STEP)
        self._turn_of_test.release()
        self._turn_of_thread.acquire()
        if self._abandoned:
            raise AbandonedError

    def _run(self, work: Callable[[], object]) -> None:
        self._played.add(threading.get_ident())
        try:
            self._turn_of_thread.acquire()
            if not self._abandoned:
                work()
        except AbandonedError:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self._played.discard(threading.get_ident())
            self.ended = True
            self._turn_of_test.release()

    # -- the test's side -------------------------------------------------------------------

    def start(self, work: Callable[[], object]) -> None:
        """Run this until it sleeps for the first time."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="supervisor")
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Let the supervisor run until it sleeps again, or ends."""
        if self.ended:
            return
        self.now = max(self.now, self.wakes)
        self._turn_of_thread.release()
        assert self._turn_of_test.acquire(timeout=PATIENCE), (
            "the supervisor neither sleeps nor ends"
        )

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have what the test calls here live on the played clock too."""
        self._played.add(threading.get_ident())
        try:
            yield
        finally:
            self._played.discard(threading.get_ident())

    def abandon(self) -> None:
        """End the supervisor wherever it is."""
        self._abandoned = True
        if self._thread is not None and not self.ended:
            self._turn_of_thread.release()
            self._thread.join(PATIENCE)
