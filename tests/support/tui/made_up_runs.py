"""For tests of the dashboard: made-up run directories (real files, no process)."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any, Final

from jobs.queue.states import State
from jobs.queue.store import Terms
from jobs.run.rundir import RankStatus, RunDir, event, write_atomic
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.fakes.supervise import start_nothing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from jobs.queue.store import Job, Store

GIB = 2**30


# Seconds between two looks at something, in tests that change it.
_PERIODS: Final = {
    "tui.look.collector.PERIOD": 0.05,
    "tui.look.job_look.PERIOD": 0.1,
    "tui.job.checkpoints._EVERY": 0.05,
    "tui.log.log_view._LOOK_EVERY": 0.02,
    "tui.plots.measures._EVERY": 0.02,
}
# Seconds that the dashboard waits for more of the same before it does something.
_DELAYS: Final = {
    "tui.plots.panel._REDRAW_EVERY": 0.02,
    "tui.form.data._DRAW_AFTER": 0.005,
    "tui.form.checks._AFTER": 0.02,
    "tui.form.beside._SETTLES_IN": 0.02,
}


def nothing_starts(patch: pytest.MonkeyPatch) -> None:
    """No job gets a process, and none is missed; all is looked at every few milliseconds."""
    start_nothing(patch)
    patch.setattr("jobs.backends.local.dispatch._unsupervised", lambda job: False)
    look_every(patch)


def look_every(patch: pytest.MonkeyPatch, seconds: float | None = None) -> None:
    """Let everything be looked at so often, by default every few milliseconds; draw at once."""
    for name, usual in _PERIODS.items():
        patch.setattr(name, usual if seconds is None else seconds)
    for name, delay in _DELAYS.items():
        patch.setattr(name, delay)
    patch.setattr("tui.dashboard.panels.redraw_after", lambda *_: 0.0)


def add_job(
    store: Store,
    name: str = "demo",
    *,
    state: State = State.QUEUED,
    reason: str = "",
    ranks: int = 2,
    gpus: Sequence[str] = (),
    wanted: int | list[str] | None = None,
    total_steps: int = 200,
    job_file: str = "name: demo\n",
    sweep: str = "",
) -> Job:
    """A job in the given state, brought there through the states that lead to it."""

    def prepare(run_dir: RunDir) -> None:
        run_dir.create()
        run_dir.job_file.write_text(job_file)

    wants = wanted if wanted is not None else (list(gpus) or None)
    job = store.add(
        name=name,
        terms=Terms(ranks, wants, total_steps, sweep=sweep),
        run_id=f"run-{name}",
        prepare=prepare,
    )
    if state is State.QUEUED:
        if reason:
            store.explain(job.id, reason)
        return store.get(job.id)
    store.claim(job.id, gpus, "starting on CPU ranks" if not gpus else "starting on GPUs")
    if state is not State.STARTING:
        store.change(job.id, State.RUNNING, "all ranks are up")
    if state not in (State.STARTING, State.RUNNING):
        store.change(job.id, state, reason or f"now {state}")
    return store.get(job.id)


def write_steps(
    job: Job, count: int, *, first: int = 1, seconds: float = 0.42, seed: int = 1
) -> None:
    """Optimizer steps with a falling, noisy loss."""
    noise = random.Random(seed)
    lines = []
    for step in range(first, first + count):
        loss = 0.38 + 0.55 * math.exp(-step / 60) + noise.gauss(0, 0.045)
        lines.append(
            event(
                "step",
                step=step,
                epoch=step / 100,
                loss=round(loss, 5),
                lr=1e-3,
                grad_norm=round(0.3 + noise.random() / 5, 4),
                seconds=round(seconds * noise.uniform(0.95, 1.06), 4),
                images_per_second=round(2 / seconds, 3),
            )
        )
    append_events(job, *lines)


def write_facts(job: Job, ranks: int = 2) -> None:
    """How the ranks share the work, and what each phase took."""
    phases = {"load": 22, "forward": 61, "backward": 74, "step": 40, "save": 31}
    append_events(
        job,
        event(
            "sharding",
            ranks=ranks,
            units={"FluxTransformerBlock": 19, "FluxSingleTransformerBlock": 38},
            local_bytes=11 * GIB,
            root_bytes=265 << 20,
        ),
        event("start", step=0, strategy="fsdp2", strategy_reason="a full copy would fill a GPU"),
        event(
            "memory",
            measure="allocated",
            step=3,
            peaks={
                name: [size * GIB + rank for rank in range(ranks)] for name, size in phases.items()
            },
        ),
    )


def append_events(job: Job, *lines: str) -> None:
    with open(job.run_dir.events, "a", encoding="utf-8") as file:
        file.writelines(lines)


def write_rank(job: Job, rank: int, **changes: Any) -> None:
    """What a rank says of itself; a fresh heartbeat unless `changes` say otherwise."""
    now = time.time()
    values: dict[str, Any] = {
        "rank": rank,
        "pid": 4000 + rank,
        "started": now - 90,
        "host": "node",
        "device": "cpu",
        "phase": "train",
        "step": 0,
        "heartbeat": now,
        "progressed": now,
        "rss": int(1.31 * GIB) + rank * 7_000_000,
    }
    write_atomic(job.run_dir.rank_file(rank), RankStatus(**values | changes).to_json())


def write_log(job: Job, text: str, rank: int = 0, *, append: bool = False) -> None:
    with open(job.run_dir.rank_log(rank), "a" if append else "w", encoding="utf-8") as file:
        file.write(text)


def write_checkpoint(job: Job, step: int, **manifest: Any) -> Path:
    return save_checkpoint(job.run_dir, step, **manifest)


class FakeGpus:
    """Stands in for `jobs.machine.devices.gpus`."""

    def __init__(self, count: int) -> None:
        from jobs.machine.devices import Gpu

        self.gpus = [
            Gpu(
                index=index,
                uuid=f"GPU-{index:04}",
                name="NVIDIA H200",
                memory_total=int(139.8 * GIB),
                memory_used=int((3 + 31 * (index % 4)) * GIB),
                utilisation=(0, 97, 99, 34)[index % 4],
                temperature=41 + 9 * (index % 4),
                power=90.0 + 170 * (index % 4),
                power_limit=700.0,
            )
            for index in range(count)
        ]

    def __call__(self) -> list[Any]:
        return list(self.gpus)
