"""`python -m jobs.supervise ID`: the command that keepers of version 0.1 use after an update."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("jobs.backends.local", run_name="__main__", alter_sys=True)
