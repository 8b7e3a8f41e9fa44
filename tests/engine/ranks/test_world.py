"""Which device a rank takes, and how long it waits for others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.ranks.mesh import collective_timeout
from engine.ranks.world import start_world
from jobs.errors import UserError
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """One GPU as the launcher gives it to a single rank; the options that accelerate is given."""
    asked: list[dict[str, Any]] = []

    def state(**options: Any) -> SimpleNamespace:
        asked.append(options)
        # Without LOCAL_RANK accelerate (1.15) says `cuda`, and no number.
        return SimpleNamespace(device=torch.device("cuda"), num_processes=1, process_index=0)

    monkeypatch.setattr("engine.ranks.world.PartialState", state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    return asked


def test_a_single_gpu_has_its_number(toy: Path, gpus: list[dict[str, Any]]) -> None:
    assert start_world(toy_spec(toy, device="auto")).device == torch.device("cuda", 0)
    assert gpus == [{"cpu": False}]


def test_nccl_connects_at_once_on_the_ranks_own_device(
    toy: Path, gpus: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="has 2 ranks but the launcher started 1"
    ):  # there is no process group here
        start_world(toy_spec(toy, device="auto", num_processes=2, strategy="ddp"))
    assert gpus[0]["device_id"] == torch.device("cuda", 1)
    assert gpus[0]["backend"] == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("seen", "ranks", "values"),
    [(0, "1", {"device": "auto"}), (0, "1", {"device": "cuda"}), (1, "2", {"device": "auto"})],
)
def test_a_job_that_was_given_gpus_never_trains_elsewhere(
    toy: Path,
    gpus: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    seen: int,
    ranks: str,
    values: dict[str, Any],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    if values["device"] == "cuda":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=rf"torch \S+ sees {seen} of the {ranks} GPUs .*doctor"):
        start_world(toy_spec(toy, **values))
    assert gpus == []


@pytest.mark.parametrize(
    ("hang", "asked", "timeout"),
    [(1800, 1800, 1860), (1800, 1830, 1860), (600, 1800, 1800), (0, 1800, 1800), (1800, 60, 60)],
)
def test_the_supervisor_ends_a_hang_before_torch_does_unless_the_job_asks_for_less(
    toy: Path, hang: float, asked: float, timeout: float
) -> None:
    spec = toy_spec(toy, hang_timeout=hang, distributed_timeout_seconds=asked)
    assert collective_timeout(spec).total_seconds() == timeout
