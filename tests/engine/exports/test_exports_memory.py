"""Exporting a checkpoint takes the memory of a few of its tensors, however large it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import FluxTransformer2DModel

from engine.toy import write_toy
from jobs.run.checkpoint_files import read_checkpoint
from tests.bench.export import make, measure
from tests.support.forks.client import start

if TYPE_CHECKING:
    from pathlib import Path

GIGABYTES = 0.4
MOST = 150 * 2**20  # bytes beyond what the imports take; the largest tensor has 20 MB


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_never_lies_whole_in_memory(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy", "flux", pictures=4, size=64)  # with all of its blocks
    path = make(toy.model, tmp_path, GIGABYTES, lambda *words: start(*words).join())
    checkpoint = read_checkpoint(path)
    assert checkpoint is not None
    assert checkpoint.bytes > 2.5 * MOST
    assert len(list(path.glob("*.distcp"))) == 2
    imported, peak, found = measure(path, tmp_path / "export")
    assert found["step"] == 3
    assert peak - imported < MOST, f"{(peak - imported) / 2**20:.0f} MiB"
    made = FluxTransformer2DModel.from_pretrained(tmp_path / "export" / "transformer")
    assert made.dtype is torch.float32
    assert all(-1 <= p.min() < -0.5 < 0.5 < p.max() <= 1 for p in made.parameters() if p.dim() > 1)
