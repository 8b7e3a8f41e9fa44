"""Videos in a dataset, as a family that trains on them sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.data.contact_sheet import sheet
from engine.data.encode.latents import LatentKeys, to_pixels
from engine.data.encode.tensor_cache import TensorCache
from engine.data.index.data_index import build_index
from engine.data.index.views import View, view_of
from engine.data.report import make_plan, make_report
from jobs.errors import SpecError, UserError
from jobs.preflight.data import check_dataset
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from tests.support.images.videos import level, record

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Videos of 33 and 12 frames at 16 a second, a torn one and a picture."""
    monkeypatch.setitem(FAMILIES, "flux", replace(FAMILIES["flux"], frame_step=4))
    root = tmp_path / "videos"
    root.mkdir()
    record(root / "long.mp4", 33, rate=16)
    record(root / "short.mp4", 12, rate=16)
    (root / "torn.mp4").write_bytes((root / "long.mp4").read_bytes()[:200])
    Image.new("RGB", (64, 48), (level(3),) * 3).save(root / "still.png")
    for name in ("long", "short", "torn", "still"):
        (root / f"{name}.txt").write_text(f"a {name} one")
    return root


def job(folder: Path, **changes: Any) -> JobSpec:
    values = {
        "pretrained_model_name_or_path": "m",
        "dataset": str(folder),
        "resolution": 64,
        "cache_dir": str(folder.parent / "cache"),
        "fps": 16,
    }
    return load_spec(None, values | changes)


def test_videos_are_fitted_to_buckets_of_size_and_length(folder: Path) -> None:
    spec = job(folder)
    assert check_dataset(spec) == 4
    index = build_index(spec)
    assert {s.name: s.bucket for s in index.samples} == {
        "long.mp4": (80, 48, 33),
        "short.mp4": (80, 48, 9),
        "still.png": (80, 48, 1),
    }
    assert [one.name for one in index.skipped] == ["torn.mp4"]
    plan = make_plan(spec, index)
    assert len(set(plan.buckets)) == 3, "one length a forward, so that shapes are equal"
    report = make_report(spec, index, None)
    assert sorted(bucket.size for bucket in report.buckets) == [
        [80, 48, 1],
        [80, 48, 9],
        [80, 48, 33],
    ]
    assert sheet(index, spec).height > 200


def test_a_number_of_frames_leaves_shorter_videos_out(folder: Path) -> None:
    index = build_index(job(folder, num_frames=17))
    assert {s.name: s.bucket[2] for s in index.samples} == {"long.mp4": 17, "still.png": 1}
    assert {one.name: one.why for one in index.skipped}["short.mp4"] == (
        "too short: 12 frames at 16 per second, not 17"
    )
    slower = build_index(job(folder, fps=8))
    assert {s.name: s.bucket[2] for s in slower.samples} == {
        "long.mp4": 17,
        "short.mp4": 5,
        "still.png": 1,
    }
    with pytest.raises(SpecError, match=r"takes 4n \+ 1 frames, such as 13 or 17"):
        job(folder, num_frames=16)


def test_pixels_of_videos_have_frames(folder: Path) -> None:
    spec = job(folder, fps=8)
    index = build_index(spec)
    samples = {sample.name: sample for sample in index.samples}
    long = to_pixels(samples["long.mp4"], View((64, 48)), spec)
    assert long.shape == (1, 3, 17, 48, 64)
    greys = ((long[0, :, :, 8:40, 8:56].mean(dim=(0, 2, 3)) + 1) * 127.5).numpy()
    assert np.abs(greys - [level(number) for number in range(0, 33, 2)]).max() < 3
    still = to_pixels(samples["still.png"], View((64, 48), flip=True), spec)
    assert still.shape == (1, 3, 1, 48, 64)
    assert torch.allclose(still, torch.full_like(still, level(3) / 127.5 - 1))


def test_a_video_of_which_one_frame_is_used_is_still_a_video(folder: Path) -> None:
    for changes in ({"num_frames": 1}, {"fps": 1, "max_upscale": 4}):
        spec = job(folder, **changes)
        samples = {sample.name: sample for sample in build_index(spec).samples}
        assert {s.bucket[2] for s in samples.values()} == {1}
        assert samples["long.mp4"].is_video
        assert to_pixels(samples["long.mp4"], View((64, 48)), spec).shape == (1, 3, 1, 48, 64)
    none = build_index(job(folder, fps=0.01))
    assert all(sample.bucket[2] >= 1 for sample in none.samples)


def test_a_video_that_changed_meanwhile_is_noticed(folder: Path) -> None:
    spec = job(folder)
    sample = build_index(spec).samples[0]
    record(folder / "long.mp4", 40, rate=16)
    with pytest.raises(UserError, match=r"long\.mp4 changed while the job was preparing"):
        to_pixels(sample, View((64, 48)), spec)


def test_latents_of_videos_are_named_by_length_and_rate(folder: Path, toy: Path) -> None:
    keys = set()
    for changes in ({}, {"fps": 8}, {"num_frames": 9}, {"num_frames": 5}):
        spec = job(folder, **changes)
        index = build_index(spec)
        cache = TensorCache(folder.parent / "cache", "latents")
        keys.add(LatentKeys(spec, cache, toy / "model", index)(0, 0))
        assert view_of(index.samples[0], 0, spec).size == (80, 48)
    assert len(keys) == 4
