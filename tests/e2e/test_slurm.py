"""Real training on a real Slurm of two nodes or more, where SLURM_CONF names one."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from jobs.backends.slurm.records import read_submission
from jobs.run.rundir import RunDir
from tests.support.jobs.real_jobs import Bench, Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="SLURM_CONF names no Slurm"),
]
NODES = {"launcher": "slurm", "num_machines": 2, "num_processes": 4}


@pytest.fixture(scope="module")
def bench(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_TUI_SLURM_INTERVAL", "2")
        yield Bench(tmp_path_factory.mktemp("slurm"), toy, forked=False)


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def slurm_id(bench: Bench, job: int) -> str:
    record = read_submission(bench.store.get(job).run_dir)
    assert record is not None
    return record.id


def test_ranks_on_two_nodes_train_as_ranks_on_one(bench: Bench) -> None:
    """HSDP, which `auto` chooses, and FSDP2: to the last digit."""
    local = bench.run(num_processes=4, strategy="fsdp2")
    for strategy in ("auto", "fsdp2"):
        nodes = bench.run(strategy=strategy, **NODES)
        assert nodes.losses == local.losses
        assert nodes.norms == local.norms
        assert all("step 4/4" in nodes.files.rank_log(rank).read_text() for rank in range(4))
    assert bench.show(2)["strategy"] == "hsdp"
    assert "each holds a replica" in bench.show(2)["strategy_reason"]


def test_a_job_goes_on_after_its_time_limit(bench: Bench) -> None:
    """Slurm's signal before the limit: saved, requeued under the same id, resumed, stopped."""
    values: dict[str, Any] = {**NODES, "max_train_steps": 100_000}
    job = bench.submit(**values)
    bench.wait_for_step(job, 3)
    run_dir, number = bench.store.get(job).run_dir, slurm_id(bench, job)
    slurm("scancel", "--batch", "--signal=USR2", number)
    bench.wait(job, "queued")
    saved = run_dir.latest_checkpoint()
    assert saved is not None
    bench.until(lambda: slurm("squeue", "-h", "-j", number, "-o", "%T").strip() == "PENDING")
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
    bench.wait_for_step(job, saved[0] + 3)
    assert slurm_id(bench, job) == number
    assert bench.cli("stop", str(job)).returncode == 0
    facts = bench.wait(job, "stopped")
    assert facts["step"] > saved[0]
    steps = [step.step for step in Run(job, RunDir(run_dir.root)).steps]
    assert steps == list(range(1, facts["step"] + 1)), "none was lost, none trained twice"


def test_a_cancelled_job_stays_cancelled(bench: Bench) -> None:
    job = bench.submit(**NODES, max_train_steps=100_000)
    bench.wait_for_step(job, 3)
    slurm("scancel", slurm_id(bench, job))
    facts = bench.wait(job, "stopped", "failed", "lost", "completed")
    assert facts["state"] == "stopped"
    assert facts["checkpoints"], "the ranks saved when they got SIGTERM"
