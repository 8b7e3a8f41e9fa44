"""A real job on two ranks, on a folder of pictures as people have them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from jobs.run.rundir import RunDir
from tests.support.images.zoo import Planted, Zoo, write_zoo
from tests.support.jobs.real_jobs import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PICTURES = 400
STEPS = 6  # of 64 pictures: each is seen about once
TOO_SMALL = ("1x1 png", "1:40 png")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return write_zoo(tmp_path_factory.mktemp("zoo"), PICTURES)


@pytest.fixture(scope="module")
def run(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[RunDir]:
    """The job, which sees each of them about once."""
    bench = Bench(tmp_path_factory.mktemp("data"), toy)
    job = bench.submit(
        dataset=str(zoo.root),
        resolution=48,
        max_aspect_ratio=0,
        train_batch_size=32,
        max_train_steps=STEPS,
        max_sequence_length=16,
    )
    facts = bench.wait(job, "completed", "stopped", "failed", "lost")
    assert facts["state"] == "completed", facts["reason"]
    yield RunDir(Path(facts["run_dir"]))
    for process in bench.processes(job):
        process.kill()


def trained_on(animal: Planted) -> bool:
    """Whether picture and caption can be used."""
    has_caption = bool(animal.text) or animal.caption == "utf-16"  # Windows editors write it
    return animal.decodes and has_caption and animal.kind not in TOO_SMALL


def report_of(run: RunDir) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run.data_report.read_text())
    return report


def test_every_usable_picture_is_trained_on_and_every_other_is_named(zoo: Zoo, run: RunDir) -> None:
    expected = {name for name, animal in zoo.planted.items() if trained_on(animal)}
    index = json.loads((run.root / "data.json").read_text())
    samples = {sample["name"]: sample for sample in index["samples"]}
    assert set(samples) == expected
    report = report_of(run)
    named = {name: why for _, name, why in report["skipped"]}
    assert set(named) == set(zoo.planted) - expected
    assert all(named.values())
    assert report["samples"] + len(named) == PICTURES
    log = run.rank_log(0).read_text()
    assert all(f"skipped {name}: {why}" in log for name, why in named.items())


def test_reasons_are_those_for_which_pictures_were_spoilt(zoo: Zoo, run: RunDir) -> None:
    named = {name: why for _, name, why in report_of(run)["skipped"]}
    for name, animal in zoo.planted.items():
        if name not in named:
            continue
        why = named[name]
        match animal.kind:
            case "folder":
                assert why == "a folder"
            case "heic":
                assert why.endswith("pip install pillow-heif")
            case "svg" | "psd":
                assert why == f".{animal.kind} images cannot be read"
            case "broken link":
                assert why in ("a broken link", "no caption", "caption is not UTF-8")
            case _ if animal.caption == "latin-1":
                assert why == "caption is not UTF-8"
            case _ if not animal.text and animal.caption != "utf-16":
                assert why == "no caption"
            case "1x1 png" | "1:40 png":
                assert why.startswith("too small: 1")
            case kind if kind.startswith("truncated") or "half zeros" in kind:
                assert "truncated" in why or "damaged" in why or "not an image" in why, (kind, why)
            case "empty file":
                assert why == "empty file"
            case kind if "bomb" in kind:
                assert "megapixels; downscale it" in why
    totals = Counter(one["text"] for one in report_of(run)["reasons"])
    assert max(totals.values()) == 1, "one line for each reason"


def test_what_was_done_to_read_pictures_is_counted(zoo: Zoo, run: RunDir) -> None:
    usable = [animal for animal in zoo.planted.values() if trained_on(animal)]
    expected = Counter(note for animal in usable for note in animal.notes)
    index = json.loads((run.root / "data.json").read_text())
    assert Counter(note for sample in index["samples"] for note in sample["notes"]) == expected
    report = report_of(run)
    assert sorted(one["count"] for one in report["handled"]) == sorted(expected.values())
    cautions = {one["text"]: one["count"] for one in report["cautions"]}
    assert cautions["cropped by more than a quarter"] > 20
    assert len(report["buckets"]) == 3


def test_the_ranks_encoded_them_together_and_a_warning_counts_the_missing(run: RunDir) -> None:
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    (latents,) = [
        e for e in events if e["kind"] == "phase" and e["name"] == "latents" and e["state"] == "end"
    ]
    index = json.loads((run.root / "data.json").read_text())
    different = {(s["digest"], *s["bucket"]) for s in index["samples"]}
    assert latents["total"] == sum(latents["ranks"]) == len(different)
    assert len(latents["ranks"]) == 2, "whichever is free takes the next images"
    left_out = PICTURES - len(index["samples"])
    warnings = [e["message"] for e in events if e["kind"] == "warning"]
    assert any(f"{left_out} of {PICTURES} images skipped" in line for line in warnings)
    assert sum(e["kind"] == "step" for e in events) == STEPS


@pytest.mark.parametrize("beside", [(), ("2_dog/d.png",), ("loose.png", "more/e.png")])
def test_kohya_s_folders_train_as_they_are(
    beside: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, toy: Path
) -> None:
    root = tmp_path / "images"
    for number, name in enumerate(("10_cat person/a.png", "10_cat person/b.png", *beside)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (number * 40, 90, 30)).save(root / name)
    (root / "10_cat person" / "a.txt").write_text("a cat, sitting")
    bench = Bench(tmp_path_factory.mktemp("kohya"), toy)
    job = bench.submit(
        dataset=str(root), resolution=48, train_batch_size=2, max_train_steps=2, num_processes=1
    )
    facts = bench.wait(job, "completed", "stopped", "failed", "lost")
    assert facts["state"] == "completed", facts["reason"]
    index = json.loads((Path(facts["run_dir"]) / "data.json").read_text())
    captions = sorted(sample["captions"] for sample in index["samples"])
    expected = [["a cat, sitting"], ["cat person"], *[["dog"]] * ("2_dog/d.png" in beside)]
    assert captions == expected
