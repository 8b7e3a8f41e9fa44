"""Start background processes of a run: its trackers, and pushes to the hub."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.launch import Launch, full_environment
from jobs.machine.bytecode import bytecode_variables
from jobs.machine.processes import RUN_ID_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.job import Job
    from jobs.run.rundir import RunDir
    from jobs.spec.keys.output import HubKeys
    from jobs.spec.keys.tracking import TrackingKeys

_FOLLOWER_VARIABLES: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "CUDA_VISIBLE_DEVICES": "",  # followers must not use GPU memory
    "OMP_NUM_THREADS": "1",
}


def check_trackers(spec: TrackingKeys) -> None:
    """Check that the job's trackers are installed.

    Raises:
        SpecError: One is not; the message says how to install it.
    """
    missing = [name for name in spec.report_to if find_spec(name) is None]
    if missing:
        raise SpecError(
            f"report_to: {missing[0]} is not installed", f"pip install {' '.join(missing)}"
        )


def start_trackers(spec: TrackingKeys, run_dir: RunDir) -> list[subprocess.Popen[bytes]]:
    """Start a follower for each of the run's trackers; a running one is not started twice.

    They carry no run id, end by themselves, and are not waited for.

    Raises:
        OSError: One could not be started.
    """
    return [
        _start_follower(
            run_dir, ["engine.tracking", str(run_dir.root), name], run_dir.tracker_log(name)
        )
        for name in spec.report_to
    ]


def start_push(spec: HubKeys, job: Job) -> list[subprocess.Popen[bytes]]:
    """Start the process that pushes a job's exports to the hub, if the job asks for it.

    Raises:
        OSError: It could not be started.
    """
    if not spec.push_to_hub:
        return []
    log = job.run_dir.logs / "push.log"
    return [_start_follower(job.run_dir, ["jobs.hub.push", str(job.id)], log)]


def _start_follower(run_dir: RunDir, module: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = full_environment(Launch([], _FOLLOWER_VARIABLES | bytecode_variables()))
    environment.pop(RUN_ID_VARIABLE, None)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            env=environment,
            cwd=run_dir.root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
