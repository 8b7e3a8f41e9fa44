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
        The exit status: 0 if the job completed or was stopped, else 1 or 2.
    """
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: accelerate launch … -m engine RUNDIR", file=sys.stderr)
        return 2
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # If Python's KeyboardInterrupt is raised in C code during an import, it is swallowed, and
        # later failures due to the missing module are hard to understand (numpy 2.4).
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

    # If torchao is needed, it warns about kernels that no optimizer uses, and triggers a torch
    # warning.
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)

    # Import after the redirection, so that output of these imports goes to the rank's own log.
    from engine.ranks.failure import record_failure
    from engine.ranks.telemetry import Telemetry
    from engine.start.lean_imports import hide, uncollected, unneeded
    from jobs.spec.file.load import load_spec

    faulthandler.enable()  # print a stack on crashes in C too
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # used when the job makes no progress
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

            # Import the pipeline and denoiser classes now, since every job of the family needs
            # them.
            families.load(spec.model_family, spec.model_flavour).transformer_class()
        run_rank(run_dir, telemetry)
    except BaseException as error:
        record_failure(run_dir, rank, error, telemetry)
        # Exit without Python's cleanup: another rank may be waiting in a collective, and a
        # destructor that starts one more would wait with it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    telemetry.close()
    return 0


def _write_to_log(path: Path) -> None:
    """Redirect standard output and error, including that of C libraries, to the rank's log."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    run_command(main)
