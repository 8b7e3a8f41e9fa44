"""`python supervise.py ID`: the real supervisor, with a fake launcher and shorter waits.

Everything that a test wants to be different is said in `FAKE_*` environment variables, which
supervisor, launcher and ranks inherit:

    FAKE_STEP_SECONDS     how long a step takes
    FAKE_RANKS            what ranks do besides training (see `fakes/rank.py`)
    FAKE_LAUNCHER         what the launcher does besides launching (see `fakes/launcher.py`)
    FAKE_TERM_GRACE, FAKE_FAILURE_GRACE, FAKE_STACKS_TAKE
                          seconds, in the place of the supervisor's own
    FAKE_TROUBLE          `build` or `housekeeping`: this raises in the supervisor
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from jobs.launchers.local import Launch
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec
    from jobs.store import Job

HERE = Path(__file__).resolve().parent


def start_supervisor(job: Job) -> None:
    """Stands in for `jobs.dispatch._start_supervisor`."""
    job.run_dir.create()
    with open(job.run_dir.supervisor_log, "ab") as log:
        subprocess.run(
            [sys.executable, str(HERE / "supervise.py"), str(job.id)],
            env=os.environ | {"FSDP_TUI_HOME": str(job.run_dir.root.parent.parent)},
            cwd=job.run_dir.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )


def start_nothing(patch: pytest.MonkeyPatch) -> list[int]:
    """No job gets a supervisor; the ids of those that would have got one, as they come."""
    started: list[int] = []
    patch.setattr("jobs.dispatch._start_supervisor", lambda job: started.append(job.id))
    return started


def build(spec: JobSpec, run_dir: RunDir, *, gpus: Sequence[str], run_id: str) -> Launch:
    """Stands in for `jobs.launchers.local.build`."""
    from jobs.launchers.local import Launch
    from jobs.processes import RUN_ID_VARIABLE
    from jobs.strategy import world_size

    if os.environ.get("FAKE_TROUBLE") == "build":
        raise ArithmeticError("an error that nobody thought of")
    command = [
        sys.executable, str(HERE / "launcher.py"), str(run_dir.root), str(world_size(spec)),
        str(spec.max_train_steps), str(spec.stop_grace_seconds),
    ]  # fmt: skip
    return Launch(command, {RUN_ID_VARIABLE: run_id})


def _no_space(*_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disguise() -> None:
    """In this process, jobs get fake launchers, and supervisors wait less."""
    from jobs import dispatch, supervisor
    from jobs.launchers import local

    local.build = build
    dispatch._start_supervisor = start_supervisor
    settings: Any = supervisor
    settings.LOOK_EVERY = 0.03
    settings.HOUSEKEEPING_EVERY = 0.1
    settings.TERM_GRACE = float(os.environ.get("FAKE_TERM_GRACE", "30"))
    settings.FAILURE_GRACE = float(os.environ.get("FAKE_FAILURE_GRACE", "30"))
    settings.STACKS_TAKE = float(os.environ.get("FAKE_STACKS_TAKE", "0.1"))
    if os.environ.get("FAKE_TROUBLE") == "housekeeping":
        settings.cap_logs = _no_space


def main() -> None:
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    disguise()
    from jobs.store import Store
    from jobs.supervisor import supervise

    supervise(Store(), int(sys.argv[1]))


if __name__ == "__main__":
    main()
