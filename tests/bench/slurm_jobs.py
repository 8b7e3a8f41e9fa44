"""Measure the Slurm keeper and the dashboard with 1,000 jobs: `python tests/bench/slurm_jobs.py`.

A Slurm of shell scripts lists all of them; nearly all wait, some run and their wardens say so every
five seconds. Processor time is user and system time, without that of `squeue` itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jobs.backends.slurm.records import Allocation, WardenReport, warden_file, write_warden_report  # noqa: E402
from jobs.queue.states import State  # noqa: E402
from jobs.queue.store import Store  # noqa: E402
from jobs.run.rundir import RunDir  # noqa: E402
from tests.bench.scale import dashboard, keeper  # noqa: E402
from tests.support.jobs.fake_slurm import FakeSlurm  # noqa: E402
from tests.support.jobs.many_slurm_jobs import as_squeue, many_slurm_jobs  # noqa: E402
from tui.text.tables import table  # noqa: E402

if TYPE_CHECKING:
    from jobs.backends.slurm.commands import Listed

_BEAT: Final = 5.0  # seconds between two signs of life of a warden


def beat(store: Store, running: list[Listed], ended: threading.Event) -> None:
    """What the wardens write, until the end."""
    number = 0
    while not ended.wait(_BEAT if number else 0):
        number += 1
        for one in running:
            run_dir = RunDir(store.home / "runs" / f"{one.id}-j")
            said = WardenReport(Allocation(one.id), State.RUNNING, "all ranks are up", "n1", number)
            write_warden_report(warden_file(run_dir), said)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--running", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        slurm = FakeSlurm.on_path(Path(folder, "slurm"), patch)
        home = Path(folder, "home")
        home.mkdir(mode=0o700)
        store = Store(home)
        listed = many_slurm_jobs(store, asked.jobs)
        running = [replace(one, state="RUNNING", nodes="n1") for one in listed[: asked.running]]
        slurm.say("listing", as_squeue([*running, *listed[asked.running :]]))
        ended = threading.Event()
        wardens = threading.Thread(target=beat, args=(store, running, ended))
        wardens.start()
        try:
            rows = [keeper(home, asked.seconds, "jobs.backends.slurm.keeper")]
            rows += dashboard(home, " j ", 10.0, asked.seconds)
        finally:
            ended.set()
            wardens.join()
        calls = slurm.calls("squeue")
    print(table(("what", "processor", "note"), [*rows, ("squeue", f"{calls} calls", "")]))


if __name__ == "__main__":
    main()
