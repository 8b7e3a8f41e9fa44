"""Processes that end with whoever asked for them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from jobs.machine.child import start_child

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, whatever the test runner has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_child_is_started_ends_it() -> None:
    """It comes between fork and exec, when nobody could know the child's number yet."""
    asker = os.getpid()
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        start_child(["sleep", "1000"], preexec_fn=lambda: os.kill(asker, signal.SIGINT))
    assert set(psutil.Process().children()) <= before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
