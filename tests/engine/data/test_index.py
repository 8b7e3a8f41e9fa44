"""Datasets as people have them: what is found in them, what is left out, what is said of it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from engine.data.contact_sheet import save_strips, sheet
from engine.data.index import data_index as index_module
from engine.data.index.data_index import DataIndex, Sample, Skipped, build_index, read_content
from engine.data.index.views import View, count_views, cut_share, fit, random_mask, view_of
from engine.data.read.folders import records_of
from engine.data.read.memo import Memo, stamp_of
from engine.data.report import (
    changed_since,
    make_report,
    reasons_of,
    sample_texts,
    summary,
)
from jobs.errors import UserError
from jobs.spec.file.load import load_spec
from jobs.spec.rules.buckets import enlargement

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobSpec]:
    """A job on folders below `tmp_path`."""

    def make(*folders: Any, **changes: Any) -> JobSpec:
        entries = [
            {"path": str(tmp_path / f)}
            if isinstance(f, str)
            else f | {"path": str(tmp_path / f["path"])}
            for f in folders
        ]
        values = {
            "pretrained_model_name_or_path": "m",
            "datasets": entries,
            "resolution": 64,
            "cache_dir": str(tmp_path / "cache"),
            "max_upscale": 4,
        }
        return load_spec(None, values | changes)

    return make


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    """Writes a picture, and its caption if there is one."""

    def write(
        name: str,
        caption: str | bytes | None = "a caption",
        size: tuple[int, int] = (64, 64),
        colour: str = "red",
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(path)
        if caption is not None:
            content = caption.encode() if isinstance(caption, str) else caption
            path.with_suffix(".txt").write_bytes(content)
        return path

    return write


def names(index: DataIndex) -> list[str]:
    return [sample.name for sample in index.samples]


def left_out(index: DataIndex) -> dict[str, str]:
    return {one.name: one.why for one in index.skipped}


# -- captions of a folder --------------------------------------------------------------------


def test_captions_come_from_text_files_of_all_encodings_that_editors_write(
    job: Callable[..., JobSpec], picture: Callable[..., Path]
) -> None:
    picture("d/a.png", "plain")
    picture("d/b.png", b"\xef\xbb\xbfwith a mark")
    picture("d/c.png", "zwei Wörter".encode("utf-16"))
    picture("d/d.png", "Stra\xdfe".encode("latin-1"))
    picture("d/e.png", None)
    picture("d/f.png", " \n ")
    picture("d/g.png", "one\ntwo")
    index = build_index(job("d"))
    assert [sample.captions for sample in index.samples] == [
        ("plain",),
        ("with a mark",),
        ("zwei Wörter",),
        ("one\ntwo",),
    ]
    assert left_out(index) == {
        "d.png": "caption is not UTF-8",
        "e.png": "no caption",
        "f.png": "no caption",
    }
    with_empty = build_index(job("d", missing_captions="empty"))
    assert names(with_empty) == ["a.png", "b.png", "c.png", "e.png", "f.png", "g.png"]
    assert sample_texts(with_empty.samples[-1], job("d")) == ("one two",)
    apart = job("d", caption_lines="variants")
    assert sample_texts(with_empty.samples[-1], apart) == ("one", "two")


def test_rows_of_metadata_files_name_pictures_beside_them(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("d/train/1.png", "d/train/2.png", "d/train/deep/3.png", "d/4.png", "d/5.png"):
        picture(name, None)
    picture("d/6.png", "from its own file")
    rows = [
        {"file_name": "1.png", "text": "first"},
        {"file_name": "2.png", "text": ["second", "another"]},
        {"file_name": "deep/3.png", "caption": "third"},
        {"file_name": "gone.png", "text": "nothing"},
        "not an object",
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "d/train/metadata.jsonl").write_text("\n".join([*lines, "{torn", ""]))
    (tmp_path / "d/metadata.csv").write_text(
        '\ufefffile_name,text\n4.png,"one, two\nlines"\n6.png,from the table\n'
    )
    index = build_index(job("d"))
    assert {sample.name: sample.captions for sample in index.samples} == {
        "4.png": ("one, two\nlines",),
        "6.png": ("from the table",),
        "train/1.png": ("first",),
        "train/2.png": ("second", "another"),
        "train/deep/3.png": ("third",),
    }
    assert left_out(index) == {
        "5.png": "no caption",
        "train/metadata.jsonl line 4": "does not name an image here: train/gone.png",
        "train/metadata.jsonl line 5": "is not a JSON object",
        "train/metadata.jsonl line 6": "is not a JSON object",
    }


def test_a_caption_column_may_be_named_and_must_be_there(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    picture("d/1.png", None)
    row = {"file_name": "1.png", "text": "short", "long_text": "a long one"}
    (tmp_path / "d/metadata.jsonl").write_text(json.dumps(row))
    assert build_index(job("d")).samples[0].captions == ("short",)
    index = build_index(job({"path": "d", "caption_column": "long_text"}))
    assert index.samples[0].captions == ("a long one",)
    with pytest.raises(UserError, match=r"has no column alt; it has file_name, text, long_text"):
        build_index(job({"path": "d", "caption_column": "alt"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name,text\n1.png,x\n", "has no column file_name; its first line is name, text"),
        ("", "has no column file_name; its first line is empty"),
    ],
)
def test_a_table_that_names_no_files_is_refused(
    content: str,
    message: str,
    job: Callable[..., JobSpec],
    picture: Callable[..., Path],
    tmp_path: Path,
) -> None:
    picture("d/1.png")
    (tmp_path / "d/metadata.csv").write_text(content)
    with pytest.raises(UserError, match=message):
        build_index(job("d"))


def test_names_that_are_not_utf_8_can_be_read_and_printed(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    plain = picture("d/x.png", None)
    odd = os.fsdecode(b"caf\xe9")
    plain.rename(tmp_path / "d" / f"{odd}.png")
    (tmp_path / "d" / f"{odd}.caption").write_text("a café")
    spec = job("d")
    index = build_index(spec)
    index.save(tmp_path / "data.json")
    (sample,) = DataIndex.load(tmp_path / "data.json").samples
    assert sample.name == "caf\\xe9.png"
    assert sample.captions == ("a café",)
    assert len(read_content(sample, spec)) > 0
    assert "\n".join(summary(make_report(spec, index, None))).encode()


def test_the_same_name_and_the_same_content_in_two_datasets_are_two_samples(
    job: Callable[..., JobSpec], picture: Callable[..., Path]
) -> None:
    picture("a/1.png", "one")
    picture("b/1.png", "two")
    index = build_index(job({"path": "a", "trigger_word": "x"}, {"path": "b", "repeats": 3}))
    spec = job({"path": "a", "trigger_word": "x"}, {"path": "b", "repeats": 3})
    assert [(s.dataset, s.name) for s in index.samples] == [(0, "1.png"), (1, "1.png")]
    assert [sample_texts(s, spec) for s in index.samples] == [("x, one",), ("two",)]
    assert index.samples[0].digest == index.samples[1].digest


# -- what is left out ------------------------------------------------------------------------


def test_nothing_disappears_in_silence(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    whole = picture("d/whole.png")
    for name, content in {
        "torn.png": whole.read_bytes()[:60],
        "empty.jpg": b"",
        "words.png": b"not an image",
    }.items():
        (tmp_path / "d" / name).write_bytes(content)
        (tmp_path / "d" / name).with_suffix(".txt").write_text("x")
    picture("d/tiny.png", size=(8, 8))
    (tmp_path / "d/phone.heic").write_bytes(b"x")
    (tmp_path / "d/clip.mp4").write_bytes(b"x")
    (tmp_path / "d/loose.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "d/loose.txt").write_text("x")
    (tmp_path / "d/notes.md").write_text("x")
    index = build_index(job("d"))
    assert names(index) == ["whole.png"]
    reasons = left_out(index)
    assert set(reasons) == {
        "torn.png",
        "empty.jpg",
        "words.png",
        "tiny.png",
        "phone.heic",
        "clip.mp4",
        "loose.png",
    }
    assert reasons["tiny.png"] == "too small: 8x8 would be upscaled 8.0 times (max_upscale 4)"
    assert reasons["phone.heic"] == (
        ".heic images need a package that is not installed; pip install pillow-heif"
    )
    assert reasons["clip.mp4"] == "a video, but the model trains on images"
    assert reasons["loose.png"] == "a broken link"
    report = make_report(job("d"), index, None)
    assert sum(one.count for one in report.reasons) == 7
    assert [(one.count, one.text[:9]) for one in report.cautions] == [(1, ".md files")]
    said = "\n".join(summary(report))
    for word in ("too small", "a broken link", ".heic", "1 .md files"):
        assert word in said


def test_each_dataset_must_have_something_to_train_on(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    picture("good/a.png")
    picture("bad/b.png", None)
    with pytest.raises(UserError, match=r"no usable image in .*bad; b\.png: no caption"):
        build_index(job("good", "bad"))


def test_a_file_that_may_not_be_read_is_named(
    job: Callable[..., JobSpec], picture: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture("d/a.png")
    secret = picture("d/b.png")

    def stat(path: Path) -> str:
        if path == secret:
            raise PermissionError(13, "Permission denied")
        return stamp_of(path)

    monkeypatch.setattr(index_module, "stamp_of", stat)
    assert left_out(build_index(job("d"))) == {"b.png": "cannot be read (Permission denied)"}


# -- the memo --------------------------------------------------------------------------------


def test_pictures_are_looked_at_once_and_again_when_they_change(
    job: Callable[..., JobSpec], picture: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = picture("d/a.png", colour="red"), picture("d/b.png", colour="blue")
    looked: list[int] = []
    stock = index_module.inspect_image

    def counting(content: bytes) -> Any:
        looked.append(len(content))
        return stock(content)

    monkeypatch.setattr(index_module, "inspect_image", counting)
    monkeypatch.setattr("engine.data.read.memo._SETTLED", 1e9)
    build_index(job("d"))
    build_index(job("d"))
    assert len(looked) == 4, "files that are this fresh are not trusted"
    monkeypatch.setattr("engine.data.read.memo._SETTLED", -1.0)
    first = build_index(job("d"))
    assert build_index(job("d")) == first
    assert len(looked) == 6, "once more, and then no more"
    same = a.stat()
    content = b.read_bytes()
    a.write_bytes(content + b" " * (same.st_size - len(content)))
    os.utime(a, ns=(same.st_atime_ns, same.st_mtime_ns))  # as `rsync -t` or `cp -p` would
    second = build_index(job("d"))
    assert len(looked) == 7
    assert second.samples[0].digest != first.samples[0].digest
    assert second.samples[1] == first.samples[1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "files": 3}'])
def test_a_damaged_memo_is_as_good_as_none(content: str, tmp_path: Path) -> None:
    memo = Memo(tmp_path, "root", 1)
    memo.put("a", "stamp", {"x": 1})
    memo.save()
    assert Memo(tmp_path, "root", 1).get("a", "stamp") == {"x": 1}
    assert Memo(tmp_path, "root", 2).get("a", "stamp") is None
    next(tmp_path.glob("*.json")).write_text(content)
    assert Memo(tmp_path, "root", 1).get("a", "stamp") is None


# -- views -----------------------------------------------------------------------------------


def sample_of(width: int, height: int, bucket: tuple[int, ...] = (64, 64)) -> Sample:
    return Sample("s", "s", 0, ("x",), width, height, "digest", bucket)


def test_views_are_cuts_and_sides(job: Callable[..., JobSpec]) -> None:
    plain = job("d")
    assert count_views(plain) == 1
    assert view_of(sample_of(200, 100), 0, plain) == View((64, 64))
    varied = job("d", crop="random", crop_variants=3, random_flip=True)
    assert count_views(varied) == 6
    views = [view_of(sample_of(200, 100), number, varied) for number in range(6)]
    assert len(set(views)) == 6
    centres = [view.centre for view in views[:3]]
    assert [int(centre * 3) for centre in centres] == [0, 1, 2], "spread over the picture"
    assert [view.centre for view in views[3:]] == centres
    square = {view_of(sample_of(100, 100), number, varied) for number in range(6)}
    assert square == {View((64, 64)), View((64, 64), flip=True)}, "there is nothing to cut"


def test_random_masks_of_an_image_take_turns(job: Callable[..., JobSpec]) -> None:
    """With one set of latents for each side of it."""
    fill = job("d", model_flavour="fill", random_flip=True, mask_variants=3)
    sample, views = sample_of(200, 100, (128, 64)), range(count_views(fill))
    seen = [view_of(sample, number, fill) for number in views]
    assert [(view.flip, view.mask) for view in seen] == [(n % 2 == 1, n // 2) for n in range(6)]
    assert len({str(view.facts()) for view in seen}) == 2
    masks = [random_mask(sample, view) for view in seen]
    assert {mask.size for mask in masks} == {(128, 64)}
    assert len({mask.tobytes() for mask in masks}) == 6
    assert all(set(mask.tobytes()) <= {0, 255} for mask in masks)
    assert masks[4] == random_mask(sample, seen[4])


def test_a_view_shows_its_part_of_the_picture() -> None:
    picture = Image.new("RGB", (128, 64), "red")
    picture.paste("blue", (64, 0, 128, 64))
    left, right = fit(picture, View((64, 64), 0.0)), fit(picture, View((64, 64), 1.0))
    assert left.getpixel((20, 32)) == (255, 0, 0)
    assert right.getpixel((40, 32)) == (0, 0, 255)
    middle = fit(picture, View((64, 64), 0.5))
    mirrored = fit(picture, View((64, 64), 0.5, flip=True))
    assert (middle.getpixel((4, 32)), middle.getpixel((60, 32))) == ((255, 0, 0), (0, 0, 255))
    assert (mirrored.getpixel((4, 32)), mirrored.getpixel((60, 32))) == ((0, 0, 255), (255, 0, 0))


def test_how_much_is_cut_off_and_enlarged() -> None:
    assert enlargement(32, 64, (64, 64)) == 2.0
    assert cut_share(64, 64, (64, 64)) == 0.0
    assert cut_share(128, 64, (64, 64)) == pytest.approx(0.5)
    assert cut_share(256, 128, (64, 64)) == pytest.approx(0.5)


# -- the report ------------------------------------------------------------------------------


def test_the_report_counts_what_a_person_should_know(
    toy: Path, job: Callable[..., JobSpec], picture: Callable[..., Path]
) -> None:
    picture("a/1.png", "short", (64, 64))
    picture("a/2.png", "very " * 40 + "long", (64, 64), "blue")
    picture("a/3.png", "short", (128, 32), "green")
    picture("b/4.png", None, (40, 40), "white")
    picture("b/5.png", "one\ntwo", (64, 64))
    spec = job(
        {"path": "a", "repeats": 2},
        {"path": "b", "trigger_word": "sks"},
        max_sequence_length=16,
        missing_captions="empty",
        train_batch_size=2,
        max_train_steps=10,
        random_flip=True,
        caption_lines="variants",
    )
    report = make_report(spec, build_index(spec), toy / "model")
    assert report.samples == 5
    assert [d.draws for d in report.datasets] == [6, 2]
    assert report.texts == 5, "short, long, the trigger alone, two lines with it"
    assert report.views == 2
    assert report.longest is not None
    assert report.longest > 40
    assert {one.text.split(",")[0]: one.count for one in report.cautions} == {
        "without a caption": 1,
        "with captions longer than 16 tokens": 1,
        "cropped by more than a quarter": 1,
        "enlarged": 2,
        "with the same content as another": 1,
        "of a shape (80x48) with fewer samples than train_batch_size": 1,
    }
    assert [(b.size, b.samples, b.draws) for b in report.buckets] == [
        ([64, 64], 4, 6),
        ([80, 48], 1, 2),
    ]
    assert report.draws_per_epoch == 8
    assert report.steps_per_epoch == 4
    assert report.most_drawn > 1
    assert report.epochs == 2.5
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_changes_between_two_looks_are_named() -> None:
    before = DataIndex([sample_of(1, 1)])
    assert changed_since(before, before, "layer") == ""
    other = Sample("t", "t", 0, ("x",), 1, 1, "digest", (64, 64))
    assert changed_since(before, DataIndex([other]), "layer") == "1 new (t), 1 gone (s)"


def test_an_index_comes_back_from_its_file(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    picture("d/a.png", "a\nb")
    picture("d/b.png", None)
    index = build_index(job("d"))
    index.save(tmp_path / "data.json")
    assert DataIndex.load(tmp_path / "data.json") == index


def test_a_contact_sheet_shows_pictures_as_they_are_cut(
    job: Callable[..., JobSpec], picture: Callable[..., Path], tmp_path: Path
) -> None:
    for number in range(10):
        picture(f"d/{number}.png", size=(64, 64), colour="red")
    picture("d/wide.png", size=(300, 64), colour="blue")
    spec = job("d")
    index = build_index(spec)
    page = sheet(index, spec)
    colours = {colour for _, colour in page.getcolors(1 << 20) or []}
    assert {(255, 0, 0), (0, 0, 255)} <= colours
    assert save_strips(index, spec, tmp_path / "strips") == ["64x64.png", "80x48.png"]
    with Image.open(tmp_path / "strips" / "64x64.png") as strip:
        assert strip.width > 8 * 128
    (tmp_path / "d" / "wide.png").unlink()  # between the look and the sheet
    assert (90, 30, 30) in {colour for _, colour in sheet(index, spec).getcolors(1 << 20) or []}


def test_a_row_that_is_nested_too_deeply_is_passed_over(tmp_path: Path) -> None:
    table = tmp_path / "metadata.jsonl"
    table.write_text("[" * 100_000 + "\n" + '{"file_name": "a.png", "text": "a cat"}\n')
    found = list(records_of(table))
    assert found[0] == ("line 1", "is not a JSON object")
    assert found[1] == ("line 2", {"file_name": "a.png", "text": "a cat"})


def test_a_reason_knows_its_files() -> None:
    skipped = [
        Skipped(0, "a.png", "too small: 8x8 would be enlarged"),
        Skipped(0, "b.png", "too small for anything"),
        Skipped(0, "c.png", "too small (very)"),
        Skipped(0, "d.png", "too small"),
    ]
    files = {reason.text: reason.files for reason in reasons_of(DataIndex([], skipped))}
    assert files["too small"] == [
        [0, "a.png", "8x8 would be enlarged"],
        [0, "c.png", "(very)"],
        [0, "d.png", ""],
    ]
