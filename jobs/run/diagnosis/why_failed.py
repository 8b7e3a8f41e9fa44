"""Why a job failed, from what its processes left behind."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any, Final

from jobs.machine.processes import kernel_oom_kills
from jobs.run.diagnosis.flight_records import find_wait
from jobs.run.diagnosis.nccl import essence, find_timeout, is_aftermath
from jobs.run.diagnosis.rank_exits import launcher_signal, rank_exits, signal_name
from jobs.run.failure import Cause, Failure
from jobs.run.rundir import PHASES, read_tail

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs.run.rundir import RunDir

_LONGEST: Final = 300
_PARTS: Final = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer update",
}
# Messages of libraries; those of CUDA allocate memory outside torch's allocator.
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
_TORCH_ADVICE: Final = " If reserved but unallocated memory is large"  # jobs are launched so


def why_failed(run_dir: RunDir, exit_code: int | None, **more: Any) -> str:
    """`diagnose` in one line: which rank, what, when."""
    return diagnose(run_dir, exit_code, **more).text


def diagnose(
    run_dir: RunDir,
    exit_code: int | None,
    *,
    ended_by_us: Collection[int] = (),
    oom_kills_before: int | None = None,
) -> Failure:
    """Which rank, what, when.

    Args:
        run_dir: Where the ranks wrote.
        exit_code: The launcher's, or None when it was not our child.
        ended_by_us: Ranks that were ended only because another one had failed.
        oom_kills_before: The kernel's count of processes killed for memory before the run.
    """
    out_of_memory = oom_kills_before is not None and kernel_oom_kills() > oom_kills_before
    errors = run_dir.rank_errors()
    causes = causes_of(errors)
    if causes:
        return _rank_error(causes[0])
    exits = rank_exits(run_dir)
    # Those that the launcher or we ended say nothing about why.
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
    """No rank has failed."""
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


def is_persons_fault(run_dir: RunDir) -> bool:
    """Whether the job itself is wrong, so that another attempt would fail the same way."""
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

    A part of a step belongs to the step that was not yet done.
    """
    if phase in _PARTS and isinstance(step, int):
        return f"in {_PARTS[phase]} of step {step + 1}"
    after = f" after step {step}" if step else ""
    return f"while {PHASES.get(phase, phase)}{after}"


def _silent_death(run_dir: RunDir, rank: int, code: int | None, out_of_memory: bool) -> Failure:
    """Describe a rank that ended without reporting an error."""
    status = next((s for s in run_dir.rank_statuses() if s.rank == rank), None)
    when = f"at step {status.step} during {status.phase}" if status else "while starting"
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


def _timed_out(run_dir: RunDir, rank: int, when: str) -> str | None:
    """Describe what a rank aborted by torch's watchdog waited for; the late rank, if known."""
    timeout = find_timeout(run_dir, rank)
    if timeout is None:
        return None
    wait = find_wait(run_dir)
    awaited = f": {wait}" if wait else " for other ranks"
    return f"rank {rank} waited {timeout.seconds:.0f} s in {timeout.collective} {when}{awaited}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
