"""`python launcher.py RUNDIR RANKS STEPS GRACE`: what `accelerate launch` looks like from outside.

As torch elastic does, it starts every rank in a session of its own; hands SIGTERM on to them; and
when one fails, ends the others (SIGTERM, after GRACE seconds SIGKILL), prints which one it was,
and exits with status 1. With `FAKE_LAUNCHER=refuse` it prints an error and exits with status 2
before any rank starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def main() -> int:
    run_dir, ranks, steps, grace = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if os.environ.get("FAKE_LAUNCHER") == "refuse":
        print("warming up\nerror: no such option: --fsdp_versoin")
        return 2
    script = str(Path(__file__).resolve().parent / "rank.py")
    children = [
        subprocess.Popen(
            [sys.executable, script, run_dir, str(rank), str(ranks), steps], start_new_session=True
        )
        for rank in range(ranks)
    ]

    def hand_on(number: int, _: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    failed = None
    while failed is None and any(child.poll() is None for child in children):
        time.sleep(0.01)
        failed = next((r for r, c in enumerate(children) if c.poll() not in (None, 0)), None)
    if failed is None:
        return 0
    hand_on(signal.SIGTERM, None)
    deadline = time.monotonic() + grace
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    hand_on(signal.SIGKILL, None)
    for child in children:
        child.wait()
    first = children[failed]
    print(SUMMARY.format(
        rank=failed, code=first.returncode, pid=first.pid, binary=sys.executable, time=time.ctime()
    ))  # fmt: skip
    return 1


if __name__ == "__main__":
    sys.exit(main())
