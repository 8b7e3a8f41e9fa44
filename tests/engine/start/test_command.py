"""How a command of the engine ends: what it leaves behind is complete, and nothing is undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading
from engine.start.command import run_command

class Library:
    def __del__(self):
        print("taken apart", file=sys.stderr)

library = Library()

def main():
    atexit.register(print, "handler")
    print("printed")
    threading.Thread(target=print, args=("thread",)).start()
    {last}

run_command(main)
"""


def ended(last: str) -> tuple[int, list[str], str]:
    """Return the status, the lines and the complaints of a process whose command ends so."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)],
        capture_output=True,  # to a pipe, so that lines are kept back until they are flushed
        text=True,
        check=False,
    )
    return done.returncode, sorted(done.stdout.split()), done.stderr


@pytest.mark.parametrize("status", [0, 2])
def test_a_command_that_returns_ends_with_its_status_and_is_not_taken_apart(status: int) -> None:
    lines = ["handler", "printed", "thread"]
    assert ended(f"return {status}") == (status, lines, "")


@pytest.mark.parametrize(
    ("last", "status", "complaint"),
    [("raise ValueError('no')", 1, "ValueError: no"), ("sys.exit(143)", 143, "taken apart")],
)
def test_a_command_that_raises_ends_as_any_python_process(
    last: str, status: int, complaint: str
) -> None:
    ends_with, lines, complaints = ended(last)
    assert (ends_with, lines) == (status, ["handler", "printed", "thread"])
    assert complaint in complaints
