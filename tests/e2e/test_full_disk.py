"""A real disk runs full under a real job: what is left is exact and whole."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from jobs.errors import UserError
from jobs.machine.processes import with_run_id
from jobs.run.checkpoint_files import find_damage
from tests.support.jobs.held_ranks import HeldRanks
from tests.support.jobs.real_jobs import PATIENCE, Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path: Path, toy: Path) -> Iterator[Bench]:
    """A bench whose state directory is on a small file system; the cache is elsewhere."""
    (tmp_path / "state").mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "none", str(tmp_path / "state")],
            capture_output=True,
            text=True,
            check=False,
        )
        if shutil.which("mount")
        else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted and mounted.stderr.strip()}")
    small = Bench(tmp_path, toy)
    try:
        yield small
    finally:
        end_all(small)
        subprocess.run(["umount", "-l", str(tmp_path / "state")], check=True)


def end_all(bench: Bench) -> None:
    with suppress(UserError, sqlite3.Error):  # nothing was submitted, or its disk is full
        for job in bench.store.all():
            for process in with_run_id(job.run_id):
                process.signal(signal.SIGKILL)


def test_a_disk_that_is_full_while_saving(small_disk: Bench) -> None:
    """The first checkpoint fits; then someone else fills the disk but for a part of the second."""
    job = small_disk.submit(
        name="full",
        max_train_steps=5000,
        checkpointing_steps=4,
        checkpoints_total_limit=5,
        lora_rank=4,
    )
    files = small_disk.store.get(job).run_dir
    held = HeldRanks(
        small_disk.store, lambda run_dir: run_dir.latest_checkpoint() is not None, PATIENCE
    )
    small_disk.until(held.are_suspended)  # they would take of the space that is to be filled
    step, first = files.complete_checkpoints()[0]
    assert step == 4
    needed = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    room = shutil.disk_usage(files.root).free
    with open(small_disk.home / "state" / "filler", "wb") as filler:
        filler.write(b"\0" * max(0, room - needed // 2))
    held.let_go()

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
