"""Predicted memory against reality: live tensors counted in the real engine, on real ranks."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import memory_ranks
import pytest
import torch
from engine_support import PRELOADED, toy_values

from engine.memory.estimator import Estimator
from engine.memory.report import MEASURED_AS
from jobs.specfile import load_spec

if TYPE_CHECKING:
    from pathlib import Path

RANKS: Final = 2
TOLERANCE: Final = 0.03
PATIENCE: Final = 300.0  # seconds; a slow machine under load, not an expectation

SHARDED: Final = {"strategy": "fsdp2"}
FULL: Final = {"model_type": "full"}
CASES: Final[dict[str, dict[str, Any]]] = {
    "lora": SHARDED,
    "lora sharded": SHARDED | {"lora_placement": "sharded"},
    "lora ddp": {"strategy": "ddp"},
    "full": SHARDED | FULL,
    "full ddp": FULL | {"strategy": "ddp"},
    "full checkpointed": SHARDED | FULL | {"gradient_checkpointing": True},
    "full bf16": SHARDED | FULL | {"mixed_precision": "bf16"},
    "full bf16 ddp checkpointed": FULL
    | {"strategy": "ddp", "mixed_precision": "bf16", "gradient_checkpointing": True},
    "full bf16 accumulated": SHARDED
    | FULL
    | {"mixed_precision": "bf16", "gradient_accumulation_steps": 3},
    "full kept": SHARDED | FULL | {"fsdp_reshard_after_forward": False},
    "full prefetched": SHARDED | FULL | {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2},
    "full averaged, lion": SHARDED | FULL | {"use_ema": True, "optimizer": "lion"},
}


def values_of(case: str, toy: Path, cache: Path) -> dict[str, Any]:
    return toy_values(
        toy, num_processes=RANKS, train_batch_size=2, max_train_steps=5, resolution=64,
        cache_dir=str(cache), **CASES[case],
    )  # fmt: skip


@pytest.fixture(scope="module")
def counted(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Case → phase → bytes, of each rank."""
    folder = tmp_path_factory.mktemp("counted")
    cases = {case: values_of(case, toy, folder / "cache") for case in CASES}
    multiprocessing.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.start_processes(
        memory_ranks.train, (RANKS, cases, port, str(folder)), nprocs=RANKS,
        start_method="forkserver", join=False,
    )  # fmt: skip
    assert context is not None
    deadline = time.monotonic() + PATIENCE
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator()


@pytest.mark.parametrize("case", CASES)
def test_each_phase_takes_what_was_predicted(
    counted: list[dict[str, Any]], estimator: Estimator, toy: Path, tmp_path: Path, case: str
) -> None:
    spec = load_spec(None, values_of(case, toy, tmp_path))
    predicted = estimator.estimate(spec)
    for name, measured in MEASURED_AS.items():
        phase = predicted.phase(name)
        assert phase is not None
        real = min(rank[case][measured] for rank in counted)
        assert phase.peak == pytest.approx(real, rel=TOLERANCE), (name, phase.parts, real)
