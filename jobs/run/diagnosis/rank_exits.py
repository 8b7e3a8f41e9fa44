"""What the launcher says in its log of ranks that did not end well.

Of several ranks, torch elastic's summary (2.11 to 2.13); of a single one, which accelerate starts
without elastic, the exception of Python's `subprocess`.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.run.rundir import read_tail

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir

_EXIT: Final = re.compile(
    r"rank\s*:\s*(\d+) \(local_rank[^\n]*\n\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)"
)
# The summary lists all others before it.
_ROOT: Final = "Root Cause (first observed failure):"
# Elastic ends the ranks that are left after a failure, and kills the stubborn ones.
_ENDED: Final = re.compile(r"(?:Sending process|Unable to shutdown process) (\d+) ")
_SIGNALED: Final = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
_ALONE: Final = re.compile(
    r"CalledProcessError: Command .* (?:died with <Signals\.\w+: (\d+)>"
    r"|returned non-zero exit status (\d+))"
)


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, as its launcher tells.

    Attributes:
        rank: Which.
        code: Its exit status; negative for a signal.
        ended: Whether the launcher itself ended it, since another one had failed.
    """

    rank: int
    code: int
    ended: bool = False


def rank_exits(run_dir: RunDir) -> list[RankExit]:
    """The ranks that did not end well: the first that failed, then others, then those ended."""
    text = read_tail(run_dir.launcher_log)
    if alone := _ALONE.search(text):
        number, status = alone.groups()
        return [RankExit(0, -int(number) if number else int(status))]
    ended = set(_ENDED.findall(text))
    others, _, root = text.rpartition(_ROOT)
    found: dict[int, RankExit] = {}
    for rank, code, pid in [*_EXIT.findall(root), *_EXIT.findall(others)]:
        if int(code) != 0:
            found.setdefault(int(rank), RankExit(int(rank), int(code), pid in ended))
    return sorted(found.values(), key=lambda one: one.ended)


def launcher_signal(run_dir: RunDir) -> str | None:
    """The signal on which the launcher ended its ranks and itself, by name."""
    found = _SIGNALED.search(read_tail(run_dir.launcher_log))
    return signal_name(int(found[1])) if found else None


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
