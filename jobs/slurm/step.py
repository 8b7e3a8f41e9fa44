"""One launch of a job's ranks in an allocation: `srun` and its arguments."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from jobs.launch import local
from jobs.machine import devices, processes
from jobs.memory.kept_prediction import keep
from jobs.run.diagnosis.rank_exits import rank_exits
from jobs.run.fence import FENCE_VARIABLE
from jobs.run.rundir import event, read_json, read_tail, write_atomic
from jobs.slurm import commands
from jobs.slurm.commands import AwayError
from jobs.slurm.script import PYTHON_VARIABLE, on_gpus, per_machine
from jobs.spec.rules.strategy import AS_ASKED, chosen_strategy, launched_strategy, world_size
from jobs.supervise.attempt import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from jobs.run.rundir import RunDir
    from jobs.slurm.records import Allocation
    from jobs.spec.job_spec import JobSpec


ASK_EVERY: Final = 5.0  # seconds
_LOOK_EVERY: Final = 0.5  # seconds
# What srun says when the controller is away, has just come back, or ends the job.
_REFUSED: Final = re.compile(
    r"Unable to create step|Unable to confirm allocation|Expired or invalid job"
)
_HALF: Final = "Application launch failed"  # a node did not respond


def start_step(
    spec: JobSpec, run_dir: RunDir, allocation: Allocation, run_id: str, restarts: int
) -> Attempt:
    """Start all ranks, one task each, and record it in `launch.json`.

    Raises:
        OSError: `srun` cannot be started.
    """
    before = read_json(run_dir.launch_file) or {}
    run_dir.forget_attempt()
    strategy, reason = _strategy(spec, before)
    address = spec.main_process_ip or socket.gethostname()
    environment = local.rank_variables(
        spec, run_dir, run_id, strategy, reason, on_gpus=on_gpus(spec)
    )
    environment |= {
        FENCE_VARIABLE: str(allocation),
        "FSDP_TUI_LOCAL_RANKS": str(per_machine(spec)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(spec.main_process_port or _free_port()),
    }
    if spec.num_machines == 1:
        environment |= local.loopback_variables(os.environ) | {"MASTER_ADDR": "127.0.0.1"}
    command = srun_command(spec, run_dir, os.environ)
    offset = run_dir.events.stat().st_size if run_dir.events.exists() else 0
    run_dir.launcher_log.write_bytes(b"")
    with open(run_dir.launcher_log, "ab") as log:
        child = subprocess.Popen(
            command,
            env=_without_foreign(os.environ) | environment,
            cwd=run_dir.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    processes.wait_for_by_hand(child.pid)
    kills = processes.kernel_oom_kills()
    attempt = Attempt(spec, shlex.join(command), None, child, offset, restarts, kills)
    record = {
        "command": command,
        "environment": environment,
        "gpus": [],
        "run_id": run_id,
        "slurm": {"job": allocation.id, "restart": allocation.restart},
        "restarts": restarts,
        "events_offset": offset,
        "oom_kills": kills,
        "launcher": None,
        "started": time.time(),
        "versions": local.versions(),
    }
    write_atomic(run_dir.launch_file, json.dumps(record, indent=2) + "\n", durable=True)
    keep(run_dir, spec, strategy, world_size(spec), on_gpus=on_gpus(spec))
    return attempt


def was_refused(run_dir: RunDir) -> bool:
    """Whether Slurm gave no step, or could not start all ranks: that is nobody's failure."""
    output = read_tail(run_dir.launcher_log)
    none = _REFUSED.search(output) is not None and not run_dir.rank_statuses()
    return none or _HALF in output


def were_terminated(run_dir: RunDir, ended_by_us: Collection[int]) -> bool:
    """Whether SIGTERM that we did not send ended ranks.

    A preemption begins so, with ranks alone; while they start, they cannot save.
    """
    ends = [rank_exit for rank_exit in rank_exits(run_dir) if rank_exit.rank not in ended_by_us]
    return any(rank_exit.code == -signal.SIGTERM for rank_exit in ends)


def await_answer(slurm_id: str, ends: Callable[[], bool]) -> str | None:
    """Ask for the state of a job that got no step until Slurm responds.

    Args:
        slurm_id: Slurm's number of the job.
        ends: Called about every half second; whether to wait no longer.

    Returns:
        Its state; "" if Slurm does not know it, None if the wait was to end.
    """
    asked_at = time.monotonic()
    while not ends():
        if time.monotonic() - asked_at >= ASK_EVERY:
            asked_at = time.monotonic()
            with suppress(AwayError):
                return commands.state_of(slurm_id)
        time.sleep(min(_LOOK_EVERY, ASK_EVERY))
    return None


def srun_command(spec: JobSpec, run_dir: RunDir, environment: Mapping[str, str]) -> list[str]:
    """The command that starts the ranks. Pure.

    Args:
        spec: The job.
        run_dir: Where they write.
        environment: May name the interpreter of the ranks, such as one in a container.
    """
    python = shlex.split(environment.get(PYTHON_VARIABLE, "")) or [sys.executable]
    return [
        "srun",
        f"--nodes={spec.num_machines}",
        f"--ntasks={world_size(spec)}",
        f"--ntasks-per-node={per_machine(spec)}",
        "--distribution=block",  # ranks of a machine are neighbors
        "--gpu-bind=none",  # each rank sees all GPUs of its node, and takes that of its number
        "--kill-on-bad-exit=0",  # the others may still have to say why, or to save
        # No --unbuffered: it gives tasks a terminal, and ranks without one write logs.
        "--wait=0",  # rank 0 may have more to write than the others
        *(spec.slurm_srun_args or []),
        *python,
        "-m",
        "jobs.slurm.task",
        str(run_dir.root),
    ]


def _strategy(spec: JobSpec, before: Mapping[str, object]) -> tuple[str, str]:
    """What runs; a restart keeps what `auto` chose at first."""
    environment = before.get("environment")
    strategy, reason = launched_strategy(environment if isinstance(environment, dict) else {})
    if spec.strategy == "auto" and strategy and reason != AS_ASKED:
        return strategy, reason
    names = [gpu.uuid for gpu in devices.gpus()] if on_gpus(spec) else []
    mine = names[: per_machine(spec)]
    return chosen_strategy(spec, local.room_of(spec, mine))


def _free_port() -> int:
    """A port of this node, on which rank 0 listens."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def _without_foreign(environment: Mapping[str, str]) -> dict[str, str]:
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        key: value
        for key, value in environment.items()
        if key not in dropped and not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }


def add_errors(run_dir: RunDir) -> None:
    """Add to the events what ranks other than the first left: no rank writes any more."""
    errors = [error for error in run_dir.rank_errors() if error["rank"]]
    with suppress(OSError), open(run_dir.events, "a", encoding="utf-8") as file:
        for error in errors:
            dropped = ("t", "kind", "trace")
            file.write(event("error", **{k: v for k, v in error.items() if k not in dropped}))
