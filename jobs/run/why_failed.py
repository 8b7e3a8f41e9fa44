"""Diagnose why a job failed, from what its processes left behind."""

from __future__ import annotations

import io
import json
import pickle
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.machine.processes import kernel_oom_kills
from jobs.run.eventlog import read_end
from jobs.run.failure import Cause, Failure
from jobs.run.rundir import PHASES, read_tail
from jobs.untrusted.files import read_regular
from jobs.untrusted.pickles import check_pickle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from jobs.run.rundir import RankStatus, RunDir

    Entries = dict[int, dict[str, Any]]  # sequence number → recorded collective


# -- nccl -----------------------------------------------------------------------------------
# Messages of NCCL, gloo and torch's collective watchdog, and which of them are a cause.


_TYPES: Final = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
# Messages of ranks when *another* one has gone: never the cause. Not matched by the names of the
# libraries, which are in all of their messages.
_AFTERMATH: Final = re.compile(
    r"connection (was )?(likely )?(reset|closed|refused)|closed by (remote )?peer|broken pipe"
    r"|failed to (recv|send)|timed? ?out|remote (worker|process|peer)"
    r"|communicator was aborted|ncclRemoteError",
    re.IGNORECASE,
)
# torch (2.13): its general explanation, which mentions sockets, followed by NCCL's own message.
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
    """Return whether a rank's exception only reports that another rank has failed.

    Args:
        kind: Name of the exception type.
        message: Its text.
    """
    if kind == "StrandedError":
        return True
    if kind not in _TYPES:
        return False
    last = _LAST.search(message)
    return bool(_AFTERMATH.search(f"{last[1]} {last[2]}" if last else message))


def essence(message: str) -> str:
    """Return the specific part of an NCCL error; other messages unchanged."""
    last = _LAST.search(message)
    if last is None:
        return message
    full = f"; {_SHARED_MEMORY} is too small (in a container: --shm-size)"
    return f"{last[1]}: {last[2]}{full if _SHARED_MEMORY in last[2] else ''}"


def find_timeout(run_dir: RunDir, rank: int) -> Timeout | None:
    """Find the watchdog's timeout in a rank's log; None if there is none."""
    match = _WATCHDOG.search(read_tail(run_dir.rank_log(rank), _LOG_END))
    return Timeout(plain_name(match[1]), int(match[2]) / 1000) if match else None


def plain_name(collective: Any) -> str:
    """Normalize a collective's name: `all_gather` for `nccl:_all_gather_base` and
    `_ALLGATHER_BASE`.
    """
    name = str(collective).rpartition(":")[2].lower().strip("_").removesuffix("_base")
    joined = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
    return joined.get(name, name)


# -- flight records -------------------------------------------------------------------------
# Find the collective in which ranks wait, and the late rank, using torch's flight recorders.
#
# Torch keeps the newest collectives of each process group in memory. Its watchdog pickles them to a
# file when an NCCL collective times out. Our ranks write them as JSON on request
# (`engine.ranks.failure`), which works while they wait.


_COLLECTIVES: Final = 2000  # entries that a rank keeps; torch's own default for NCCL
_LARGEST: Final = 64 << 20  # bytes of a file


@dataclass(frozen=True)
class Wait:
    """A collective that not all ranks have reached.

    Attributes:
        collective: For example all_reduce.
        late: The ranks that have not reached it; empty if all have, but it does not finish.
        waiting: The ranks that wait in it.
    """

    collective: str
    late: tuple[int, ...]
    waiting: tuple[int, ...]

    def __str__(self) -> str:
        """Describe it in words that can follow a semicolon."""
        if not self.late:
            return f"all ranks are in the same {self.collective}, which never finishes"
        many = len(self.waiting) > 1
        return (
            f"{_ranks(self.late)} never reached the {self.collective} that "
            f"{_ranks(self.waiting)} {'wait' if many else 'waits'} in"
        )


def environment(run_dir: RunDir) -> dict[str, str]:
    """Return variables that make torch record collectives and write them into the run directory."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(_COLLECTIVES),
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir.flight_prefix),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "true",
    }


def explain_hang(run_dir: RunDir, reason: str, say: Callable[[str], None]) -> str:
    """Extend the reason of a hang by what its ranks waited for, if their records show it."""
    try:
        wait = find_wait(run_dir)
    # records of another torch version must not keep the ranks from being ended
    except Exception as error:
        say(f"cannot read the flight records: {type(error).__name__}: {error}")
        return reason
    if not wait:
        return reason
    say(f"hang: {wait}")
    return f"{reason}; {wait}"


def find_wait(run_dir: RunDir) -> Wait | None:
    """Find the earliest collective that blocks the ranks; None if unknown."""
    recorded: dict[tuple[int, str], dict[int, Entries]] = {}
    for path in sorted(run_dir.logs.glob(f"{run_dir.flight_prefix.name}*")):
        number = path.name.removeprefix(run_dir.flight_prefix.name).removesuffix(".json")
        if not number.isdigit():
            continue
        with suppress(
            LookupError, TypeError, ValueError, AttributeError
        ):  # written by another version of torch
            for place, dump in enumerate(_read(path)):
                for group, entries in _by_group(dump).items():
                    recorded.setdefault((place, group), {})[int(number)] = entries
    waits = [wait for ranks in recorded.values() if (wait := _find_lag(ranks)) is not None]
    return min(waits, key=lambda wait: wait[0])[1] if waits else None


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the recorders in a file: JSON has one for each kind of group, a pickle has one."""
    try:
        data = read_regular(path, _LARGEST)
        if path.suffix == ".json":
            return list(json.loads(data))
        check_pickle(data)
        return [_Plain(io.BytesIO(data)).load()]
    except Exception:  # a truncated or foreign file contributes nothing
        return []


class _Plain(pickle.Unpickler):
    """Load numbers, strings, lists and dicts; refuse anything that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight record")


def _by_group(dump: dict[str, Any]) -> dict[str, Entries]:
    """Return the collectives of each process group of a rank, without point-to-point calls."""
    names = (str(config.get("name", "")) for config in dump.get("pg_config", {}).values())
    groups: dict[str, Entries] = {name: {} for name in names if name}
    for entry in dump.get("entries", []):
        if not entry["is_p2p"]:
            group = str(entry["process_group"][0])
            groups.setdefault(group, {})[int(entry["collective_seq_id"])] = entry
    return groups


def _find_lag(ranks: dict[int, Entries]) -> tuple[int, Wait] | None:
    """Return when ranks of a group began to wait for others, and in which collective."""
    last = {rank: max(entries, default=0) for rank, entries in ranks.items()}
    least, most = min(last.values()), max(last.values())
    if least == most:
        return _stuck(ranks)
    number = least + 1
    waiting = [rank for rank in ranks if last[rank] >= number]
    seen = [ranks[rank][number] for rank in waiting if number in ranks[rank]]
    if not seen:  # so old that it was overwritten
        return None
    late = tuple(rank for rank in ranks if last[rank] == least)
    wait = Wait(plain_name(seen[0]["profiling_name"]), late, tuple(waiting))
    return _start_time(seen), wait


def _stuck(ranks: dict[int, Entries]) -> tuple[int, Wait] | None:
    """Return the first collective that all have reached and none has completed; NCCL only."""
    open_ones = [
        {
            number: entry
            for number, entry in entries.items()
            if entry["state"] != "completed" and str(entry["profiling_name"]).startswith("nccl:")
        }
        for entries in ranks.values()
    ]
    if not all(open_ones):
        return None
    first = [entries[min(entries)] for entries in open_ones]
    name = plain_name(first[0]["profiling_name"])
    return _start_time(first), Wait(name, (), tuple(ranks))


def _start_time(entries: Iterable[dict[str, Any]]) -> int:
    return min(int(entry["time_created_ns"]) for entry in entries)


def _ranks(numbers: tuple[int, ...]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


# -- rank exits -----------------------------------------------------------------------------
# Exit codes of ranks, from the launcher's log.
#
# Several ranks: torch elastic's summary (2.11 to 2.13). A single rank, which accelerate starts
# without elastic: the exception of Python's `subprocess`.


_EXIT: Final = re.compile(
    r"rank\s*:\s*(\d+) \(local_rank[^\n]*\n\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)"
)
# The summary lists all others before it.
_ROOT: Final = "Root Cause (first observed failure):"
# After a failure, elastic ends the remaining ranks, and kills those that do not exit.
_ENDED: Final = re.compile(r"(?:Sending process|Unable to shutdown process) (\d+) ")
_SIGNALED: Final = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
# For a Slurm step: `srun: error: n1: tasks 0-1,3: Exited with exit code 1`.
_TASKS: Final = re.compile(
    r"^srun: error: [^\n:]+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|([^\n]+?))(?: \(core"
    r" dumped\))?$",
    re.MULTILINE,
)
_ALONE: Final = re.compile(
    r"CalledProcessError: Command .* (?:died with <Signals\.\w+: (\d+)>"
    r"|returned non-zero exit status (\d+))"
)


# Signals as the C library describes them, and Slurm's text for a task that ran out of memory.
_NUMBERS: Final = {
    **{text: number for number in signal.Signals if (text := signal.strsignal(number))},
    "Out Of Memory": signal.SIGKILL,
}


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, as its launcher reports it.

    Attributes:
        rank: The rank.
        code: Its exit status; negative for a signal.
        ended: Whether the launcher itself ended it because another rank had failed.
    """

    rank: int
    code: int
    ended: bool = False


def rank_exits(run_dir: RunDir) -> list[RankExit]:
    """Return the exits of ranks that failed.

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
    """Return the exits of ranks that failed, from srun's report about its tasks.

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
    # A signal that killed a rank is more informative than how its peers ended.
    return sorted(exits.values(), key=lambda rank_exit: rank_exit.code >= 0)


def launcher_signal(run_dir: RunDir) -> str | None:
    """Return the name of the signal on which the launcher ended its ranks and itself."""
    match = _SIGNALED.search(read_tail(run_dir.launcher_log))
    return signal_name(int(match[1])) if match else None


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- why failed -----------------------------------------------------------------------------


_LONGEST: Final = 300
_PARTS: Final = {
    "base": "the base's forward pass",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer update",
}
# Messages of libraries. CUDA's libraries allocate memory outside torch's allocator.
_PATTERNS: Final = {
    Cause.GPU_MEMORY: re.compile(
        r"CU(BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED|Cuda failure 2\b|Cuda failure 'out of memory'"
        r"|^OutOfMemoryError: |CUDA out of memory"
    ),
    Cause.DISK_FULL: re.compile(r"No space left on device|Disk quota exceeded"),
    Cause.COMMUNICATION: re.compile(
        r"nccl|connection (reset|closed|refused)|\bgloo\b", re.IGNORECASE
    ),
    Cause.MISSING_PACKAGE: re.compile(r"No module named|ImportError|ModuleNotFoundError"),
}
# irrelevant: jobs are launched with this setting
_TORCH_ADVICE: Final = " If reserved but unallocated memory is large"


def why_failed(run_dir: RunDir, exit_code: int | None, **more: Any) -> str:
    """Return the one-line text of `diagnose`."""
    return diagnose(run_dir, exit_code, **more).text


def diagnose(
    run_dir: RunDir,
    exit_code: int | None,
    *,
    ended_by_us: Collection[int] = (),
    oom_kills_before: int | None = None,
) -> Failure:
    """Determine which rank failed, how, and when.

    Args:
        run_dir: The run directory.
        exit_code: The launcher's exit status; None if it was not our child.
        ended_by_us: Ranks that were ended only because another rank failed.
        oom_kills_before: The kernel's count of out-of-memory kills before the run.
    """
    out_of_memory = oom_kills_before is not None and kernel_oom_kills() > oom_kills_before
    errors = run_dir.rank_errors()
    causes = causes_of(errors)
    if causes:
        return _rank_error(causes[0])
    exits = rank_exits(run_dir)
    # Ranks that the launcher or we ended do not explain the failure.
    explained = {int(error.get("rank", -1)) for error in errors} | set(ended_by_us)
    explained |= {rank_exit.rank for rank_exit in exits if rank_exit.ended}
    for rank_exit in exits:
        if rank_exit.rank not in explained:
            return _silent_death(run_dir, rank_exit.rank, rank_exit.code, out_of_memory)
    if errors or ended_by_us:
        silent = [s.rank for s in run_dir.rank_statuses() if s.rank not in explained]
        if silent:
            return _silent_death(run_dir, silent[0], None, out_of_memory)
        if errors:
            return _rank_error(errors[0])
    return _launchers_end(run_dir, exit_code)


def _launchers_end(run_dir: RunDir, exit_code: int | None) -> Failure:
    """Explain the end of a launcher when no rank has failed."""
    if exit_code is not None and exit_code < 0:
        what, killed = f"the launcher was killed by {signal_name(-exit_code)}", -signal.SIGKILL
        return Failure(what, Cause.KILLED if exit_code == killed else Cause.OTHER)
    if number := launcher_signal(run_dir):
        return Failure(f"someone sent {number} to the launcher, which ended the ranks")
    if exit_code == 0:
        return Failure("the ranks exited without a reason; see logs/launcher.log")
    lines = read_tail(run_dir.launcher_log).splitlines()
    if lines and lines[-1].strip() == "KeyboardInterrupt":
        return Failure("someone sent SIGINT to the launcher while it started")
    last = next((line for line in reversed(lines) if line.strip()), "")
    what = f"the launcher failed: {_shorten(last) or f'exit status {exit_code}'}"
    return Failure(what, _cause_in(last))


def is_user_error(run_dir: RunDir) -> bool:
    """Return whether the job itself is at fault, so that another attempt would fail likewise."""
    causes = causes_of(run_dir.rank_errors())
    return bool(causes) and causes[0].get("type") == "UserError"


def causes_of(errors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks' errors, without those that only follow from another rank's failure."""
    return [
        error
        for error in errors
        if not is_aftermath(str(error.get("type")), str(error.get("message", "")))
    ]


def _rank_error(error: dict[str, Any]) -> Failure:
    text = essence(str(error.get("message", ""))).partition(_TORCH_ADVICE)[0]
    message, kind, phase = _shorten(text), error.get("type"), str(error.get("phase"))
    cause = Cause(str(error.get("cause")))
    if kind == "UserError":
        return Failure(message, cause, error["rank"], phase)
    if cause is Cause.OTHER:
        cause = _cause_in(f"{kind}: {text}")
    where, step = f"rank {error.get('rank')}", error.get("step")
    if cause is Cause.GPU_MEMORY:
        what = f"{where} ran out of GPU memory {_doing(phase, step)}: {message}"
    else:
        what = f"{where} failed at step {step} during {phase}: {kind}: {message}"
    return Failure(what, cause, error["rank"], phase)


def _cause_in(text: str) -> Cause:
    """Return the kind of failure that a library's message is about."""
    return next(
        (cause for cause, pattern in _PATTERNS.items() if pattern.search(text)), Cause.OTHER
    )


def _doing(phase: str, step: Any) -> str:
    """Describe what a rank was doing.

    A part of a step belongs to the step that has not been completed.
    """
    if phase in _PARTS and isinstance(step, int):
        return f"in {_PARTS[phase]} of step {step + 1}"
    after = f" after step {step}" if step else ""
    return f"while {PHASES.get(phase, phase)}{after}"


def _silent_death(run_dir: RunDir, rank: int, code: int | None, out_of_memory: bool) -> Failure:
    """Describe a rank that ended without reporting an error."""
    status = next((s for s in run_dir.rank_statuses() if s.rank == rank), None)
    when = "while starting"
    if status is not None:
        when = f"at step {_newest(run_dir, status)} during {status.phase}"
    if out_of_memory and code in (None, -signal.SIGKILL):
        what = f"rank {rank} was killed by the kernel {when}: the machine ran out of memory"
        return Failure(what, Cause.HOST_MEMORY, rank)
    if code is None:
        return Failure(f"rank {rank} vanished {when}", Cause.KILLED, rank)
    if code == -signal.SIGABRT and (words := _timed_out(run_dir, rank, when)):
        return Failure(words, Cause.COMMUNICATION, rank)
    if code < 0:
        cause = Cause.KILLED if code == -signal.SIGKILL else Cause.OTHER
        return Failure(f"rank {rank} was killed by {signal_name(-code)} {when}", cause, rank)
    lines = [line for line in read_tail(run_dir.rank_log(rank)).splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    ends = f"its log ends with: {_shorten(last)}" if last else "its log is empty"
    what = f"rank {rank} exited with status {code} {when}; {ends}"
    return Failure(what, _cause_in(last), rank)


def _newest(run_dir: RunDir, status: RankStatus) -> int:
    """Return the newest step that is known: a rank says its own about once a second."""
    step = read_end(run_dir.events).last
    return max(status.step, step.step if step is not None else 0)


def _timed_out(run_dir: RunDir, rank: int, when: str) -> str | None:
    """Describe what a rank aborted by torch's watchdog waited for, and the late rank if known."""
    timeout = find_timeout(run_dir, rank)
    if timeout is None:
        return None
    wait = find_wait(run_dir)
    awaited = f": {wait}" if wait else " for other ranks"
    return f"rank {rank} waited {timeout.seconds:.0f} s in {timeout.collective} {when}{awaited}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
