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
# Of a step of Slurm: `srun: error: n1: tasks 0-1,3: Exited with exit code 1`.
_TASKS: Final = re.compile(
    r"^srun: error: [^\n:]+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|([^\n]+?))(?: \(core"
    r" dumped\))?$",
    re.MULTILINE,
)
_ALONE: Final = re.compile(
    r"CalledProcessError: Command .* (?:died with <Signals\.\w+: (\d+)>"
    r"|returned non-zero exit status (\d+))"
)


# Signals as the C library describes them, and Slurm's words for a task that its memory ended.
_NUMBERS: Final = {
    **{text: number for number in signal.Signals if (text := signal.strsignal(number))},
    "Out Of Memory": signal.SIGKILL,
}


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, as its launcher reports it.

    Attributes:
        rank: Which.
        code: Its exit status; negative for a signal.
        ended: Whether the launcher itself ended it, since another one had failed.
    """

    rank: int
    code: int
    ended: bool = False


def rank_exits(run_dir: RunDir) -> list[RankExit]:
    """Return the ranks that failed.

    The first failure comes first, then others, then ranks that the launcher ended.
    """
    text = read_tail(run_dir.launcher_log)
    if tasks := _TASKS.findall(text):
        return _of_slurm(tasks)
    if alone := _ALONE.search(text):
        number, status = alone.groups()
        return [RankExit(0, -int(number) if number else int(status))]
    ended = set(_ENDED.findall(text))
    others, _, root = text.rpartition(_ROOT)
    exits: dict[int, RankExit] = {}
    for rank, code, pid in [*_EXIT.findall(root), *_EXIT.findall(others)]:
        if int(code) != 0:
            exits.setdefault(int(rank), RankExit(int(rank), int(code), pid in ended))
    return sorted(exits.values(), key=lambda rank_exit: rank_exit.ended)


def _of_slurm(tasks: list[tuple[str, str, str]]) -> list[RankExit]:
    """Return the ranks that failed, by what srun reports about its tasks.

    Args:
        tasks: Numbers such as `0-1,3`, an exit status or "", a signal's description or "".
    """
    exits: dict[int, RankExit] = {}
    for numbers, status, words in tasks:
        code = int(status) if status else -_NUMBERS.get(words, signal.SIGKILL)
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                exits.setdefault(rank, RankExit(rank, code))
    # A signal that killed a rank says more than how the ranks that lost it ended.
    return sorted(exits.values(), key=lambda rank_exit: rank_exit.code >= 0)


def launcher_signal(run_dir: RunDir) -> str | None:
    """Return the signal on which the launcher ended its ranks and itself, by name."""
    match = _SIGNALED.search(read_tail(run_dir.launcher_log))
    return signal_name(int(match[1])) if match else None


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
