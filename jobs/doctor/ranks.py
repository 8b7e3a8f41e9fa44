"""Start ranks that all-reduce, as a job's ranks are started, and leave none of them behind."""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from jobs.doctor.agreed import RESULT
from jobs.doctor.child_processes import end_all
from jobs.launch import local
from jobs.machine.processes import wait_for_by_hand
from jobs.run.diagnosis.hang import Watch
from jobs.run.diagnosis.why_failed import why_failed
from jobs.run.rundir import RunDir, read_json, write_atomic
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.run.diagnosis.hang import Stillness
    from jobs.run.rundir import RankStatus

_LOOK_EVERY: Final = 0.1  # seconds
_MUTE: Final = 15.0  # seconds at most; ranks send a heartbeat every second
_GONE_WITHIN: Final = 5.0  # seconds after SIGKILL
_NCCL_WARNING: Final = "NCCL WARN"


@dataclass(frozen=True)
class Size:
    """A message size that was measured.

    Attributes:
        bytes: Of the message on each rank.
        seconds: Of one collective.
        bus: Bytes a second over each rank's link, as nccl-tests count: it does not depend on the
            number of ranks.
    """

    bytes: int
    seconds: float
    bus: float


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks.

    Attributes:
        sizes: What was measured, the smallest first; empty if nothing was measured.
        gathered: An all-gather of the largest size.
        problem: Why, in one sentence.
        silent: The ranks that did not answer.
        left: Pids that could not be killed.
        warning: What NCCL complained of last.
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
    """Have ranks all-reduce messages of several sizes, and end every one of them.

    Args:
        gpus: GPU UUIDs, one per rank; empty for CPU ranks over gloo.
        ranks: How many.
        run_id: In the environment of all that is started.
        seconds: How long to measure.
        limit: Seconds after which all are killed, whatever they do.
        still: Seconds without progress, once all have met, after which they are killed.
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
                time.sleep(_LOOK_EVERY)
                statuses = run_dir.rank_statuses()
                now = time.monotonic()
                late = _stand_still(watch.look(statuses, now), ranks, still) or now > deadline
                silent = find_silent(statuses, ranks, min(_MUTE, still / 2)) if late else ()
        finally:
            left = _end(child, run_id)
        warning = _nccl_warning(run_dir.launcher_log)
        result = read_json(run_dir.root / RESULT)
        if result is not None and child.returncode == 0:
            sizes = tuple(Size(**values) for values in result["sizes"])
            return Outcome(sizes, Size(**result["gathered"]), left=left)
        problem = _words(silent, limit, still) if late else why_failed(run_dir, child.returncode)
        return Outcome(problem=problem, silent=silent, left=left, warning=warning)


def find_silent(statuses: Sequence[RankStatus], ranks: int, mute_after: float) -> tuple[int, ...]:
    """Find the ranks that hold up the others, by what they last wrote. Pure.

    Those that never wrote, else those whose heartbeat stopped well before the others',
    else those that are behind; all of them when none stands out.
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
    """`accelerate launch`, with the command line and environment of a job."""
    device = "cuda" if gpus else "cpu"
    spec = JobSpec(
        name="doctor",
        num_processes=ranks,
        strategy="ddp" if ranks > 1 else "single",
        mixed_precision="no",
        device=device,
    )
    launch = local.build(spec, run_dir, gpus=gpus, run_id=run_id)
    assert launch.command[-3:-1] == ["-m", "engine"], launch.command
    command = [
        *launch.command[:-2],
        "engine.doctor.allreduce",
        str(run_dir.root),
        f"--device={device}",
        f"--seconds={seconds:g}",
        f"--limit={limit:g}",
    ]
    environment = {"NCCL_DEBUG": "WARN"} | local.full_environment(launch)
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


def _stand_still(seen: Sequence[Stillness], ranks: int, still: float) -> bool:
    """Whether all ranks had met, and none has moved on for `still` seconds."""
    if len(seen) < ranks or not all(rank.status.step for rank in seen):
        return False
    return min(rank.still for rank in seen) > still


def _end(child: subprocess.Popen[bytes], run_id: str) -> tuple[int, ...]:
    """Kill what is left; returns the pids that do not go, as when the driver holds them."""
    child.poll()  # before anyone else collects it, and its status with it
    left = end_all(run_id)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GONE_WITHIN)
    return left


def _words(silent: Sequence[int], limit: float, still: float) -> str:
    who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    return f"{who} did not answer (waited {still:g} s after all ranks met, {limit:g} s in total)"


def _nccl_warning(log: Path) -> str | None:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    warnings = [line.partition(_NCCL_WARNING)[2].strip() for line in lines if _NCCL_WARNING in line]
    return warnings[-1] if warnings else None
