"""Conditioning images: where they are found, what is said of missing ones, what is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.data.encode.latents import LatentKeys, reference_pixels, split_pixels, to_pixels
from engine.data.encode.tensor_cache import TensorCache
from engine.data.index import views
from engine.data.index.data_index import DataIndex, build_index, read_reference
from engine.data.index.views import (
    fit,
    fit_reference,
    fit_whole,
    prompt_conditions,
    reference_view,
    view_of,
)
from engine.data.prepare import read_pictures
from engine.data.read.images import decode
from engine.data.report import changed_since, make_plan, make_report
from jobs.errors import SpecError, UserError
from jobs.preflight.data import check_dataset, find_unusable, missing_partners
from jobs.spec.families.references import References, to_area_at_most, to_preferred
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import requests_of
from tests.support.images.videos import record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


def vace_job(root: Path, dataset: dict[str, Any]) -> dict[str, Any]:
    """Return a job of Wan VACE on one dataset."""
    return {
        "pretrained_model_name_or_path": "m",
        "model_family": "wan",
        "model_flavour": "2.1-vace-1.3b",
        "datasets": [dataset],
        "resolution": 64,
        "cache_dir": str(root / "cache"),
    }


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobSpec]:
    def make(family: str = "flux", flavour: str = "kontext", **entry: Any) -> JobSpec:
        values = {
            "pretrained_model_name_or_path": "m",
            "model_family": family,
            "model_flavour": flavour,
            "datasets": [{"path": str(tmp_path / "data")} | entry],
            "resolution": 64,
            "conditioning_resolution": 64,
            "cache_dir": str(tmp_path / "cache"),
        }
        return load_spec(None, values)

    return make


def draw(path: Path, size: tuple[int, int] = (64, 64), caption: str = "") -> None:
    """A picture of noise, so that where it is cut shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(size[0]).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size).save(path)
    if caption:
        path.with_suffix(".txt").write_text(caption)


def found(index: DataIndex) -> dict[str, list[str]]:
    return {s.name: [one.path.rpartition("/")[2] for one in s.references] for s in index.samples}


def test_a_folder_beside_a_folder(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    """Names count, not file types; also where the folder lies within the other."""
    for name in ("a", "sub/b", "c"):
        draw(tmp_path / "data" / f"{name}.png", caption=name)
    draw(tmp_path / "data/control/a.jpg")
    draw(tmp_path / "data/control/sub/b.png")
    spec = job(control_path=str(tmp_path / "data/control"))
    index = build_index(spec)
    assert found(index) == {"a.png": ["a.jpg"], "sub/b.png": ["b.png"]}
    (lost,) = index.skipped
    where = tmp_path / "data/control/c.png"
    assert (lost.name, lost.why) == ("c.png", f"no conditioning image: {where} does not exist")
    report = make_report(spec, index, None)
    assert report.reasons[0].text == "no conditioning image"
    assert report.references == ["conditioning image", 1, 1]
    assert check_dataset(spec) == 3
    assert missing_partners(spec) == [
        f"1 of 3 images in {tmp_path / 'data'}: no conditioning image (c.png), will be skipped."
    ]
    index.save(tmp_path / "index.json")
    again = DataIndex.load(tmp_path / "index.json")
    assert again.samples == index.samples
    draw(tmp_path / "data/control/a.jpg", (80, 80))
    assert changed_since(again, build_index(spec), "control") == "1 with another control (a.png)"


def test_videos_are_conditioned_on_videos(tmp_path: Path) -> None:
    """As long as both are; the same crop of each."""
    for place, name, frames in (
        *(("data", "a", 9), ("data", "b", 9), ("data", "c", 9)),
        *(("control", "a", 9), ("control", "b", 6)),
    ):
        path = tmp_path / place / f"{name}.mp4"
        path.parent.mkdir(exist_ok=True)
        row = np.linspace(0, 160, 96).astype(np.uint8)
        record(path, [np.tile(row[None, :, None] + 8 * n, (64, 1, 3)) for n in range(frames)])
        path.with_suffix(".txt").write_text(name)
    draw(tmp_path / "control/c.png")
    draw(tmp_path / "data/d.png", caption="d")
    draw(tmp_path / "control/d.png")
    entry = {"path": str(tmp_path / "data"), "conditioning_path": str(tmp_path / "control")}
    values = vace_job(tmp_path, entry) | {"fps": 8}
    spec = load_spec(None, values)
    index = build_index(spec)
    assert found(index) == {"a.mp4": ["a.mp4"], "b.mp4": ["b.mp4"], "d.png": ["d.png"]}
    assert [sample.bucket[2] for sample in index.samples] == [9, 5, 1]
    assert [skip.name for skip in index.skipped] == ["c.mp4"]
    assert check_dataset(spec) == 4
    assert index.skipped[0].why.startswith("no control video: ")
    (lost,) = missing_partners(spec)
    assert "no control video (c.mp4)" in lost
    sample, _, still = index.samples
    view = view_of(sample, 0, spec)
    shown = reference_pixels(sample, 0, view, spec)
    assert shown.shape == to_pixels(sample, view, spec).shape == (1, 3, 9, *view.size[::-1])
    assert (shown - to_pixels(sample, view, spec)).abs().max() < 0.1, "the same pictures"
    assert reference_pixels(still, 0, view_of(still, 0, spec), spec).shape[2] == 1
    prompt = {"prompt": "p", "conditioning_image": str(tmp_path / "control/b.mp4")}
    for frames, why in ((5, ""), (9, "too short")):
        asked = load_spec(None, values | {"validation_prompts": [prompt | {"num_frames": frames}]})
        if not why:
            (read,) = read_pictures(asked).values()
            assert isinstance(read, list)
            assert len(read) == frames
            continue
        with pytest.raises(
            UserError, match=f"the control video .*b.mp4 cannot be used .*{why}"
        ) as caught:
            read_pictures(asked)
        assert caught.value.hint == "its prompt needs 9 frames at 8 per second"
    absent = prompt | {"conditioning_image": str(tmp_path / "absent.mp4")}
    with pytest.raises(SpecError, match="no such control video"):
        check_dataset(load_spec(None, values | {"validation_prompts": [absent]}))
    still = prompt | {"num_frames": 5, "conditioning_image": str(tmp_path / "control/c.png")}
    with pytest.raises(SpecError, match="is an image") as said:
        check_dataset(load_spec(None, values | {"validation_prompts": [still]}))
    assert "conditioning_roles: reference" in str(said.value.hint)
    reference = still | {"conditioning_roles": "reference"}
    assert check_dataset(load_spec(None, values | {"validation_prompts": [reference]})) == 4
    moving = prompt | {"conditioning_roles": "reference"}
    with pytest.raises(SpecError, match=r"reference image .*b.mp4 is a video"):
        check_dataset(load_spec(None, values | {"validation_prompts": [moving]}))
    one = prompt | {"num_frames": 1, "conditioning_image": str(tmp_path / "control/c.png")}
    asked = load_spec(None, values | {"validation_prompts": [one]})
    ((frame,),) = prompt_conditions(*requests_of(asked), read_pictures(asked))
    assert frame.size == (64, 64)


@pytest.mark.parametrize("place", ["path", "suffix"])
def test_reference_images_are_beside_videos_and_images(tmp_path: Path, place: str) -> None:
    """Always images; a control video of the same name is none, and the other way around.

    Masks of what is filled in may be either.
    """
    for name in ("a", "b", "d", "a_pose", "b_pose", "d_pose", "b_hole", "d_hole"):
        path = tmp_path / "data" / f"{name}.mp4"
        path.parent.mkdir(exist_ok=True)
        record(path, [np.full((64, 64, 3), 40 * n, np.uint8) for n in range(5)])
        path.with_suffix(".txt").write_text(name)
    for name in ("a_who", "a_hole", "c", "c_pose", "c_who", "c_hole", "d_who"):
        draw(tmp_path / f"data/{name}.png", caption=name)
    if place == "path":
        for file in [path for path in (tmp_path / "data").iterdir() if "_" in path.name]:
            stem, folder = file.stem.split("_")
            (tmp_path / folder).mkdir(exist_ok=True)
            file.rename(tmp_path / folder / f"{stem}{file.suffix}")
    named = {
        "path": [str(tmp_path / folder) for folder in ("who", "pose", "hole")],
        "suffix": ["_who", "_pose", "_hole"],
    }[place]
    roles = ["reference", "control", "fill_mask"]
    entry = {
        "path": str(tmp_path / "data"),
        f"conditioning_{place}": named,
        "conditioning_roles": roles,
    }
    values = vace_job(tmp_path, entry) | {"fps": 8}
    spec = load_spec(None, values)
    index = build_index(spec)
    assert [sample.name for sample in index.samples] == ["a.mp4", "c.png", "d.mp4"]
    assert [[one.path[-3:] for one in sample.references] for sample in index.samples] == [
        ["png", "mp4", "png"],
        ["png"] * 3,
        ["png", "mp4", "mp4"],
    ]
    assert [sample.bucket[2] for sample in index.samples] == [5, 1, 5]
    (lost,) = index.skipped
    noun = "reference image or control video or fill mask"
    assert lost.why.startswith(f"no {noun}: ")
    missing = lost.why.removesuffix(" does not exist").rpartition(": ")[2]
    assert missing.endswith({"path": "who/b.png", "suffix": "data/b_who.png"}[place])
    assert missing_partners(spec) == [
        f"1 of 4 images and videos in {tmp_path / 'data'}: no {noun} ({missing}), will be skipped."
    ]
    assert make_report(spec, index, None).references == ["conditioning image", 3, 3]
    beside = ((64, 64, "reference"), (64, 64), (64, 64, "fill_mask"))
    assert index.samples[0].group == ((64, 64, 5), beside, False)
    index.save(tmp_path / "index.json")
    assert DataIndex.load(tmp_path / "index.json").samples == index.samples
    assert make_report(spec, index, None).references == ["conditioning image", 3, 3]


def test_what_a_fill_mask_keeps_of_a_video(tmp_path: Path) -> None:
    """Of the sample where there is no control video, and nothing of it is left to the model.

    Each file, and what it is said to be, changes what is cached.
    """
    size, half = (64, 64), np.zeros((64, 64, 3), np.uint8)
    for name in ("a", "b"):
        draw(tmp_path / f"data/{name}.png", size, caption=name)
        draw(tmp_path / f"who/{name}.png", size)
    draw(tmp_path / "control/a.png", (128, 128))
    draw(tmp_path / "control/b.png", size)
    half[:, 32:] = 128
    (tmp_path / "hole").mkdir()
    for name in ("a", "b"):
        Image.fromarray(half + (name == "b")).save(tmp_path / f"hole/{name}.png")
    cases = {
        "control": ["control"],
        "hole": ["fill_mask"],
        "control hole": ["control", "fill_mask"],
        "who": ["control"],
        "who hole": ["control", "fill_mask"],
    }
    seen: dict[str, Any] = {}
    for folders, roles in cases.items():
        entry = {
            "path": str(tmp_path / "data"),
            "conditioning_path": [str(tmp_path / folder) for folder in folders.split()],
            "conditioning_roles": roles,
        }
        spec = load_spec(None, vace_job(tmp_path, entry) | {"random_flip": True})
        index = build_index(spec)
        keys = LatentKeys(spec, TensorCache(tmp_path / "cache", "latents"), tmp_path, index)
        seen[folders] = spec, index.samples[0], keys.control(0, 0), keys.control(0, 1)
    spec, sample, *_ = seen["hole"]
    view = view_of(sample, 1, spec)
    own = to_pixels(sample, view, spec)
    kept = split_pixels(sample, view, spec, kept=True)
    white = torch.zeros_like(own[:, :1])
    white[..., :32] = 128 / 255  # mirrored with the video
    assert torch.allclose(kept, torch.cat([own * (white == 0), white], dim=1))
    spec, sample, *_ = seen["control hole"]
    control = reference_pixels(sample, 0, view, spec)
    left = split_pixels(sample, view, spec, kept=False)
    assert torch.equal(left, control * (white > 0))
    gray = seen["control"][2][0]
    assert gray == seen["who"][2][0] == seen["hole"][2][1] == seen["hole"][3][1]
    others = [key for *_, one, two in seen.values() for key in (*one, *two) if key != gray]
    assert len(set(others)) == len(others) == 14


def test_files_with_a_suffix(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    for name in ("a", "a_control", "b", "c_control"):
        draw(tmp_path / "data" / f"{name}.png", caption=name)
    index = build_index(job(conditioning_suffix="_control"))
    assert found(index) == {"a.png": ["a_control.png"]}
    left = {one.name: one.why.partition(":")[0] for one in index.skipped}
    # Without an image of its name it is one like any other.
    assert left == dict.fromkeys(("b.png", "c_control.png"), "no conditioning image")


def test_a_missing_layer_is_named(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    for name in ("a", "a_1", "a_2", "b", "b_1", "c"):
        draw(tmp_path / "data" / f"{name}.png", caption=name)
    spec = job("qwen_image", "layered", layer_suffix=["_1", "_2"])
    lost = [str(tmp_path / "data" / name) for name in ("b_2.png", "c_1.png")]
    assert [skip.why for skip in build_index(spec).skipped] == [
        f"no layer: {path} does not exist" for path in lost
    ]
    folder = tmp_path / "data"
    assert missing_partners(spec) == [
        f"2 of 3 images in {folder}: no layer ({', '.join(lost)}), will be skipped."
    ]
    spec = job("qwen_image", "layered", layer_suffix=["_1", "_3"])
    with pytest.raises(
        SpecError, match=r"none of the 4 images in .* has all of its layers"
    ) as said:
        check_dataset(spec)
    assert said.value.hint == f"for a.png, it would be {folder / 'a_3.png'}"
    spec = job("qwen_image", "layered", layer_path=[str(tmp_path / "gone")])
    with pytest.raises(SpecError, match=r"^layer_path: no such folder: .*gone"):
        check_dataset(spec)


def test_masks_beside_pairs_are_neither(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    draw(tmp_path / "data/a.png", caption="a")
    draw(tmp_path / "data/a_control.png")
    draw(tmp_path / "data/a_mask.png")
    spec = job(conditioning_suffix="_control").model_copy(update={"masked_loss": "file"})
    assert found(build_index(spec)) == {"a.png": ["a_control.png"]}
    assert missing_partners(spec) == []
    assert find_unusable(spec) == []


def test_a_column_of_metadata(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    rows = []
    for name, before in (("a", "before/x.png"), ("b", ""), ("c", "before/none.png")):
        draw(tmp_path / "data" / f"{name}.png")
        rows.append({"file_name": f"{name}.png", "text": name, "before": before})
    draw(tmp_path / "data/before/x.png")
    (tmp_path / "data/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    index = build_index(job(conditioning_column="before"))
    assert found(index) == {"a.png": ["x.png"]}
    why = {one.name: one.why for one in index.skipped}
    assert why.keys() == {"b.png", "c.png"}, "what a row names is no sample"
    assert why["b.png"] == "no conditioning image: column before is empty"
    assert why["c.png"].endswith("before/none.png does not exist")
    with pytest.raises(UserError, match="has no column after"):
        build_index(job(conditioning_column="after"))


def test_a_column_of_a_table(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    datasets = pytest.importorskip("datasets")
    colours = ["red", "blue"]
    rows = {
        "image": [Image.new("RGB", (64, 64), colour) for colour in colours],
        "before": [Image.new("RGB", (64, 64), "white"), None],
        "text": colours,
    }
    kinds = {
        "image": datasets.Image(),
        "before": datasets.Image(),
        "text": datasets.Value("string"),
    }
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    table.save_to_disk(str(tmp_path / "data"))
    spec = job(conditioning_column="before")
    index = build_index(spec)
    (sample,) = index.samples
    picture = decode(read_reference(sample.references[0], sample, spec))
    assert picture.getpixel((3, 3)) == (255, 255, 255)
    assert index.skipped[0].why.startswith("its conditioning image cannot be used: ")


@pytest.mark.parametrize("flavour", ["edit", "edit-2509"])
def test_an_image_that_the_text_encoder_cannot_take_is_skipped_and_named(
    tmp_path: Path, flavour: str
) -> None:
    """Qwen2.5-VL fails on what is more than 200 times as wide as high, after rounding."""
    for name, size in (("a", (64, 64)), ("b", (4200, 10)), ("c", (1500, 10))):
        draw(tmp_path / f"data/{name}.png", caption=name)
        draw(tmp_path / f"before/{name}.png", size)
    values: dict[str, Any] = {
        "pretrained_model_name_or_path": "m",
        "model_family": "qwen_image",
        "model_flavour": flavour,
        "datasets": [
            {"path": str(tmp_path / "data"), "conditioning_path": str(tmp_path / "before")}
        ],
        "resolution": 64,
        "cache_dir": str(tmp_path / "cache"),
    }
    index = build_index(load_spec(None, values))
    assert [one.name for one in index.samples] == ["a.png", "c.png"]
    (skipped,) = index.skipped
    assert skipped.name == "b.png"
    assert skipped.why.startswith("its conditioning image cannot be used: it becomes ")
    assert skipped.why.endswith("; the model takes at most 200:1")
    prompt = {"prompt": "p", "conditioning_image": str(tmp_path / "before/c.png")}
    assert len(read_pictures(load_spec(None, values | {"validation_prompts": [prompt]}))) == 1
    prompt["conditioning_image"] = str(tmp_path / "before/b.png")
    with pytest.raises(UserError, match=r"before/b\.png cannot be used .*at most 200:1"):
        read_pictures(load_spec(None, values | {"validation_prompts": [prompt]}))


def test_what_is_wrong_is_said_before_the_job_is_queued(
    tmp_path: Path, job: Callable[..., JobSpec]
) -> None:
    draw(tmp_path / "data/a.png", caption="a")
    (tmp_path / "empty").mkdir()
    for entry, words in (
        ({"conditioning_path": str(tmp_path / "none")}, "no such folder"),
        ({"conditioning_path": str(tmp_path / "empty")}, "none of the 1 images"),
        ({"conditioning_suffix": "_control"}, "none of the 1 images"),
        ({"conditioning_column": "before"}, "has no metadata.jsonl"),
    ):
        with pytest.raises(SpecError, match=words):
            check_dataset(job(**entry))
    prompts = [{"prompt": "a", "conditioning_image": str(tmp_path / "none.png")}]
    spec = load_spec(None, job().model_dump() | {"validation_prompts": prompts})
    with pytest.raises(SpecError, match="no such conditioning image"):
        check_dataset(spec)


def test_an_image_of_its_samples_shape_is_cut_and_mirrored_with_it(
    tmp_path: Path, job: Callable[..., JobSpec]
) -> None:
    """Whatever its resolution; any other is shown whole. Both are as large as the model wants."""
    draw(tmp_path / "data/a.png", (100, 64), caption="a")
    Image.open(tmp_path / "data/a.png").resize((200, 128)).save(tmp_path / "data/a_control.png")
    draw(tmp_path / "data/b.png", (100, 64), caption="b")
    draw(tmp_path / "data/b_control.png", (64, 100))
    spec = job(conditioning_suffix="_control").model_copy(
        update={"crop": "random", "random_flip": True}
    )
    index = build_index(spec)
    for sample, aligned in zip(index.samples, (True, False), strict=True):
        (reference,) = sample.references
        assert reference.aligned is aligned
        for number in (1, 4):
            view = view_of(sample, number, spec)
            seen = reference_view(reference, sample, view)
            assert seen.flip is view.flip is (number == 4)
            assert (seen.box == (0, 0, 64, 100)) is not aligned
            if aligned:
                picture = fit_reference(decode(read_reference(reference, sample, spec)), seen)
                shown = fit(Image.open(sample.path), view).resize(picture.size)
                apart = np.asarray(picture, float) - np.asarray(shown, float)
                assert np.abs(apart).mean() < 20, "noise that is shifted is 85 apart"
    plan = make_plan(spec, index)
    assert len(set(plan.buckets)) == 2, "sizes within a batch are the same"
    assert sum(bucket.draws for bucket in make_report(spec, index, None).buckets) == 2


def test_a_mask_takes_its_part_out_of_its_sample(
    tmp_path: Path, job: Callable[..., JobSpec]
) -> None:
    draw(tmp_path / "data" / "a.png", (96, 96), "a cat")
    draw(tmp_path / "data" / "b.png", (96, 96), "a dog")
    mask = Image.new("L", (48, 48))
    mask.paste(200, (0, 0, 24, 48))
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "a.png")
    masks = str(tmp_path / "masks")
    spec = job(conditioning_path=masks).model_copy(update={"model_flavour": "fill"})
    (sample,) = build_index(spec).samples
    view = view_of(sample, 1, spec)
    whole, filled = to_pixels(sample, view, spec), reference_pixels(sample, 0, view, spec)
    assert filled.shape == (1, 4, 64, 64)
    assert filled[0, 3, :, :30].all()
    assert not filled[0, 3, :, 34:].any()
    assert torch.equal(filled[:, :3], whole * (1 - filled[:, 3:]))
    bare = job().model_copy(update={"model_flavour": "fill"})
    sample, _ = build_index(bare).samples
    drawn = [reference_pixels(sample, 0, view_of(sample, n, bare), bare)[:, 3] for n in (0, 1)]
    assert not torch.equal(*drawn)


def test_sizes_are_those_of_the_pipelines() -> None:
    assert to_preferred(3000, 2000, None).size == (1248, 832)
    assert to_preferred(3000, 2000, 512).size == (624, 416)
    assert to_area_at_most(300, 200, None) == ((300, 200), (288, 192))
    assert to_area_at_most(3000, 2000, None) == ((1254, 836), (1248, 832))
    picture = Image.effect_noise((300, 200), 90).convert("RGB")
    assert fit_whole(picture, to_preferred, None).size == (1248, 832)


def test_images_of_a_bucket_have_one_size_where_they_are_made_smaller() -> None:
    """However large they were."""
    takes = References(to_area_at_most)
    place = views.Place("p")
    sizes = {
        views.placed(place, (w, h, ""), (w, h), (1248, 832), takes, None).size
        for w, h in ((3001, 2000), (1500, 1003), (6000, 4001))
    }
    assert sizes == {(1248, 832)}
    small = views.placed(place, (300, 200, ""), (300, 200), (1248, 832), takes, None)
    assert small.size == (288, 192), "nothing is made larger"
