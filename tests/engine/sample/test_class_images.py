"""Class images: made once by all ranks in lockstep, kept, and the same on any number of ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from engine.data.index.data_index import build_index
from engine.data.read.class_images import folder_of, numbers_in, with_class_images
from engine.data.report import make_report
from engine.model.release import STILL_HELD
from jobs.run.eventlog import EventLog
from tests.support.engine.ranks import class_images as ranks_of
from tests.support.engine.toy_jobs import start_ranks, toy_spec, toy_values

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

WANTED = 5


def job(toy: Path, cache: Path, ranks: int, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "class_prompt": "a red circle",
        "num_class_images": WANTED,
        "validation_num_inference_steps": 2,
        "num_processes": ranks,
        "cache_dir": str(cache),
    }
    if ranks > 1:
        settings["strategy"] = "fsdp2"
    return toy_values(toy, **settings | changes)


def test_ranks_make_what_is_missing_together(toy: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    cases = {
        "stopped": job(toy, together, 2) | {"stop_at": 1},
        "again": job(toy, together, 2),
        "more": job(toy, together, 2, num_class_images=WANTED + 1),
        "fewer": job(toy, together, 2, num_class_images=2),
    }
    start_ranks(ranks_of.make, 2, tmp_path, cases).join()
    start_ranks(ranks_of.make, 1, tmp_path, {"one": job(toy, alone, 1)}).join()
    said = {name: (tmp_path / f"{name}-1.txt").read_text() for name in cases}
    folder = folder_of(toy_spec(toy, **only_data(job(toy, together, 2))), toy / "model")
    assert said == dict.fromkeys(cases, str(folder)) | {"stopped": "stopped"}
    assert numbers_in(folder) == set(range(WANTED + 1))
    lines = {name: (tmp_path / name / "events.jsonl") for name in cases}
    made = {name: samples(path) for name, path in lines.items()}
    assert 0 < made["again"] < WANTED, "what was made before the stop is kept"
    assert (made["more"], made["fewer"]) == (1, 0)
    for path in lines.values():
        warned = EventLog(path).read_all().warnings
        assert not [text for text in warned if text.startswith(STILL_HELD)], warned
    other = alone / folder.parent.name / folder.name
    for number in range(WANTED):
        mine, theirs = (
            np.asarray(Image.open(place / f"{number:02d}.png"), dtype=float)
            for place in (folder, other)
        )
        assert np.abs(mine - theirs).max() <= 1, number
    assert not np.array_equal(
        np.asarray(Image.open(folder / "00.png")), np.asarray(Image.open(folder / "01.png"))
    )

    spec = toy_spec(toy, **only_data(job(toy, together, 2, num_class_images=3)))
    report = make_report(spec, build_index(spec), None)
    assert report.class_images == 3, "still to be made, as far as the report knows"
    spec = with_class_images(spec, folder)
    index = build_index(spec)
    images = [sample for sample in index.samples if sample.dataset == 1]
    assert [sample.name for sample in images] == ["00.png", "01.png", "02.png"]
    assert {sample.captions for sample in images} == {("a red circle",)}
    assert make_report(spec, index, None).class_images == 0


def only_data(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ("strategy",)}


def samples(events: Path) -> int:
    """How many images the sampler made."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    done = [one.get("done", 0) for one in lines if one.get("name") == "sample"]
    return max(done, default=0)
