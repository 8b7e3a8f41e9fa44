"""`python -m tests.support.forks.subject FILE HOW`: write down what this is; end as asked."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(file: Path, how: str) -> None:
    facts = {
        "pid": os.getpid(),
        "leads": os.getsid(0) == os.getpid(),
        "cwd": os.getcwd(),
        "environment": os.environ.copy(),
        "seen": Path("/proc/self/environ").read_text().rstrip("\0").split("\0"),
        "line": Path("/proc/self/cmdline").read_text().split("\0"),
        "input": sys.stdin.read(),
        "ignores_hangup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    }
    print("out")
    print("err", file=sys.stderr)
    file.with_suffix(".new").write_text(json.dumps(facts))
    file.with_suffix(".new").rename(file)
    while how == "wait":  # not `signal.pause`, before which a signal may come and be forgotten
        time.sleep(0.05)
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "raise":
        raise RuntimeError("as told")
    sys.exit(int(how) if how.isdigit() else how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
