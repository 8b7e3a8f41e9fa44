"""`python -m jobs.supervise ID`: become the supervisor of a job, detached from the starter."""

from __future__ import annotations

import sys

from jobs.machine.start_detached import leave_starter


def main() -> None:
    leave_starter()
    # After leaving: these imports take longer than the starter should wait.
    from jobs.queue.store import SERVICE, Store
    from jobs.supervise.supervisor import supervise

    supervise(Store(patience=SERVICE), int(sys.argv[1]))


if __name__ == "__main__":
    main()
