"""`python -m jobs.slurm`: look after the Slurm jobs of a state directory, detached."""

from __future__ import annotations

import os

from jobs.machine.start_detached import leave_starter


def main() -> None:
    """Leave the starter's process and session, then keep the jobs."""
    leave_starter()
    # After leaving: these imports take longer than the starter should wait.
    import signal

    from jobs.queue.store import SERVICE, Store
    from jobs.slurm.keeper import ASK_EVERY, IDLE_SECONDS, keep

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keep(
        Store(patience=SERVICE),
        float(os.environ.get("FSDP_TUI_RUNNER_IDLE", IDLE_SECONDS)),
        float(os.environ.get("FSDP_TUI_SLURM_INTERVAL", ASK_EVERY)),
    )


if __name__ == "__main__":
    main()
