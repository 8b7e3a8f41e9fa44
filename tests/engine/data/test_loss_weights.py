"""Masks, weights and regularization: what is read of them, and what a sample's loss comes to."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from engine.data.encode.loss_weights import LossWeights, cells_of, mask_key, normalised
from engine.data.encode.tensor_cache import TensorCache
from engine.data.index.batch_plan import shares_of
from engine.data.index.data_index import build_index, hold_out, weights_of
from engine.data.index.views import Reference
from engine.data.read.images import decode_opacity
from engine.data.read.masks import read_mask
from engine.data.report import make_plan, make_report, sample_texts, summary
from engine.diffusion.objective import NoisySample, loss_of
from jobs.errors import SpecError, UserError
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.datasets import Dataset

if TYPE_CHECKING:
    from pathlib import Path

    from engine.data.index.data_index import Sample


def job(*entries: Any, root: Path, **changes: Any) -> JobSpec:
    datasets = [
        {"path": str(root / e)} if isinstance(e, str) else e | {"path": str(root / e["path"])}
        for e in entries
    ]
    values = {
        "pretrained_model_name_or_path": "m",
        "datasets": datasets,
        "resolution": 64,
        "cache_dir": str(root / "cache"),
    }
    return load_spec(None, values | changes)


def image(path: Path, size: tuple[int, int] = (64, 64), *, caption: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (sum(path.name.encode()) % 256, 90, 7)).save(path)
    if caption:
        path.with_suffix(".txt").write_text(path.stem)
    return path


def half(path: Path, size: tuple[int, int] = (64, 64), white: int = 255) -> Path:
    """A mask whose left half is white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.new("L", size)
    mask.paste(white, (0, 0, size[0] // 2, size[1]))
    mask.save(path)
    return path


def by_name(spec: JobSpec) -> dict[str, Sample]:
    return {sample.name: sample for sample in build_index(spec).samples}


# -- masks -----------------------------------------------------------------------------------


def test_masks_are_found_beside_their_images_or_in_a_folder_of_theirs(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "deep/d", "e", "lonely_mask"):
        image(tmp_path / f"d/{name}.png")
    half(tmp_path / "d/a-mask.png")
    half(tmp_path / "d/b_mask.jpg")
    half(tmp_path / "d/c-masklabel.png")
    half(tmp_path / "m/deep/d.png")
    half(tmp_path / "m/e_mask.png")
    spec = job({"path": "d", "mask_path": str(tmp_path / "m")}, root=tmp_path, masked_loss="file")
    found = by_name(spec)
    assert {name for name, one in found.items() if one.mask} == {
        "a.png",
        "b.png",
        "c.png",
        "deep/d.png",
        "e.png",
    }
    assert "lonely_mask.png" in found, "without an image of its name, it is one"
    assert found["e.png"].mask_path == str(tmp_path / "m/e_mask.png")
    index = build_index(spec)
    assert not index.skipped
    report = make_report(spec, index, None)
    assert report.masked == 5
    assert [f.examples for f in report.cautions if f.text == "without a mask, trained whole"] == [
        ["lonely_mask.png"]
    ]
    plain = job("d", root=tmp_path, missing_captions="empty")
    told = [f for f in make_report(plain, build_index(plain), None).cautions if "masks" in f.text]
    assert [found.count for found in told] == [3]


def test_what_is_wrong_with_a_mask_is_said_of_its_image(tmp_path: Path) -> None:
    for name in ("black", "broken", "good", "shape"):
        image(tmp_path / f"d/{name}.png")
    half(tmp_path / "d/black-mask.png", white=0)
    (tmp_path / "d/broken-mask.png").write_bytes(b"nothing")
    half(tmp_path / "d/good-mask.png", (32, 32))
    half(tmp_path / "d/shape-mask.png", (64, 32))
    spec = job("d", root=tmp_path, masked_loss="file")
    for _ in range(2):  # the second look is from memory
        assert {one.name: one.why for one in build_index(spec).skipped} == {
            "black.png": "its mask is all black",
            "broken.png": "mask: not an image",
            "shape.png": "its mask has another shape: 64x32 for an image of 64x64",
        }
    lenient = job("d", root=tmp_path, masked_loss="file", unmasked_weight=0.5)
    assert "black.png" in by_name(lenient)


def test_an_alpha_channel_is_a_mask_and_turns_with_its_image(tmp_path: Path) -> None:
    image(tmp_path / "d/opaque.png")
    seen = Image.new("RGBA", (64, 32), (9, 9, 9, 0))
    seen.paste((9, 9, 9, 255), (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees
    (tmp_path / "d/turned.txt").write_text("t")
    seen.save(tmp_path / "d/turned.webp", exif=exif, lossless=True)
    spec = job("d", root=tmp_path, masked_loss="alpha", resolution=32)
    found = by_name(spec)
    assert (found["opaque.png"].mask, found["turned.webp"].mask_path) == ("", "")
    assert found["turned.webp"].mask == found["turned.webp"].digest
    shown = decode_opacity((tmp_path / "d/turned.webp").read_bytes())
    assert shown is not None
    assert shown.size == (32, 64)
    assert (shown.getpixel((5, 5)), shown.getpixel((5, 60))) == (255, 0)


def test_where_the_file_of_a_mask_is_transparent_it_is_black(tmp_path: Path) -> None:
    mask = Image.new("RGBA", (4, 2), "white")
    mask.putalpha(Image.linear_gradient("L").resize((4, 2)).point(lambda v: 255 * (v > 127)))
    mask.save(tmp_path / "m.png")
    read = read_mask((tmp_path / "m.png").read_bytes(), alpha=False)
    assert read is not None
    assert [read.getpixel((0, row)) for row in (0, 1)] == [0, 255]


def test_flips_and_crops_of_the_image_are_those_of_its_mask(tmp_path: Path) -> None:
    image(tmp_path / "d/a.png", (256, 64))
    half(tmp_path / "d/a-mask.png", (128, 32))  # of half the size
    changes: dict[str, Any] = {"crop": "random", "crop_variants": 2, "random_flip": True}
    spec = job("d", root=tmp_path, masked_loss="file", resolution=64, **changes)
    (sample,) = build_index(spec).samples
    assert sample.bucket == (80, 48)
    views = [cells_of(sample, number, (6, 10), spec) for number in range(4)]
    torch.testing.assert_close(views[2], views[0].flip(1))
    torch.testing.assert_close(views[3], views[1].flip(1))
    left, right = views[0].mean(), views[1].mean()
    assert left > right, "the first cut is the more left one"
    keys = {mask_key(TensorCache(tmp_path, "masks"), sample, n, (6, 10), spec) for n in range(4)}
    assert len(keys) == 4


def test_a_sample_counts_alike_however_small_its_mask() -> None:
    mask = torch.zeros(4, 4)
    mask[:2, :1] = 1
    assert normalised(mask, 0.0).mean() == 1
    assert normalised(mask, 0.0)[0, 0] == 8
    soft = normalised(mask, 0.25)
    assert soft.mean() == pytest.approx(1)
    assert soft[3, 3] / soft[0, 0] == pytest.approx(0.25)
    assert normalised(torch.zeros(4, 4), 0.0).sum() == 0, "and not a division by 0"


def test_the_loss_is_the_mean_over_what_the_mask_shows() -> None:
    torch.manual_seed(0)
    target, prediction = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    problem = NoisySample(target, torch.zeros(2), target)
    mask = (torch.rand(2, 4, 4) < 0.4).float()
    weight = torch.stack([normalised(one, 0.0) for one in mask]).unsqueeze(1)
    each = (prediction - target).square()
    own = [each[n][:, mask[n] == 1].mean() for n in range(2)]
    assert loss_of(prediction, problem, JobSpec(), weight).item() == pytest.approx(
        torch.stack(own).mean().item(), rel=1e-6
    )
    plain = each.flatten(1).mean(1)
    weighted = loss_of(prediction, problem, JobSpec(), torch.tensor([0.5, 3.0]))
    assert weighted.item() == pytest.approx((0.5 * plain[0] + 3 * plain[1]).item() / 2, rel=1e-6)


# -- weights ---------------------------------------------------------------------------------


def test_weights_come_from_columns_datasets_and_roles(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        image(tmp_path / f"d/{name}.png", caption=False)
    weights: list[Any] = [0.5, None, "much", 0]
    rows = [
        {"file_name": f"{name}.png", "text": name, "w": weight}
        for name, weight in zip("abcd", weights, strict=True)
    ]
    (tmp_path / "d/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    image(tmp_path / "r/x.png")
    spec = job(
        {"path": "d", "loss_weight": 2, "loss_weight_column": "w"},
        {"path": "r", "regularization": True},
        root=tmp_path,
        prior_loss_weight=0.25,
    )
    index = build_index(spec)
    assert dict(
        zip([s.name for s in index.samples], weights_of(index.samples, spec), strict=True)
    ) == {
        "a.png": 1.0,
        "b.png": 2.0,
        "x.png": 0.25,
    }
    assert {one.name: one.why for one in index.skipped} == {
        "c.png": "w is not a weight from 0 to 1000",
        "d.png": "w is 0",
    }
    report = make_report(spec, index, None)
    assert report.weights == [0.25, 2.0]
    assert "weights of the loss from 0.25 to 2" in summary(report)
    with pytest.raises(UserError, match="has no column v"):
        build_index(job({"path": "d", "loss_weight_column": "v"}, root=tmp_path))
    with pytest.raises(UserError, match="has no metadata file with a column w"):
        build_index(job({"path": "r", "loss_weight_column": "w"}, root=tmp_path))


def test_weights_and_masks_of_a_sample_are_one_factor(tmp_path: Path) -> None:
    image(tmp_path / "d/a.png")
    image(tmp_path / "d/b.png")
    half(tmp_path / "d/a-mask.png")
    spec = job({"path": "d", "loss_weight": 3}, root=tmp_path, masked_loss="file")
    samples = build_index(spec).samples
    cache = TensorCache(tmp_path / "cache", "masks")
    weights = LossWeights(spec, samples, cache)
    assert (weights.active, weights.masked) == (True, True)
    key = mask_key(cache, samples[0], 0, (4, 4), spec)
    cache.write(key, {"mask": cells_of(samples[0], 0, (4, 4), spec)})
    latents = torch.zeros(16, 4, 4)
    first = weights.of(0, 0, latents)
    assert first.shape == (1, 4, 4)
    assert first[0, 0].tolist() == [6, 6, 0, 0]
    assert weights.of(1, 0, torch.zeros(16, 1, 4, 4)).shape == (1, 1, 4, 4), "a video's"
    assert weights.of(1, 0, latents).unique().tolist() == [3]
    who = Reference("who.png", None, 8, 8, "", role="reference")
    beside = LossWeights(spec, [replace(samples[0], references=(who, who))], cache)
    frames = beside.of(0, 0, torch.zeros(16, 3, 4, 4))[0]
    assert frames[:2].unique().tolist() == [3], "of reference images, all counts"
    assert torch.equal(frames[2], first[0])
    video = LossWeights(spec, [samples[0], replace(samples[1], references=(who, who))], cache)
    assert video.of(1, 0, torch.zeros(16, 5, 4, 4)).shape == (1, 5, 4, 4), "of each frame"
    plain = LossWeights(job("d", root=tmp_path, missing_captions="empty"), samples[1:], cache)
    assert not plain.active


# -- regularization --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "repeats", "draws"),
    [
        ([10, 200], [1, 1], [200, 200]),
        ([10, 4], [3, 1], [30, 30]),
        ([10, 20, 5], [1, 2, 1], [10, 40, 50]),
        ([10, 0], [1, 1], [10, 0]),
    ],
)
def test_regularization_is_drawn_as_often_as_all_else(
    samples: list[int], repeats: list[int], draws: list[int]
) -> None:
    datasets = [
        Dataset(path=str(n), repeats=repeats[n], regularization=n == len(samples) - 1)
        for n in range(len(samples))
    ]
    assert [share.draws for share in shares_of(datasets, samples)] == draws


def test_it_keeps_its_captions_is_not_held_out_and_comes_every_other_time(tmp_path: Path) -> None:
    for number in range(4):
        image(tmp_path / f"d/{number}.png")
    for number in range(3):
        image(tmp_path / f"r/r{number}.png", caption=False)
    spec = job(
        "d",
        {"path": "r", "regularization": True},
        root=tmp_path,
        class_prompt="a cat",
        trigger_word="sks",
        validation_fraction=0.5,
        num_processes=2,
        train_batch_size=2,
    )
    index = build_index(spec)
    texts = {sample.name: sample_texts(sample, spec) for sample in index.samples}
    assert texts["0.png"] == ("sks, 0",)
    assert texts["r0.png"] == ("a cat",)
    trained, held = hold_out(index, spec)
    assert {sample.dataset for sample in held} == {0}
    plan = make_plan(spec, trained)
    drawn = Counter(
        trained.samples[draw.sample].dataset
        for step in range(math.ceil(4 * plan.steps_per_epoch))
        for draw in plan.draws(step)
    )
    assert drawn[0] == drawn[1]
    assert plan.draws_per_epoch == 6
    report = make_report(spec, index, None)
    assert [one.regularization for one in report.datasets] == [False, True]
    assert any(line.endswith("3 samples, 3 draws per epoch (50.0%)") for line in summary(report))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prior_loss_weight": 2}, "prior_loss_weight needs num_class_images, or"),
        ({"class_prompt": "a"}, "class_prompt needs num_class_images, or"),
        ({"num_class_images": 3}, "num_class_images needs class_prompt"),
        ({"regularization_target": "base"}, "regularization_target needs num_class_images, or"),
        ({"preservation": "class", "trigger_word": "a"}, "needs preservation_class"),
        ({"preservation": "class", "preservation_class": "dog"}, "needs a trigger_word"),
        ({"preservation_class": "dog"}, "preservation_class needs preservation"),
        ({"preservation_weight": 2}, "preservation_weight needs preservation"),
        ({"preservation": "blank", "model_type": "full"}, "blank needs model_type: lora, since"),
        (
            {
                "regularization_target": "base",
                "num_class_images": 3,
                "class_prompt": "a",
                "model_family": "sdxl",
                "text_encoder_lora_rank": 4,
            },
            "base is not supported with text_encoder_lora_rank",
        ),
        ({"unmasked_weight": 0.5}, "unmasked_weight needs masked_loss"),
        ({"datasets": [{"path": "a", "regularization": True}]}, "all are regularization"),
        ({"datasets": [{"path": "a", "mask_path": "m"}]}, "needs masked_loss: file"),
        (
            {
                "datasets": [{"path": "a", "weight": 1}],
                "num_class_images": 3,
                "class_prompt": "a",
            },
            "num_class_images cannot be combined with weight",
        ),
    ],
)
def test_what_says_nothing_or_contradicts_is_refused(changes: dict[str, Any], said: str) -> None:
    values = {"pretrained_model_name_or_path": "m", "dataset": "d"}
    values = {k: v for k, v in values.items() if k != "dataset" or "datasets" not in changes}
    with pytest.raises(SpecError, match=said):
        load_spec(None, values | changes)
