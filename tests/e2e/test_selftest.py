"""`fsdp-tui selftest` on two CPU ranks: every scene with real jobs, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from jobs.queue.store import Store
from tests.support.forks import client as forks
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_this_machine_passes(home: Path) -> None:
    python = forks.python()  # of all its processes; see `tests.support.jobs.real_jobs`
    done = subprocess.run(
        [python, "-m", "tui", "selftest", "--cpu", "--json"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON_EXEC": python},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [one["name"] for one in report["findings"]] == [
        "train",
        "stop, resume",
        "saves",
        "export",
        "ddp",
        "fsdp2",
        "all-reduce",
        "killed rank",
    ]
    by_name = {one["name"]: one for one in report["findings"]}
    assert "bit-identical" in by_name["stop, resume"]["found"]
    assert 0 < by_name["stop, resume"]["facts"]["step"] < 8
    assert by_name["killed rank"]["found"].startswith("“rank 1 was killed by SIGKILL at step")
    assert Store(home).all() == []
    assert not (home / "selftest").exists()
    kept = json.loads((home / "selftest.json").read_text())
    assert kept["findings"] == report["findings"]
