"""Start, query and end the doctor's processes, without ever waiting forever."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from jobs.doctor.agreed import END, RESULT
from jobs.doctor.examine import Finding, fail
from jobs.launch import build_launch, full_environment
from jobs.machine.child import end_child, start_child
from jobs.machine.processes import RUN_ID_VARIABLE, ProcessId, end, wait_for_by_hand, with_run_id
from jobs.run.hang import Watch
from jobs.run.rundir import RunDir, read_json, write_atomic
from jobs.run.why_failed import why_failed
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import IO

    from jobs.run.hang import Stillness
    from jobs.run.rundir import RankStatus


# -- child processes ------------------------------------------------------------------------
# Helper processes with hard time limits.


# seconds to wait after SIGKILL; a process that the driver holds longer is abandoned
_KILL_TIMEOUT: Final = 3.0
_SWEEPS: Final = 3  # a launcher may start another rank while it is being killed


@dataclass(frozen=True)
class HelperOutput:
    """The output of a helper process.

    Attributes:
        facts: Its lines of JSON, merged.
        status: Its exit status; None if it timed out and was killed.
        last_line: The last line of its standard error.
    """

    facts: dict[str, Any]
    status: int | None
    last_line: str


def run_helper(module: str, *arguments: str, run_id: str, seconds: float) -> HelperOutput:
    """Run `python -m module` for at most `seconds`."""
    # Number GPUs the way ranks do.
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", RUN_ID_VARIABLE: run_id}
    # Use files instead of pipes: a helper that cannot be killed would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_child(
            [sys.executable, "-m", module, *arguments],
            variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_child(process, patience=_KILL_TIMEOUT)
        out.seek(0)
        err.seek(0)
        words = err.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        return HelperOutput(_facts(out.read()), status, last)


def end_all(run_id: str) -> tuple[int, ...]:
    """Kill every process with this run id; return the pids that survive."""
    left: list[ProcessId] = []
    for _ in range(_SWEEPS):
        processes = with_run_id(run_id)
        left = end(processes, grace=0, timeout=_KILL_TIMEOUT) if processes else []
        if left or not processes:
            break
    return tuple(process.pid for process in left)


def _facts(text: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        with suppress(ValueError):  # output of a library, or a truncated line
            value = json.loads(line)
            facts |= value if isinstance(value, dict) else {}
    return facts


# -- ask ------------------------------------------------------------------------------------
# Run the whole examination in a separate process.


_OUTPUT_TIMEOUT: Final = 240.0  # seconds; longer than any check's limit


def find(
    job: Path | None = None,
    gpus: tuple[str, ...] = (),
    *,
    quick: bool = False,
    silent: float = _OUTPUT_TIMEOUT,
) -> Generator[Finding, None, None]:
    """Examine the machine; yield findings as they arrive. All processes have ended afterwards.

    Args:
        job: A job file whose requirements are checked as well.
        gpus: GPUs to measure, by index or UUID.
        quick: Skip the all-reduce.
        silent: Seconds without output after which the process is abandoned.
    """
    run_id = f"doctor-{uuid.uuid4().hex}"
    words = [f"--run-id={run_id}", f"--gpus={','.join(gpus)}"]
    words += [f"--job={job}"] if job is not None else []
    words += ["--quick"] if quick else []
    with tempfile.TemporaryFile() as errors:
        process = start_child(
            [sys.executable, "-m", "jobs.doctor", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        try:
            ended = yield from _findings(process.stdout, silent)
        finally:
            end_child(process, patience=_KILL_TIMEOUT)
            end_all(run_id)  # its children; a process that the driver holds is abandoned
        if not ended:
            yield _aborted(errors, silent, process.returncode)


def _findings(pipe: IO[bytes], silent: float) -> Generator[Finding, None, bool]:
    """Yield findings until the end marker; return whether it arrived."""
    # Read in a thread, because a pipe that a stuck process holds never reaches its end.
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, lines), name="doctor", daemon=True).start()
    while True:
        try:
            values = json.loads(lines.get(timeout=silent) or "null")
        except (queue.Empty, ValueError):
            return False
        if values is None:
            return False
        if END in values:
            return True
        yield Finding.from_dict(values)


def _read(pipe: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _aborted(errors: IO[bytes], silent: float, status: int | None) -> Finding:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    word = lines[-1] if lines else f"no answer for {silent:g} s" if status is None else str(status)
    return fail(
        "doctor", f"stopped: {word}", "try again with --quick, and report it if that fails too"
    ).plain("doctor")


# -- ranks ----------------------------------------------------------------------------------
# Run an all-reduce on ranks that start the way a job's ranks do, and end all of them.


_POLL_INTERVAL: Final = 0.1  # seconds
_STALE: Final = 15.0  # seconds at most; ranks send a heartbeat every second
_RANK_KILL_TIMEOUT: Final = 5.0  # seconds after SIGKILL
_NCCL_WARNING: Final = "NCCL WARN"


@dataclass(frozen=True)
class Size:
    """The measurement of one message size.

    Attributes:
        bytes: Size of the message on each rank.
        seconds: Duration of one collective.
        bus: Bytes per second over each rank's link. This is the "bus bandwidth" of nccl-tests,
            which does not depend on the number of ranks.
    """

    bytes: int
    seconds: float
    bus: float


@dataclass(frozen=True)
class Outcome:
    """The result of an all-reduce run.

    Attributes:
        sizes: The measurements, smallest first; empty if it failed.
        gathered: An all-gather of the largest size.
        problem: Why it failed, in one sentence.
        silent: The ranks that did not answer.
        left: Pids that could not be killed.
        warning: NCCL's last warning.
    """

    sizes: tuple[Size, ...] = ()
    gathered: Size | None = None
    problem: str | None = None
    silent: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    warning: str | None = None


def all_reduce(
    gpus: Sequence[str], ranks: int, *, run_id: str, seconds: float, limit: float, still: float
) -> Outcome:
    """Run all-reduces of several message sizes, and end every rank.

    Args:
        gpus: GPU UUIDs, one per rank; empty for CPU ranks over gloo.
        ranks: Number of ranks.
        run_id: Set in the environment of every process that is started.
        seconds: Duration of the measurement.
        limit: Seconds after which all ranks are killed.
        still: Seconds without progress, once all ranks have met, after which they are killed.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-", ignore_cleanup_errors=True) as name:
        run_dir = RunDir(Path(name))
        run_dir.create()
        child = _start(run_dir, gpus, ranks, run_id, seconds, limit)
        silent: tuple[int, ...] = ()
        late, watch = False, Watch(still)
        try:
            deadline = time.monotonic() + limit
            while child.poll() is None and not late:
                time.sleep(_POLL_INTERVAL)
                statuses = run_dir.rank_statuses()
                now = time.monotonic()
                late = _is_stuck(watch.observe(statuses, now), ranks, still) or now > deadline
                silent = find_silent(statuses, ranks, min(_STALE, still / 2)) if late else ()
        finally:
            left = _end(child, run_id)
        warning = _nccl_warning(run_dir.launcher_log)
        result = read_json(run_dir.root / RESULT)
        if result is not None and child.returncode == 0:
            sizes = tuple(Size(**values) for values in result["sizes"])
            return Outcome(sizes, Size(**result["gathered"]), left=left)
        problem = _sentence(silent, limit, still) if late else why_failed(run_dir, child.returncode)
        return Outcome(problem=problem, silent=silent, left=left, warning=warning)


def find_silent(statuses: Sequence[RankStatus], ranks: int, mute_after: float) -> tuple[int, ...]:
    """Find the ranks that block the others, by their last status. Pure.

    These are the ranks without a status, or else those whose heartbeat stopped well before the
    others', or else those that are behind. If none stands out, all ranks.
    """
    there = {status.rank for status in statuses}
    if missing := tuple(rank for rank in range(ranks) if rank not in there):
        return missing
    latest = max(status.heartbeat for status in statuses)
    if mute := tuple(s.rank for s in statuses if latest - s.heartbeat > mute_after):
        return mute
    furthest = max(status.step for status in statuses)
    behind = tuple(status.rank for status in statuses if status.step < furthest)
    return behind or tuple(sorted(there))


def _start(
    run_dir: RunDir, gpus: Sequence[str], ranks: int, run_id: str, seconds: float, limit: float
) -> subprocess.Popen[bytes]:
    """Start `accelerate launch` with the command line and environment of a job."""
    device = "cuda" if gpus else "cpu"
    spec = JobSpec(
        name="doctor",
        num_processes=ranks,
        strategy="ddp" if ranks > 1 else "single",
        mixed_precision="no",
        device=device,
    )
    launch = build_launch(spec, run_dir, gpus=gpus, run_id=run_id)
    assert launch.command[-3:-1] == ["-m", "engine"], launch.command
    command = [
        *launch.command[:-2],
        "engine.doctor.allreduce",
        str(run_dir.root),
        f"--device={device}",
        f"--seconds={seconds:g}",
        f"--limit={limit:g}",
    ]
    environment = {"NCCL_DEBUG": "WARN"} | full_environment(launch)
    write_atomic(run_dir.accelerate_file, yaml.safe_dump(launch.config, sort_keys=False))
    with open(run_dir.launcher_log, "wb") as log:
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=run_dir.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_for_by_hand(child.pid)
    return child


def _is_stuck(seen: Sequence[Stillness], ranks: int, still: float) -> bool:
    """Return whether all ranks have met and none has progressed for `still` seconds."""
    if len(seen) < ranks or not all(rank.status.step for rank in seen):
        return False
    return min(rank.still for rank in seen) > still


def _end(child: subprocess.Popen[bytes], run_id: str) -> tuple[int, ...]:
    """Kill the remaining processes; return the pids that survive, as when the driver holds them."""
    child.poll()  # collect its status before anyone else does
    left = end_all(run_id)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_RANK_KILL_TIMEOUT)
    return left


def _sentence(silent: Sequence[int], limit: float, still: float) -> str:
    who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    return f"{who} did not answer (waited {still:g} s after all ranks met, {limit:g} s in total)"


def _nccl_warning(log: Path) -> str | None:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    warnings = [line.partition(_NCCL_WARNING)[2].strip() for line in lines if _NCCL_WARNING in line]
    return warnings[-1] if warnings else None
