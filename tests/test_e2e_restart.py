"""A real job loses a rank, and a real disk runs full: what is left is exact and whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from test_e2e_training import Bench, Run

from jobs.checkpoints import find_damage
from jobs.errors import UserError
from jobs.processes import with_run_id
from jobs.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
SETTINGS = {"max_train_steps": 10, "checkpointing_steps": 4}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("restart"), toy)
    yield bench
    end_all(bench)


def end_all(bench: Bench) -> None:
    with suppress(UserError, sqlite3.Error):  # nothing was submitted, or its disk is full
        for job in bench.store.all():
            for process in with_run_id(job.run_id):
                process.signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def straight(bench: Bench) -> Run:
    """A job all of whose processes are hung up on at step 2, and that goes on to its end.

    Elastic would end the ranks: its launcher has a handler of its own for SIGHUP.
    """
    job = bench.submit(name="hung-up", stop_grace_seconds=5, **SETTINGS)
    bench.wait_for_step(job, 2)
    supervisor = bench.store.get(job).supervisor
    assert supervisor is not None
    for process in (supervisor, *with_run_id(bench.store.get(job).run_id)):
        process.signal(signal.SIGHUP)
    bench.wait(job, "completed", "stopped", "failed", "lost")
    return Run(job, bench.store.get(job).run_dir)


def test_a_hang_up_of_every_process_is_not_noticed(bench: Bench, straight: Run) -> None:
    facts = bench.show(straight.job)
    assert facts["state"] == "completed", facts["reason"]


def test_a_killed_rank_costs_steps_and_changes_nothing(bench: Bench, straight: Run) -> None:
    job = bench.submit(name="shot", max_restarts=1, **SETTINGS)
    files = bench.store.get(job).run_dir
    bench.until(lambda: files.latest_checkpoint() is not None)
    rank = next(status for status in files.rank_statuses() if status.rank == 1)
    assert rank.step < SETTINGS["max_train_steps"], "too late"
    os.kill(rank.pid, signal.SIGKILL)

    facts = bench.wait(job, "completed", "stopped", "failed", "lost")
    assert facts["state"] == "completed", facts["reason"]
    reasons = [change.reason for change in bench.store.history(job)]
    assert any(r.startswith("restart 1 of 1 after: rank 1 was killed by SIGKILL") for r in reasons)
    starts = [
        record["step"]
        for line in files.events.read_text().splitlines()
        if (record := json.loads(line))["kind"] == "start"
    ]
    assert starts[0] == 0
    assert starts[1:] in ([4], [8]), "it went on after a checkpoint"
    shot = Run(job, RunDir(files.root))
    assert len(straight.losses) == SETTINGS["max_train_steps"]
    assert shot.losses == straight.losses, "bit for bit"
    assert shot.norms == straight.norms, "bit for bit"
    assert not bench.processes(job)


@pytest.fixture
def small_disk(bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    """A bench whose state directory is on a small file system; the cache is elsewhere."""
    home = tmp_path / "small"
    (home / "state").mkdir(parents=True)
    (bench.home / "cache").mkdir(mode=0o700, exist_ok=True)
    (home / "cache").symlink_to(bench.home / "cache")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "none", str(home / "state")],
        capture_output=True, text=True, check=False,
    ) if shutil.which("mount") else None  # fmt: skip
    if mounted is None or mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted and mounted.stderr.strip()}")
    small = Bench(home, bench.toy)
    try:
        yield small
    finally:
        end_all(small)
        subprocess.run(["umount", "-l", str(home / "state")], check=True)


def test_a_disk_that_is_full_while_saving(small_disk: Bench) -> None:
    """The first checkpoint fits; then someone else fills the disk but for a part of the second."""
    job = small_disk.submit(
        name="full", max_train_steps=5000, checkpointing_steps=4, checkpoints_total_limit=5,
        lora_rank=4,
    )  # fmt: skip
    files = small_disk.store.get(job).run_dir
    small_disk.until(lambda: files.latest_checkpoint() is not None)
    step, first = files.complete_checkpoints()[0]
    assert step == 4
    needed = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    room = shutil.disk_usage(files.root).free
    with open(small_disk.home / "state" / "filler", "wb") as filler:
        filler.write(b"\0" * max(0, room - needed // 2))

    try:
        facts = small_disk.wait(job, "completed", "stopped", "failed", "lost")
    finally:
        (small_disk.home / "state" / "filler").unlink()
    assert facts["state"] == "failed"
    assert re.search(r"cannot save step-\d+: (it takes|No space left)", facts["reason"])
    assert "is intact" in facts["reason"]
    assert "\n" not in facts["reason"]
    assert "Traceback" not in facts["reason"]
    assert find_damage(first) is None
    for _, path in files.complete_checkpoints():
        assert find_damage(path) is None
    assert list(files.checkpoints.glob(".*")) == [], "the unfinished one takes no space"
    assert not small_disk.processes(job)
