"""Index, buckets, plan and cache: the pure parts of the data path."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.data.buckets import bucket_sizes, nearest_bucket
from engine.data.cache import TensorCache, fingerprint
from engine.data.index import DataIndex, build_index, open_picture
from engine.data.plan import BatchPlan, positions_of_rank
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


@given(resolution=st.integers(16, 2048), step=st.sampled_from([8, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_buckets_are_multiples_and_never_larger_than_asked(resolution: int, step: int) -> None:
    sizes = bucket_sizes(resolution, step)
    assert sizes
    assert {(h, w) for w, h in sizes} == set(sizes), "portrait and landscape alike"
    for width, height in sizes:
        assert width % step == height % step == 0
        assert width * height <= max(resolution, step) ** 2


def test_a_picture_goes_to_the_bucket_of_its_shape() -> None:
    sizes = bucket_sizes(64, 16)
    assert nearest_bucket(500, 500, sizes) == (64, 64)
    width, height = nearest_bucket(900, 500, sizes)
    assert width > height
    assert nearest_bucket(500, 900, sizes) == (height, width)


@given(
    members=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    ranks=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_an_epoch_shows_every_sample_and_every_rank_the_same_shapes(
    members: list[int], ranks: int, seed: int
) -> None:
    buckets = tuple(bucket for bucket, count in enumerate(members) for _ in range(count))
    plan = BatchPlan(buckets, global_batch=8, seed=seed)
    seen: Counter[int] = Counter()
    for step in range(plan.steps_per_epoch):
        batch = plan.samples(step)
        assert len(batch) == 8
        assert len({buckets[sample] for sample in batch}) == 1
        parts = [positions_of_rank(rank, ranks, 0, 8 // ranks) for rank in range(ranks)]
        assert [p for part in parts for p in part] == list(range(8)), "each position once"
        seen.update(batch)
    assert set(seen) == set(range(len(buckets))), "no sample is left out"
    largest = -(-8 // min(members)) + 1
    assert max(seen.values()) <= largest


def test_accumulation_and_ranks_cover_the_same_positions() -> None:
    shares = [positions_of_rank(rank, 2, micro, 3) for micro in range(2) for rank in range(2)]
    assert sorted(p for share in shares for p in share) == list(range(12))


def test_epochs_differ_in_order_and_seeds_too() -> None:
    plan = BatchPlan(("a",) * 12, global_batch=4, seed=1)
    first = [plan.samples(step) for step in range(3)]
    second = [plan.samples(step) for step in range(3, 6)]
    other = [BatchPlan(("a",) * 12, 4, seed=2).samples(step) for step in range(3)]
    assert first != second
    assert first != other
    assert first == [BatchPlan(("a",) * 12, 4, seed=1).samples(step) for step in range(3)]


def test_a_damaged_cache_file_is_removed_and_a_whole_one_kept(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "latents")
    key = cache.key(picture="abc", size=[64, 64])
    assert not cache.has(key)
    cache.write(key, {"latents": torch.arange(6.0)})
    assert cache.has(key)
    assert torch.equal(cache.read(key)["latents"], torch.arange(6.0))
    cache.path(key).write_bytes(cache.path(key).read_bytes()[:-4])
    assert not cache.has(key)
    assert not cache.path(key).exists()


def test_cache_keys_follow_every_fact(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "latents")
    keys = {cache.key(picture="a", size=[1, 2]), cache.key(picture="b", size=[1, 2])}
    assert len(keys | {cache.key(picture="a", size=[2, 1])}) == 3
    assert cache.key(a=1, b=2) == cache.key(b=2, a=1)


def test_a_fingerprint_notices_one_changed_byte_in_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    before = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 2}')
    assert fingerprint(tmp_path) != before


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three usable pictures (one rotated by EXIF, one with alpha), and three that are not."""
    root = tmp_path / "pictures"
    (root / "deep").mkdir(parents=True)
    Image.new("RGB", (40, 30), "red").save(root / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30), "blue").save(root / "deep" / "turned.jpg", exif=exif)
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(root / "clear.png")
    for name in ("a", "deep/turned", "clear", "torn", "text"):
        (root / name).with_suffix(".txt").write_text(f"caption of {name}")
    (root / "torn.png").write_bytes((root / "a.png").read_bytes()[:60])
    (root / "text.png").write_text("not a picture")
    Image.new("RGB", (8, 8)).save(root / "silent.png")
    return root


def test_the_index_names_what_it_leaves_out(pictures: Path, tmp_path: Path) -> None:
    index = build_index(pictures)
    assert [s.caption for s in index.samples] == [
        "caption of a", "caption of clear", "caption of deep/turned"
    ]  # fmt: skip
    assert {name for name, _ in index.skipped} == {"torn.png", "text.png", "silent.png"}
    assert dict(index.skipped)["silent.png"] == "no caption file"
    index.save(tmp_path / "data.json")
    assert DataIndex.load(tmp_path / "data.json") == index


def test_pictures_are_read_as_they_are_displayed(pictures: Path) -> None:
    turned = next(s for s in build_index(pictures).samples if s.path.endswith("turned.jpg"))
    assert (turned.width, turned.height) == (30, 40)
    assert open_picture(turned.path).size == (30, 40)
    assert open_picture(str(pictures / "clear.png")).getpixel((3, 3)) == (255, 255, 255)


def test_a_changed_picture_has_another_digest(pictures: Path) -> None:
    before = build_index(pictures).samples[0].digest
    Image.new("RGB", (40, 30), "green").save(pictures / "a.png")
    assert build_index(pictures).samples[0].digest != before


def test_a_folder_without_usable_pictures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no")
    (tmp_path / "x.txt").write_text("caption")
    with pytest.raises(UserError, match=r"no usable picture.*x\.png"):
        build_index(tmp_path)
