"""What `fsdp-tui demo` says when it is over."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from engine.demo.pictures import Scene, draw
from engine.toy.images import HEART
from tests.support.tui.made_up_runs import add_job
from tui.cli.demo import results_of

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store


def add_sample(directory: Path, asked: Scene, shown: Scene) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    number = len(list(directory.glob("*.png")))
    draw(shown, random.Random(1)).save(directory / f"{number:02}.png")
    (directory / f"{number:02}.json").write_text(json.dumps({"prompt": asked.caption}))


def test_it_ends_with_how_many_samples_are_right(store: Store) -> None:
    job = add_job(store, "demo")
    heart, ring = Scene(HEART, "red", "white"), Scene("ring", "green", "black")
    samples = job.run_dir.samples
    assert results_of(job) == []
    for asked, shown in ((heart, Scene("circle", "red", "white")), (ring, ring)):
        add_sample(samples / "step-0", asked, shown)
    assert results_of(job) == []
    for step in (5, 10):
        add_sample(samples / f"step-{step}", heart, heart)
        add_sample(samples / f"step-{step}", ring, heart)
    add_sample(samples / "step-15", heart, heart)  # and the ring is not sampled yet
    assert results_of(job) == [
        "step   0: 0 of 1 hearts and 1 of 1 other shapes drawn correctly",
        "step  10: 1 of 1 hearts and 0 of 1 other shapes drawn correctly",
        f"images: {samples}",
    ]
