"""A process that makes jobs look as if they trained: `fake_training.py HOME JOB… `.

It stands for their supervisors and all their ranks: heartbeats and a step once a second, until its
standard input is closed.
"""

from __future__ import annotations

import math
import os
import select
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from jobs.machine.processes import ProcessId
from jobs.queue.store import Store
from jobs.run.rundir import event
from tests.support.tui.made_up_runs import GIB, append_events, write_rank

FIRST: Final = 501  # what came before is written by whoever made the job
_PERIOD: Final = 1.0


def main() -> None:
    """Tend the jobs until nobody holds the other end of standard input."""
    store = Store(Path(sys.argv[1]))
    me = ProcessId.of(os.getpid())
    assert me is not None
    jobs = [store.get(int(word)) for word in sys.argv[2:]]
    for job in jobs:
        assert store.take_over(job.id, job.supervisor, me)
    step = FIRST - 1
    while True:
        step += 1
        for job in jobs:
            for rank in range(job.ranks):
                gpu = job.gpus[rank] if job.gpus else None
                write_rank(
                    job,
                    rank,
                    step=step,
                    pid=os.getpid(),
                    device_uuid=gpu,
                    device="cuda" if gpu else "cpu",
                    allocated=41 * GIB,
                    reserved=52 * GIB,
                    peak=61 * GIB,
                )
            loss = 0.4 + 0.5 * math.exp(-step / 60) + 0.03 * math.sin(step * 7.1)
            append_events(
                job,
                event(
                    "step",
                    step=step,
                    epoch=step / 100,
                    loss=round(loss, 4),
                    lr=1e-4,
                    grad_norm=0.3,
                    seconds=1.0,
                    images_per_second=2.0 * job.ranks,
                ),
            )
        if step == FIRST:
            print("ready", flush=True)
        if select.select([sys.stdin], [], [], _PERIOD)[0]:
            return


if __name__ == "__main__":
    main()
