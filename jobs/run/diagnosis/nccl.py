"""What NCCL, gloo and torch's watchdog of collectives say, and what of it is a cause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import read_tail

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir

_TYPES: Final = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
# What ranks say when *another* one has gone: never the cause. Not by the names of libraries, which
# stand in every message of theirs.
_AFTERMATH: Final = re.compile(
    r"connection (was )?(likely )?(reset|closed|refused)|closed by (remote )?peer|broken pipe"
    r"|failed to (recv|send)|timed? ?out|remote (worker|process|peer)"
    r"|communicator was aborted|ncclRemoteError",
    re.IGNORECASE,
)
# torch (2.13): the code's general explanation, which speaks of sockets, then what NCCL knows.
_LAST: Final = re.compile(
    r"(nccl\w+):[^\n]*\s+Last error:\s*(.+?)\s*(?:Exception raised from|\Z)", re.S
)
_SHARED_MEMORY: Final = "/dev/shm"
_WATCHDOG: Final = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(\w+),"
    r".*? ran for (\d+) milliseconds"
)
_LOG_END: Final = 1 << 20  # bytes; many stacks follow


@dataclass(frozen=True)
class Timeout:
    """A collective that never finished on a rank, as torch's watchdog reports before it aborts."""

    collective: str
    seconds: float


def is_aftermath(kind: str, message: str) -> bool:
    """Whether an exception of a rank only says that another one has failed.

    Args:
        kind: Its type's name.
        message: Its text.
    """
    if kind == "StrandedError":
        return True
    if kind not in _TYPES:
        return False
    last = _LAST.search(message)
    return bool(_AFTERMATH.search(f"{last[1]} {last[2]}" if last else message))


def essence(message: str) -> str:
    """Of NCCL's error the part that says what is wrong; other messages as they are."""
    last = _LAST.search(message)
    if last is None:
        return message
    full = f"; {_SHARED_MEMORY} is too small (in a container: --shm-size)"
    return f"{last[1]}: {last[2]}{full if _SHARED_MEMORY in last[2] else ''}"


def find_timeout(run_dir: RunDir, rank: int) -> Timeout | None:
    """Find the watchdog's timeout in a rank's log."""
    match = _WATCHDOG.search(read_tail(run_dir.rank_log(rank), _LOG_END))
    return Timeout(plain_name(match[1]), int(match[2]) / 1000) if match else None


def plain_name(collective: Any) -> str:
    """`all_gather` for `nccl:_all_gather_base` and `_ALLGATHER_BASE`."""
    name = str(collective).rpartition(":")[2].lower().strip("_").removesuffix("_base")
    joined = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
    return joined.get(name, name)
