"""Several resolutions: at which of them an image is trained, and what is said of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from engine.data.index.data_index import build_index
from engine.data.read.class_images import with_class_images
from engine.data.report import make_plan, make_report, summary
from engine.memory.tracing.inputs import training_size
from jobs.errors import SpecError
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import size_of
from jobs.spec.rules.buckets import bucket_sizes, sizes_of
from jobs.spec.values.resolutions import all_resolutions, largest_resolution

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


def job(root: Path, **changes: Any) -> JobSpec:
    values = {"pretrained_model_name_or_path": "m", "dataset": str(root), "cache_dir": f"{root}.c"}
    return load_spec(None, values | changes)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A small, a middling, a large and a wide image; and one that is a little too small."""
    folder = tmp_path / "d"
    folder.mkdir()
    sizes = {"small": (64, 64), "middle": (128, 128), "large": (512, 512), "wide": (600, 200)}
    for name, size in (sizes | {"nearly": (120, 120)}).items():
        Image.new("RGB", size, (len(name), size[0] % 256, 9)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(name)
    return folder


def sides(spec: JobSpec) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for sample in build_index(spec).samples:
        found.setdefault(sample.name.removesuffix(".png"), []).append(sample.bucket)
    return found


def test_an_image_is_trained_at_each_resolution_that_it_is_large_enough_for(images: Path) -> None:
    spec = job(images, resolution="64, 256,128")
    assert spec.resolution == [64, 128, 256]
    assert sides(spec) == {
        "small": [(64, 64)],
        "middle": [(64, 64), (128, 128)],
        "nearly": [(64, 64), (128, 128)],  # by less than a tenth too small
        "large": [(64, 64), (128, 128), (256, 256)],
        "wide": [(80, 48), (160, 96), (352, 176)],
    }
    report = make_report(spec, build_index(spec), None)
    assert (report.images, report.samples) == (5, 11)
    told = {found.text: found.examples for found in report.cautions}
    assert told["too small for resolution 128, trained at smaller ones only"] == ["small.png"]
    assert told["too small for resolution 256, trained at smaller ones only"] == [
        "middle.png",
        "nearly.png",
        "small.png",
    ]
    assert "with the same content as another" not in told
    assert summary(report)[0].startswith("11 samples of 5 images in 6 buckets, 5 captions")
    plan = make_plan(spec, build_index(spec))
    assert plan.draws_per_epoch == 11


def test_or_at_the_largest_of_them_alone(images: Path) -> None:
    spec = job(images, resolution=[64, 128, 256], resolution_mode="largest")
    assert {name: found for name, (found,) in sides(spec).items()} == {  # one each
        "small": (64, 64),
        "middle": (128, 128),
        "nearly": (128, 128),
        "large": (256, 256),
        "wide": (352, 176),
    }


def test_too_small_for_the_smallest_is_left_out_as_ever(images: Path) -> None:
    spec = job(images, resolution=[192, 256], max_upscale=2)
    index = build_index(spec)
    assert [one.name for one in index.skipped] == ["small.png"]
    assert "would be upscaled 3.0 times" in index.skipped[0].why


def test_a_dataset_may_have_its_own(images: Path) -> None:
    other = images.parent / "o"
    other.mkdir()
    Image.new("RGB", (512, 512)).save(other / "x.png")
    (other / "x.txt").write_text("x")
    entries = [{"path": str(images), "resolution": 64}, {"path": str(other)}]
    spec = job(images, dataset="", datasets=entries, resolution=[128, 256])
    buckets = {(s.dataset, s.bucket) for s in build_index(spec).samples}
    assert buckets == {(0, (64, 64)), (0, (80, 48)), (1, (128, 128)), (1, (256, 256))}
    assert all_resolutions(spec) == (64, 128, 256)
    assert training_size(spec) == (256, 256), "memory is that of the largest"
    assert largest_resolution(spec) == 256
    assert size_of(largest_resolution(spec), 16) == (256, 256), "and samples are as large"


@pytest.mark.parametrize(
    ("resolution", "read"), [([512], 512), ("512", 512), ([768, 512, 768], [512, 768])]
)
def test_a_list_of_one_is_that_one(resolution: Any, read: Any, tmp_path: Path) -> None:
    assert job(tmp_path, resolution=resolution).resolution == read


@pytest.mark.parametrize(
    ("resolution", "said"),
    [
        ([512, 8], "resolution: input should be greater than or equal to 16"),
        ("a", "resolution: expected a whole number"),
        ([], "resolution: expected at least one resolution"),
    ],
)
def test_what_is_no_resolution_is_refused(resolution: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        job(tmp_path, resolution=resolution)


def test_buckets_are_as_wide_as_the_job_says_or_square(images: Path) -> None:
    wide = job(images, resolution=128, max_bucket_aspect_ratio=3)
    assert sides(wide)["wide"] == [(192, 80)]
    assert max(w / h for w, h in sizes_of(wide)) == 2.4, "of those there are"
    square = job(images, resolution=128, crop="square")
    assert sizes_of(square) == [(128, 128)]
    assert bucket_sizes(1000, 16, 1.0) == [(992, 992)], "where no size of that area is square"
    with pytest.raises(SpecError, match="max_bucket_aspect_ratio and crop: square contradict"):
        job(images, crop="square", max_bucket_aspect_ratio=3)


def test_a_mode_without_several_resolutions_is_refused(images: Path) -> None:
    with pytest.raises(SpecError, match="resolution_mode needs several resolutions"):
        job(images, resolution_mode="largest")


def test_no_resolution_enlarges_more_than_max_upscale(images: Path) -> None:
    """`nearly` is 7 % too small for 128."""
    values = {"resolution": [64, 128], "resolution_mode": "largest"}
    nearly = {s.name: s.bucket for s in build_index(job(images, **values)).samples}["nearly.png"]
    assert nearly == (128, 128)
    index = build_index(job(images, max_upscale=1, **values))
    assert {s.name: s.bucket for s in index.samples}["nearly.png"] == (64, 64)


def test_class_images_are_trained_as_the_others_are(images: Path, tmp_path: Path) -> None:
    values = {"datasets": [{"path": str(images), "resolution": [64, 128]}], "dataset": ""}
    spec = with_class_images(job(images, **values), tmp_path / "made")
    assert spec.datasets is not None
    assert spec.datasets[-1].resolution == [64, 128]
