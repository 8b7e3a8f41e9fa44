"""`python -m jobs.slurm.warden RUNDIR`: the batch step becomes the job's supervisor."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import UserError
from jobs.run.rundir import RunDir
from jobs.slurm.records import Allocation, read_handed_in
from jobs.slurm.supervise import Warden

if TYPE_CHECKING:
    from collections.abc import Mapping


def warden_of(run_dir: RunDir, environment: Mapping[str, str]) -> Warden:
    """The warden of this process's allocation.

    Raises:
        UserError: There is none, or the run belongs to another Slurm job.
    """
    try:
        allocation = Allocation(
            environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT") or 0)
        )
    except (KeyError, ValueError):
        raise UserError("not in a Slurm job; hand it in with sbatch") from None
    record = read_handed_in(run_dir)
    if record is None:
        return Warden(run_dir, allocation)
    if environment.get("SLURM_JOB_NAME") != record.name or record.id not in ("", allocation.id):
        raise UserError(f"{run_dir.root} belongs to Slurm job {record.name} ({record.id})")
    return Warden(run_dir, allocation, record.attempt)


def main() -> int:
    """Become the warden of the run directory on the command line."""
    run_dir = RunDir(Path(sys.argv[1]).absolute())
    try:
        warden = warden_of(run_dir, os.environ)
    except UserError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    run_dir.create()

    def note_limit(*_: object) -> None:
        warden.time_up = True

    def note_end(*_: object) -> None:
        warden.sigterm_received = True

    # A cancellation is SIGTERM: only USR2, which the script asks for, may requeue.
    signal.signal(signal.SIGUSR2, note_limit)
    signal.signal(signal.SIGTERM, note_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return warden.run()


if __name__ == "__main__":
    sys.exit(main())
