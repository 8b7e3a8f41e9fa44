"""Torch's flight recorder, of real ranks that wait for each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from engine.ranks.failure import write_flight
from engine.ranks.telemetry import Telemetry
from jobs.run import why_failed
from jobs.run.rundir import FLIGHT, RunDir
from tests.support.engine.toy_jobs import start_ranks

if TYPE_CHECKING:
    import pytest


def wait_in_vain(rank: int, ranks: int, root: str) -> None:
    """Three collectives of rank 0 and the first of rank 1; then each writes what it remembers."""
    os.environ |= why_failed.environment(RunDir(Path(root)))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), async_op=True)
        dist.all_reduce(torch.ones(1), async_op=True)
    write_flight(RunDir(Path(root)), rank)
    os._exit(0)


def test_a_rank_that_is_late_is_found_in_what_torch_remembers(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    start_ranks(wait_in_vain, 2, str(tmp_path)).join()
    wait = why_failed.find_wait(run_dir)
    assert wait is not None
    assert (wait.late, wait.waiting) == ((1,), (0,))
    assert wait.collective == "all_gather"


def test_a_rank_answers_a_request_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ranks.telemetry._STATUS_EVERY", 0.01)
    run_dir = RunDir(tmp_path)
    run_dir.create()
    answered: list[None] = []
    telemetry = Telemetry(run_dir, 0)
    telemetry.record_flight = lambda: answered.append(write_flight(run_dir, 0))
    run_dir.request(FLIGHT)
    while telemetry.record_flight is not None:
        os.sched_yield()
    telemetry.close()
    assert answered == [None]
    assert isinstance(json.loads(run_dir.flight(0).read_text()), list)
    run_dir.forget_attempt()
    assert not run_dir.flight(0).exists()
    assert not run_dir.requested(FLIGHT)
