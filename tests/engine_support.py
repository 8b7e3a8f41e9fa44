"""What the engine's tests share: a toy model and pictures, written once, and jobs to train it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.specfile import load_spec

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec import JobSpec


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` (toy FLUX.1) and `data` (24 captioned pictures)."""
    from engine.toy import write_toy

    root = tmp_path_factory.mktemp("toy")
    write_toy(root, "flux", pictures=24, size=64)
    return root


def toy_values(toy: Path, **changes: Any) -> dict[str, Any]:
    """A small job on the toy, in fp32 on CPU ranks."""
    return {
        "name": "t",
        "pretrained_model_name_or_path": str(toy / "model"),
        "dataset": str(toy / "data"),
        "device": "cpu",
        "resolution": 64,
        "max_sequence_length": 16,
        "mixed_precision": "no",
        "lora_rank": 4,
        "learning_rate": 1e-3,
        "max_train_steps": 4,
        "checkpointing_steps": 0,
        **changes,
    }


def toy_spec(toy: Path, **changes: Any) -> JobSpec:
    return load_spec(None, toy_values(toy, **changes))
