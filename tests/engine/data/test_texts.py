"""Encoded captions: cached before training, cached on the way, or encoded anew each time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.data.encode.tensor_cache import TensorCache
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_job
from jobs.run.rundir import RunDir
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path


def train(toy: Path, root: Path, **changes: Any) -> list[dict[str, Any]]:
    """The events of a job on one rank."""
    values = {
        "cache_dir": str(root / "cache"),
        "validation_prompts": ["a red circle"],
        "validation_num_inference_steps": 1,
        "caption_dropout_probability": 0.2,
        "max_train_steps": 5,
        "train_batch_size": 2,
    }
    spec = toy_spec(toy, **values | changes)
    run_dir = RunDir(root / "run")
    run_dir.create()
    telemetry = Telemetry(run_dir, 0)
    run_job(spec, run_dir, World(0, 1, torch.device("cpu"), "single", "t"), telemetry)
    telemetry.close()
    return [json.loads(line) for line in run_dir.events.read_text().splitlines()]


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["cached on the way", "not cached"])
def test_resident_encoders_train_like_cached_captions(
    kept: bool, toy: Path, tmp_path: Path
) -> None:
    cached = train(toy, tmp_path / "cached")
    resident = train(
        toy, tmp_path / "resident", unload_text_encoder=False, cache_text_embeddings=kept
    )
    assert losses(resident) == losses(cached)
    assert len(losses(cached)) == 5

    assert not [event for event in cached + resident if event["kind"] == "warning"]

    def order(events: list[dict[str, Any]]) -> list[str]:
        kinds = [event["kind"] for event in events]
        return [kind for kind in kinds if kind in ("freed", "start", "end")]

    assert order(cached) == ["freed", "start", "end"], "freed before the transformer is there"
    assert order(resident) == ["start", "freed", "end"], "they stayed"
    pictures = [
        next((tmp_path / name / "run" / "samples").rglob("*.png")).read_bytes()
        for name in ("cached", "resident")
    ]
    assert pictures[0] == pictures[1]
    before, on_the_way = (
        {path.name for path in (tmp_path / name / "cache/text").rglob("*.safetensors")}
        for name in ("cached", "resident")
    )
    assert len(before) > 5
    assert on_the_way <= before, "and nothing that was not used"
    assert bool(on_the_way) is kept


@pytest.mark.slow
def test_what_was_cached_on_the_way_is_used_and_repaired(toy: Path, tmp_path: Path) -> None:
    first = train(toy, tmp_path, unload_text_encoder=False)
    cache = TensorCache(tmp_path / "cache", "text")
    files = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*.safetensors")}
    damaged = min(files)
    damaged.write_bytes(b"damaged")
    (tmp_path / "run").rename(tmp_path / "before")
    assert losses(train(toy, tmp_path, unload_text_encoder=False)) == losses(first)
    now = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*.safetensors")}
    assert {path for path in files if now[path] != files[path]} == {damaged}
    assert cache.check(damaged.stem) == "sound"
