"""`python -m jobs.supervise ID`: become the supervisor of a job, detached from whoever started it.

The first process ends at once, so that the starter has no child to wait for; the second leads a
session of its own, which no closing terminal reaches.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    # After the fork: these imports take longer than the starter should wait.
    from jobs.store import Store
    from jobs.supervisor import supervise

    supervise(Store(), int(sys.argv[1]))


if __name__ == "__main__":
    main()
