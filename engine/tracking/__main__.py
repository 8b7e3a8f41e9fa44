"""`python -m engine.tracking RUN_DIR NAME`: report a run to one tracker until the run has ended.

A separate process: a tracker that hangs, crashes or computes cannot delay a step, and its
network and files are no business of the ranks. It sees no GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.start.command import OneLineParser
from jobs.machine.file_lock import acquire
from jobs.run.rundir import RunDir

_NICE = 10
_LOCK_TIMEOUT = 180.0  # seconds for the follower of an earlier attempt to finish


def main() -> int:
    """Run the command."""
    parser = OneLineParser(prog="python -m engine.tracking", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name", help="the tracker, a name of report_to")
    words = parser.parse_args()
    run_dir = RunDir(words.run_dir.absolute())
    run_dir.tracking.mkdir(mode=0o700, exist_ok=True)
    with open(run_dir.tracking / f"{words.name}.lock", "wb") as lock:
        if not acquire(lock, patience=_LOCK_TIMEOUT):
            return 0  # another follower is handling this run
        os.nice(_NICE)
        # Import after taking the lock, since it imports torch through accelerate.
        from engine.tracking.follower import Follower

        return Follower(run_dir, words.name).run()


if __name__ == "__main__":
    raise SystemExit(main())
