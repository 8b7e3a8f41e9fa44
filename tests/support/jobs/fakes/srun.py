"""`srun … RUNDIR` of a fake Slurm: forks fake ranks, and tells their ends as srun does."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.jobs.fakes.rank import Rank


def main() -> int:
    """Start the ranks and wait for them; SIGTERM kills them all."""
    run_dir = RunDir(Path(sys.argv[-1]))
    number = next(int(w.partition("=")[2]) for w in sys.argv if w.startswith("--ntasks="))
    steps = load_spec(run_dir.job_file).max_train_steps
    pids: dict[int, int] = {}
    for rank in range(number):
        if (pid := os.fork()) == 0:
            os._exit(Rank(run_dir, rank, number, steps).run())
        pids[pid] = rank

    def abort(*_: object) -> None:
        print("srun: forcing job termination", file=sys.stderr, flush=True)
        for pid in list(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, abort)
    worst = 0
    while pids:
        pid, status = os.wait()
        rank, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            how = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
            print(f"srun: error: n{rank // 2 + 1}: task {rank}: {how}", file=sys.stderr, flush=True)
        worst = max(worst, code if code >= 0 else 128 - code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
