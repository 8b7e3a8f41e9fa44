"""`python -m engine RUNDIR`: one rank of a job. `accelerate launch` starts one per device."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

from engine.start.command import run_command


def main() -> int:
    """Run the job in the directory named on the command line.

    Returns:
        The exit status: 0 when the job ended as it should (completed or stopped), else 1 or 2.
    """
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: accelerate launch … -m engine RUNDIR", file=sys.stderr)
        return 2
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Raised in C code of an import, Python's KeyboardInterrupt is swallowed, and what fails
        # for want of that module is a riddle (numpy 2.4).
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from jobs.run.rundir import RunDir

    run_dir = RunDir(Path(sys.argv[1]).absolute())
    rank = int(os.environ.get("RANK", "0"))
    if not run_dir.job_file.is_file():
        print(f"{run_dir.root} is not a run directory: it has no job.yaml", file=sys.stderr)
        return 2
    run_dir.create()
    if not sys.stdout.isatty():
        _write_to_log(run_dir.rank_log(rank))

    # Where torchao is needed, it complains about kernels that no optimizer needs, and makes torch
    # complain about it.
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)

    # After the redirection, so that whatever these imports print is in the rank's own log.
    from engine.ranks.failure import record_failure
    from engine.ranks.telemetry import Telemetry
    from engine.start.lean_imports import hide, uncollected, unneeded
    from jobs.spec.file.load import load_spec

    faulthandler.enable()  # a crash in C leaves a stack too
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked for when the job stands still
    telemetry = Telemetry(run_dir, rank)
    try:
        with telemetry.phase("import"), uncollected():
            telemetry.say("importing libraries")
            spec = load_spec(run_dir.job_file)
            hide(*unneeded(spec))
            from engine.ranks.world import take_gpu

            take_gpu(spec)
            from engine import families
            from engine.run_job import run_rank

            # With its pipeline and its denoiser, which every job of the family needs.
            families.load(spec.model_family, spec.model_flavour).transformer_class()
        run_rank(run_dir, telemetry)
    except BaseException as error:
        record_failure(run_dir, rank, error, telemetry)
        # At once, and without Python's tidying up: another rank may wait in a collective, and a
        # destructor that tries one more would wait with it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    telemetry.close()
    return 0


def _write_to_log(path: Path) -> None:
    """Send standard output and error, of C libraries too, to the rank's own file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    run_command(main)
