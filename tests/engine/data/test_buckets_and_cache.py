"""Buckets and cache: sizes of pictures, files of tensors."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.data.encode import tensor_cache
from engine.data.encode.latents import LatentKeys
from engine.data.encode.tensor_cache import CacheError, TensorCache, fingerprint
from engine.data.index.data_index import build_index
from jobs.errors import NotFiniteError, UserError
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.buckets import bucket_sizes, bucket_step, nearest_bucket, sizes_at
from jobs.spec.rules.conflicts import find_conflicts
from tests.support.bindfs import mounted

if TYPE_CHECKING:
    from pathlib import Path


def job(**values: Any) -> JobSpec:
    return JobSpec(**{"pretrained_model_name_or_path": "m", "dataset": "d"} | values)


@given(resolution=st.integers(16, 2048), step=st.sampled_from([8, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_buckets_are_multiples_and_never_larger_than_asked(resolution: int, step: int) -> None:
    sizes = bucket_sizes(resolution, step)
    assert sizes
    assert {(h, w) for w, h in sizes} == set(sizes), "portrait and landscape alike"
    for width, height in sizes:
        assert width % step == height % step == 0
        assert width * height <= max(resolution, step) ** 2


@pytest.mark.parametrize("name", FAMILIES)
def test_buckets_lie_as_far_apart_as_the_job_says_where_the_family_can(name: str) -> None:
    """All steps of all families and flavours: a job is refused in one sentence, or has them."""
    for flavour in (None, *FAMILIES[name].flavours):
        least = FAMILIES[name].latent_step_of(flavour)
        for step in range(129):
            spec = job(model_family=name, model_flavour=flavour, resolution=512, bucket_step=step)
            refused = [c.message for c in find_conflicts(spec) if c.key == "bucket_step"]
            fits = step == 0 or (step >= 16 and step % least == 0)
            assert len(refused) == (0 if fits else 1), (flavour, step, refused)
            if not fits:
                for better in map(int, re.findall(r"\d+", refused[0].partition("; use ")[2])):
                    other = spec.model_copy(update={"bucket_step": better})
                    assert not [c for c in find_conflicts(other) if c.key == "bucket_step"]
                continue
            for size in sizes_at(512, spec):
                assert all(side % (step or least) == 0 for side in size)
    assert sizes_at(512, job(model_family=name, resolution=512, bucket_step=0)) == bucket_sizes(
        512, FAMILIES[name].latent_step
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"bucket_step": 8},
            "bucket_step 8 is less than 16 pixels; use 16",
        ),
        (
            {"bucket_step": 48, "model_family": "sana"},
            "bucket_step 48 is not a multiple of 32 pixels, as sides of images must be for Sana; "
            "use 32 or 64",
        ),
        (
            {"bucket_step": 128, "resolution": [96, 512]},
            "bucket_step 128 is more than resolution 96; use 96",
        ),
    ],
)
def test_a_step_that_cannot_be_is_refused_in_one_sentence(
    values: dict[str, Any], sentence: str
) -> None:
    assert [c.message for c in find_conflicts(job(**values)) if c.key == "bucket_step"] == [
        sentence
    ]


@pytest.mark.parametrize(
    ("resolution", "family", "step", "count"),
    [
        (1024, "flux", 64, 13),
        (512, "flux", 32, 13),
        (256, "flux", 16, 13),
        (768, "flux", 48, 13),
        (64, "flux", 16, 3),
        (2048, "flux", 128, 13),
        (4096, "flux", 128, 25),
        (768, "sdxl", 32, 19),
        (1024, "stable_diffusion", 64, 13),
        (512, "stable_diffusion", 64, 5),
    ],
)
def test_the_usual_step_follows_the_resolution(
    resolution: int, family: str, step: int, count: int
) -> None:
    spec = job(model_family=family)
    assert bucket_step(resolution, spec) == step
    assert len(sizes_at(resolution, spec)) == count


def test_a_square_crop_keeps_the_resolution_whatever_the_step() -> None:
    assert sizes_at(592, job(crop="square", bucket_step=128)) == [(592, 592)]


def test_tokens_are_shared_out_whatever_the_step() -> None:
    """They are counted in what the model takes, not in steps of buckets."""
    values = {"context_parallel_size": 4, "num_processes": 4, "bucket_step": 64}
    assert len(sizes_at(1024, job(**values))) == 13


def test_latents_of_other_buckets_are_other_files(tmp_path: Path) -> None:
    """And those of equal sizes are the same: the step itself decides no pixel."""
    image = tmp_path / "d" / "a.png"
    image.parent.mkdir()
    Image.new("RGB", (600, 400), "teal").save(image)
    image.with_suffix(".txt").write_text("a")
    (tmp_path / "model").mkdir()
    cache = TensorCache(tmp_path, "latents")
    keys = {}
    for step in (16, 64, 96):
        spec = job(dataset=str(image.parent), resolution=512, bucket_step=step)
        spec = spec.model_copy(update={"cache_dir": str(tmp_path / "c")})
        index = build_index(spec)
        keys[step] = (
            index.samples[0].bucket,
            LatentKeys(spec, cache, tmp_path / "model", index)(0, 0),
        )
    sizes = [size for size, _ in keys.values()]
    assert len({key for _, key in keys.values()}) == len(set(sizes)) > 1
    fine, finest = (
        job(dataset=str(image.parent), resolution=64, cache_dir=str(tmp_path / "c"), bucket_step=n)
        for n in (16, 0)
    )
    first, second = (
        LatentKeys(spec, cache, tmp_path / "model", build_index(spec))(0, 0)
        for spec in (fine, finest)
    )
    assert first == second


def test_a_picture_goes_to_the_bucket_of_its_shape() -> None:
    sizes = bucket_sizes(64, 16)
    assert nearest_bucket(500, 500, sizes) == (64, 64)
    width, height = nearest_bucket(900, 500, sizes)
    assert width > height
    assert nearest_bucket(500, 900, sizes) == (height, width)


def test_a_cache_file_with_one_flipped_bit_is_noticed_and_removed(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "latents")
    key = cache.key(picture="abc", size=[64, 64])
    assert cache.check(key) == "missing"
    cache.write(key, {"latents": torch.arange(6.0)})
    assert cache.check(key) == "sound"
    assert torch.equal(cache.read(key)["latents"], torch.arange(6.0))
    whole = cache.path(key).read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))
    for place in (-1, -20, 40, 3):  # tensor bytes, header, its length
        broken = bytearray(whole)
        broken[place] ^= 1
        cache.path(key).write_bytes(broken)
        assert cache.check(key) == "damaged"
        assert not cache.path(key).exists()
    for content in (b"", whole[:-4], whole + b"\0", b"\xff" * 64):
        cache.path(key).write_bytes(content)
        assert cache.check(key) == "damaged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_neither_cached_nor_taken_from_a_cache(
    tmp_path: Path, dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TensorCache(tmp_path, "text")
    good = {"embeds": torch.ones(300, dtype=dtype), "mask": torch.ones(3, dtype=torch.int64)}
    bad = {**good, "pooled": good["embeds"].clone().index_fill_(0, torch.tensor(217), value)}
    cache.write("a" * 40, good | {"nothing": torch.empty(0, dtype=dtype)})
    assert cache.check("a" * 40) == "sound"
    with pytest.raises(NotFiniteError, match=r"^pooled for the cache .*text have values that"):
        cache.write("b" * 40, bad)
    assert [path.stem for path in tmp_path.rglob("*.*")] == ["a" * 40]
    with monkeypatch.context() as patch:  # as earlier versions did
        patch.setattr(tensor_cache, "nonfinite", lambda tensors: [])
        cache.write("b" * 40, bad)
    assert cache.check("b" * 40) == "damaged"
    assert cache.check("b" * 40) == "missing", "and is encoded again"


def test_a_cache_file_that_broke_while_the_job_ran_says_what_to_do(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "text")
    cache.write("k" * 40, {"embeds": torch.ones(3, dtype=torch.bfloat16)})
    cache.path("k" * 40).write_bytes(b"x" * 100)
    with pytest.raises(CacheError, match=r"damaged after the job checked it.*resume"):
        cache.read("k" * 40)
    with pytest.raises(CacheError, match=r"cannot be read \(No such file.*resume"):
        cache.read("k" * 40)


def test_what_killed_writers_left_is_swept_away_after_a_while(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "text")
    for name, age in (("old", 7200), ("new", 0)):
        path = tmp_path / "text" / "ab" / f".{name}.tmp"
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
        os.utime(path, (time.time() - age,) * 2)
    cache.write("a" * 40, {"x": torch.zeros(1)})
    cache.sweep()
    assert [path.name for path in tmp_path.rglob(".*.tmp")] == [".new.tmp"]
    assert cache.check("a" * 40) == "sound"


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


def test_a_file_that_cannot_be_read_now_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TensorCache(tmp_path, "text")
    cache.write("a" * 40, {"x": torch.zeros(1)})

    def busy(path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", busy)
        assert cache.check("a" * 40) == "damaged", "and so computed anew"
    assert cache.check("a" * 40) == "sound"


def test_a_full_disk_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TensorCache(tmp_path, "text")

    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(UserError, match=r"cache .*text \(No space left.*set cache_dir"):
        cache.write("a" * 40, {"x": torch.zeros(1)})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_that_another_machine_has_just_cached_is_read(tmp_path: Path) -> None:
    """This client remembers for two seconds that it was not there."""
    (tmp_path / "disk").mkdir()
    remembers = "attr_timeout=2,entry_timeout=2,negative_timeout=2"
    with mounted(tmp_path / "disk", tmp_path / "mount", remembers) as mount:
        here, there = TensorCache(tmp_path / "disk", "text"), TensorCache(mount, "text")
        key = here.key(caption="a")
        here.write(here.key(caption="b"), {"x": torch.zeros(1)})
        here.path(key).parent.mkdir(exist_ok=True)
        assert there.check(key) == "missing"
        here.write(key, {"x": torch.ones(2)})
        assert not there.path(key).exists(), "else this mount remembers nothing"
        assert there.read(key)["x"].tolist() == [1.0, 1.0]


def test_a_file_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "text")
    key = cache.key(caption="a")
    cache.path(key).parent.mkdir()
    with pytest.raises(CacheError, match="although the job cached it"):
        cache.read(key)
