"""`python -m jobs.notify`: deliver the notification that the environment describes."""

from __future__ import annotations

import os
import time

from jobs.notify.config import read_config
from jobs.notify.deliver import deliver


def main() -> int:
    """Deliver the notification and print a line for each destination."""
    facts = {key: value for key, value in os.environ.items() if key.startswith("FSDP_TUI_")}
    config = read_config()
    for what, wrong in deliver(config, facts) if config is not None else ():
        outcome = wrong or "notified"
        print(time.strftime("%Y-%m-%d %H:%M:%S"), facts["FSDP_TUI_EVENT"], f"{what}: {outcome}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
