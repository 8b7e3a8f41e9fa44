"""`python launcher.py RUNDIR RANKS STEPS GRACE`: what `accelerate launch` looks like from outside.

As torch elastic does, it starts every rank in a session of its own; hands SIGTERM on to them; and
when one fails, ends the others (SIGTERM, after GRACE seconds SIGKILL), prints which one it was,
and exits with status 1. With `FAKE_LAUNCHER=refuse` it prints an error and exits with status 2
before any rank starts. Ranks are forked, which spares each of them the imports; `.ended-N` in the
run directory says that it has noticed the end of rank N.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

SUMMARY = """\
failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: {binary}
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : node
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
"""


def start(run_dir: Path, rank: int, ranks: int, steps: int) -> int:
    """Fork a rank; its pid."""
    from rank import Rank  # type: ignore[import-not-found]  # beside this script

    from jobs.rundir import RunDir

    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        status = Rank(RunDir(run_dir), rank, ranks, steps).run()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> int:
    run_dir, ranks, steps, grace = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if os.environ.get("FAKE_LAUNCHER") == "refuse":
        print("warming up\nerror: no such option: --fsdp_versoin")
        return 2
    for mark in Path(run_dir).glob(".ended-*"):  # of an earlier attempt
        mark.unlink()
    living = {start(Path(run_dir), rank, ranks, int(steps)): rank for rank in range(ranks)}

    def hand_on(number: int, _: object) -> None:
        for pid in living:
            with suppress(ProcessLookupError):  # it has just been waited for
                os.kill(pid, number)

    def next_end() -> tuple[int, int, int]:
        """Pid, rank and exit status of the next rank that ends."""
        pid, status = os.wait()
        rank = living.pop(pid)
        Path(run_dir, f".ended-{rank}").touch()
        return pid, rank, os.waitstatus_to_exitcode(status)

    signal.signal(signal.SIGTERM, hand_on)
    while living:
        pid, rank, code = next_end()
        if code:
            break
    else:
        return 0
    hand_on(signal.SIGTERM, None)
    signal.signal(signal.SIGALRM, lambda *_: hand_on(signal.SIGKILL, None))
    signal.setitimer(signal.ITIMER_REAL, max(grace, 0.001))
    while living:
        next_end()
    print(SUMMARY.format(
        rank=rank, code=code, pid=pid, binary=sys.executable, time=time.ctime()
    ))  # fmt: skip
    return 1


if __name__ == "__main__":
    sys.exit(main())
