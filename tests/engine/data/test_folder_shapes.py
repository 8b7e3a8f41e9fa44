"""What people's folders look like, each with exactly what is trained on and what is said."""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest
from PIL import Image

from engine.data.index.data_index import build_index
from engine.data.read.images import _formats
from engine.data.report import make_plan, make_report
from jobs.errors import SpecError, UserError
from jobs.preflight.data import check_dataset
from jobs.spec.file.load import load_spec
from jobs.spec.values import dataset_files
from jobs.spec.values.datasets import datasets_of, with_folder_repeats
from tests.support.images.encoded import hollow_png

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

NFC, NFD = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
SIDE: Final = 64


@cache
def image(width: int = SIDE, height: int = SIDE, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(content, kind)
    return content.getvalue()


def lines(*rows: Any) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def parquet(**columns: list[str]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    content = io.BytesIO()
    write_table(pa.table(columns), content)
    return content.getvalue()


# Files → what is trained on, by name with its captions; what is left out, and why; what else lies
# there. `IMAGE` stands for a picture, a text for its words, None for a broken link.
IMAGE: Final = "(an image)"
NO_CAPTION: Final = "no caption"
SHAPES: Final[list[tuple[str, dict[str, Any], dict[str, str], dict[str, str], dict[str, int]]]] = [
    ("pairs", {"a.png": IMAGE, "a.txt": "one"}, {"a.png": "one"}, {}, {}),
    ("captions in capitals", {"a.png": IMAGE, "a.TXT": "one"}, {"a.png": "one"}, {}, {}),
    (".caption", {"a.png": IMAGE, "a.caption": "one"}, {"a.png": "one"}, {}, {}),
    (".json", {"a.png": IMAGE, "a.json": '{"caption": "one"}'}, {"a.png": "one"}, {}, {}),
    (".json with a text", {"a.png": IMAGE, "a.json": '"one"'}, {"a.png": "one"}, {}, {}),
    (
        ".json with tags",
        {"a.png": IMAGE, "a.json": '{"tags": ["cat", "red"]}'},
        {"a.png": "cat, red"},
        {},
        {},
    ),
    (
        ".json that is damaged",
        {"a.png": IMAGE, "a.json": "{", "b.png": IMAGE, "b.txt": "two"},
        {"b.png": "two"},
        {"a.png": "caption is not valid JSON"},
        {},
    ),
    (
        ".json of a tool",
        {"a.png": IMAGE, "a.txt": "one", "settings.json": "{}"},
        {"a.png": "one"},
        {},
        {".json files": 1},
    ),
    (
        ".txt before .json",
        {"a.png": IMAGE, "a.txt": "one", "a.json": '{"caption": "two"}'},
        {"a.png": "one"},
        {},
        {},
    ),
    (
        "nested folders",
        {"x/y/a.png": IMAGE, "x/y/a.txt": "one", "b.jpg": IMAGE, "b.txt": "two"},
        {"b.jpg": "two", "x/y/a.png": "one"},
        {},
        {},
    ),
    (
        "hidden files and folders",
        {"a.png": IMAGE, "a.txt": "one", "._a.png": "x", ".thumbs/a.png": IMAGE, ".DS_Store": "x"},
        {"a.png": "one"},
        {},
        {},
    ),
    (
        "metadata.jsonl",
        {"a.png": IMAGE, "metadata.jsonl": lines({"file_name": "a.png", "text": "one"})},
        {"a.png": "one"},
        {},
        {},
    ),
    (
        "metadata.csv",
        {"x/a.png": IMAGE, "metadata.csv": "file_name,caption\nx/a.png,one\n"},
        {"x/a.png": "one"},
        {},
        {},
    ),
    (
        "metadata.parquet",
        {"a.png": IMAGE, "metadata.parquet": {"file_name": ["a.png"], "text": ["one"]}},
        {"a.png": "one"},
        {},
        {},
    ),
    (
        "metadata that names what is gone",
        {
            "a.png": IMAGE,
            "metadata.jsonl": lines(
                {"file_name": "a.png", "text": "one"}, {"file_name": "b.png", "text": "two"}
            ),
        },
        {"a.png": "one"},
        {"metadata.jsonl line 2": "does not name an image here: b.png"},
        {},
    ),
    (
        "kohya's meta_cap.json",
        {
            "a.png": IMAGE,
            "b.png": IMAGE,
            "c.png": IMAGE,
            "meta_cap.json": json.dumps(
                {
                    "a": {"caption": "one"},
                    "/elsewhere/b.png": {"caption": "two", "tags": "x"},
                    "c.png": {"tags": "three, 3"},
                }
            ),
        },
        {"a.png": "one", "b.png": "two", "c.png": "three, 3"},
        {},
        {},
    ),
    (
        "accents of macOS",
        {
            f"{NFD}.png": IMAGE,
            f"{NFC}.txt": "one",
            f"x{NFC}.png": IMAGE,
            f"x{NFD}.txt": "two",
            f"y{NFD}.png": IMAGE,
            "metadata.jsonl": lines({"file_name": f"y{NFC}.png", "text": "three"}),
        },
        {f"{NFD}.png": "one", f"x{NFC}.png": "two", f"y{NFD}.png": "three"},
        {},
        {},
    ),
    (
        "names with spaces and other letters",
        {"a b (1).png": IMAGE, "a b (1).txt": "one", "猫.png": IMAGE, "猫.txt": "two"},
        {"a b (1).png": "one", "猫.png": "two"},
        {},
        {},
    ),
    (
        "two suffixes",
        {"a.b.png": IMAGE, "a.b.txt": "one"},
        {"a.b.png": "one"},
        {},
        {},
    ),
    (
        "captions without an image",
        {"a.png": IMAGE, "a.txt": "one", "b.txt": "two"},
        {"a.png": "one"},
        {},
        {"captions without an image": 1},
    ),
    (
        "images without a caption",
        {"a.png": IMAGE, "a.txt": "one", "b.png": IMAGE},
        {"a.png": "one"},
        {"b.png": NO_CAPTION},
        {},
    ),
    (
        "empty captions",
        {"a.png": IMAGE, "a.txt": "one", "b.png": IMAGE, "b.txt": " \n"},
        {"a.png": "one"},
        {"b.png": NO_CAPTION},
        {},
    ),
    (
        "links",
        {"a.png": IMAGE, "a.txt": "one", "b.png": None, "b.txt": "two"},
        {"a.png": "one"},
        {"b.png": "a broken link"},
        {},
    ),
    (
        "damaged files",
        {
            "a.png": IMAGE,
            "a.txt": "one",
            "b.png": "",
            "b.txt": "x",
            "c.jpg": "not an image",
            "c.txt": "x",
            "d.png": "version https://git-lfs.github.com/spec/v1",
            "d.txt": "x",
        },
        {"a.png": "one"},
        {
            "b.png": "empty file",
            "c.jpg": "not an image",
            "d.png": "a Git LFS pointer, not the image itself",
        },
        {},
    ),
    (
        "a video among images",
        {"a.png": IMAGE, "a.txt": "one", "b.mp4": "x", "b.txt": "two"},
        {"a.png": "one"},
        {"b.mp4": "a video, but the model trains on images"},
        {},
    ),
    (
        "phones and editors",
        {"a.png": IMAGE, "a.txt": "one", "b.heic": "x", "c.jxl": "x", "d.psd": "x"},
        {"a.png": "one"},
        {
            "b.heic": ".heic images need a package that is not installed; pip install pillow-heif",
            "c.jxl": ".jxl images need a package that is not installed; "
            "pip install pillow-jxl-plugin",
            "d.psd": ".psd images cannot be read",
        },
        {},
    ),
    (
        "an image of 200 megapixels",
        {"a.png": IMAGE, "a.txt": "one", "b.png": hollow_png(20_000, 10_000), "b.txt": "two"},
        {"a.png": "one"},
        {"b.png": "more than 178 megapixels; downscale it"},
        {},
    ),
    (
        "a panorama",
        {"a.png": IMAGE, "a.txt": "one", "b.png": (832, 64), "b.txt": "two"},
        {"a.png": "one"},
        {"b.png": "too long or too wide: 832x64 is 13.0:1 (max_aspect_ratio 5)"},
        {},
    ),
    (
        "thumbnails",
        {"a.png": IMAGE, "a.txt": "one", "b.png": (16, 16), "b.txt": "two"},
        {"a.png": "one"},
        {"b.png": "too small: 16x16 would be upscaled 4.0 times (max_upscale 2)"},
        {},
    ),
    (
        "archives and notes",
        {"a.png": IMAGE, "a.txt": "one", "more.zip": "x", "README": "x", "b.md": "x"},
        {"a.png": "one"},
        {},
        {".zip files": 1, "files without an extension": 1, ".md files": 1},
    ),
    (
        "a folder called like an image",
        {"a.png": IMAGE, "a.txt": "one", "b.png/c.png": IMAGE, "b.png/c.txt": "two"},
        {"a.png": "one", "b.png/c.png": "two"},
        {"b.png": "a folder"},
        {},
    ),
    (
        "wrong suffixes",
        {"a.png": "(a jpeg)", "a.txt": "one"},
        {"a.png": "one"},
        {},
        {},
    ),
]


def write(root: Path, files: dict[str, Any]) -> None:
    root.mkdir(exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case None:
                path.symlink_to(root / "nowhere")
            case "(an image)":
                path.write_bytes(image())
            case "(a jpeg)":
                path.write_bytes(image(kind="JPEG"))
            case tuple():
                path.write_bytes(image(*content))
            case bytes():
                path.write_bytes(content)
            case dict():
                path.write_bytes(parquet(**content))
            case _:
                path.write_text(content, encoding="utf-8")


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobSpec]:
    def make(**changes: Any) -> JobSpec:
        values = {
            "pretrained_model_name_or_path": "m",
            "dataset": str(tmp_path / "d"),
            "resolution": SIDE,
            "cache_dir": str(tmp_path / "cache"),
        }
        return load_spec(None, values | changes)

    return make


@pytest.mark.parametrize(
    ("files", "trained", "skipped", "others"),
    [shape[1:] for shape in SHAPES],
    ids=[shape[0] for shape in SHAPES],
)
def test_a_folder_s_report(
    tmp_path: Path,
    job: Callable[..., JobSpec],
    files: dict[str, Any],
    trained: dict[str, str],
    skipped: dict[str, str],
    others: dict[str, int],
) -> None:
    if any(name.endswith((".heic", ".jxl")) for name in files) and not NO_HELPERS:
        pytest.skip("the packages are installed")
    write(tmp_path / "d", files)
    spec = job()
    assert check_dataset(spec) >= len(trained)
    index = build_index(spec)
    assert {os.fspath(s.name): "".join(s.captions) for s in index.samples} == trained
    assert {one.name: one.why for one in index.skipped} == skipped
    assert index.others == [others]
    report = make_report(spec, index, None)
    assert report.samples == len(trained)
    assert sum(found.count for found in report.reasons) == len(skipped)


NO_HELPERS: Final = not dataset_files.READ_WITH_HELP & dataset_files.PICTURE_SUFFIXES


def test_panoramas_are_trained_on_when_the_job_asks_for_them(
    tmp_path: Path, job: Callable[..., JobSpec]
) -> None:
    write(tmp_path / "d", {"a.png": (832, 64), "a.txt": "one"})
    with pytest.raises(SpecError, match=r"no usable image in .*a\.png: too long or too wide"):
        check_dataset(job())
    spec = job(max_aspect_ratio=0)
    check_dataset(spec)
    assert len(build_index(spec).samples) == 1


UNUSABLE: Final[list[tuple[dict[str, Any], str]]] = [
    ({"a.png": (8, 8), "a.txt": "x"}, "a.png: too small: 8x8 would be upscaled 8.0 times"),
    ({"a.png": "", "a.txt": "x"}, "a.png: empty file"),
    ({"a.png": None, "a.txt": "x"}, "a.png: a broken link"),
    ({"a.png": "<html>", "a.txt": "x"}, "a.png: not an image"),
    ({"a.png": IMAGE, "b.png": "", "b.txt": "x"}, "a.png: no caption"),
    ({"a.png": hollow_png(20_000, 10_000), "a.txt": "x"}, "a.png: more than 178 megapixels"),
    ({"a.heic": "x", "a.txt": "x"}, "a.heic: .heic images need a package"),
    ({"a.mp4": "x", "a.txt": "x"}, "a.mp4: the model trains on images"),
]


@pytest.mark.parametrize(("files", "why"), UNUSABLE, ids=[why for _, why in UNUSABLE])
def test_unusable_data_is_refused_before_the_job_is_queued(
    tmp_path: Path, job: Callable[..., JobSpec], files: dict[str, Any], why: str
) -> None:
    if any(name.endswith(".heic") for name in files) and not NO_HELPERS:
        pytest.skip("the packages are installed")
    write(tmp_path / "d", files)
    with pytest.raises(SpecError) as caught:
        check_dataset(job())
    assert why in str(caught.value)
    with pytest.raises(UserError):
        build_index(job())


def test_folders_of_kohya_s_scripts_say_how_often_their_images_repeat(
    tmp_path: Path, job: Callable[..., JobSpec]
) -> None:
    files = {"10_cat person/a.png": IMAGE, "10_cat person/a.txt": "one"}
    files |= {
        "2_dog/b.png": IMAGE,
        "2_dog/b.txt": "two",
        "2_dog/c.png": (65, 65),
        "2_dog/c.txt": "3",
    }
    write(tmp_path / "d", files)
    spec, notes = with_folder_repeats(job())
    assert notes == [
        "10_cat person: 10 repeats, as the folder's name says",
        "2_dog: 2 repeats, as the folder's name says",
    ]
    assert check_dataset(spec) == 3
    plan = make_plan(spec, build_index(spec))
    assert [share.draws for share in plan.shares] == [10, 4]
    assert with_folder_repeats(spec) == (spec, []), "once"


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"b.png": IMAGE}, "b.png"),
        ({"more/b.png": IMAGE}, "more"),
        ({"0_none/b.png": IMAGE, "b.png": IMAGE}, "0_none and 1 more"),
        ({"notes.txt": "x"}, ""),
    ],
)
def test_what_is_beside_kohya_s_folders_is_left_out_and_named(
    tmp_path: Path, job: Callable[..., JobSpec], others: dict[str, Any], named: str
) -> None:
    write(tmp_path / "d", {"10_cat/a.png": IMAGE, "10_cat/a.txt": "x"} | others)
    spec, notes = with_folder_repeats(job())
    assert [dataset.repeats for dataset in datasets_of(spec)] == [10]
    assert [f"not used: {named};" in note for note in notes[1:]] == [True] * bool(named)


@pytest.mark.parametrize("name", ["2_dog", "2_dog_on grass"])
def test_the_name_of_kohya_s_folder_is_the_caption_of_images_without_one(
    tmp_path: Path, job: Callable[..., JobSpec], name: str
) -> None:
    files = {f"{name}/a.png": IMAGE, f"{name}/b.png": (65, 65), f"{name}/b.txt": "own"}
    write(tmp_path / "d", files)
    spec, _ = with_folder_repeats(job())
    assert check_dataset(spec) == 2
    assert [sample.captions for sample in build_index(spec).samples] == [(name[2:],), ("own",)]
    entry = {"path": str(tmp_path / "d"), "caption": "mine"}
    own, _ = with_folder_repeats(job(dataset=None, datasets=[entry]))
    assert build_index(own).samples[0].captions == ("mine",)


@pytest.mark.parametrize(
    "files",
    [
        {"cat_10/a.png": IMAGE},
        {"0_cat/a.png": IMAGE},
    ],
    ids=lambda files: " ".join(files),
)
def test_other_folders_repeat_nothing(
    tmp_path: Path, job: Callable[..., JobSpec], files: dict[str, Any]
) -> None:
    write(tmp_path / "d", files)
    assert with_folder_repeats(job()) == (job(), [])


def test_archives_of_webdataset_are_unpacked_once_and_stay_in_their_folder(
    tmp_path: Path, job: Callable[..., JobSpec]
) -> None:
    root = tmp_path / "d"
    root.mkdir()
    members = {
        "0001.png": image(),
        "0001.txt": b"one",
        "x/0002.png": image(),
        "x/0002.json": b'{"caption": "two"}',
        "0003.cls": b"7",
        "../0004.png": image(),
        "/0005.png": image(),
    }
    with tarfile.open(root / "shard-0.tar", "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("0006.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with lzma.open(root / "bomb.tar", "wb") as bomb:  # 2 GiB of a file that is not even wanted
        info = tarfile.TarInfo("zeros.bin")
        info.size = 2 << 30
        bomb.write(info.tobuf())
        bomb.write(bytes(1 << 20))
    (root / "shard-1.tar").write_bytes(b"not a tar")
    assert check_dataset(job()) == 0
    index = build_index(job())
    assert {s.name: s.captions for s in index.samples} == {
        "shard-0.tar/0001.png": ("one",),
        "shard-0.tar/x/0002.png": ("two",),
    }
    assert [(skipped.name, skipped.why) for skipped in index.skipped] == [
        ("bomb.tar", "a damaged archive (its files take more than 100 times its own size)"),
        ("shard-1.tar", index.skipped[1].why),
    ]
    assert index.skipped[1].why.startswith("a damaged archive")
    unpacked = list((tmp_path / "cache" / "webdataset").iterdir())
    assert len(unpacked) == 1
    assert not list(tmp_path.rglob("000[456].png"))
    before = unpacked[0].stat().st_mtime_ns
    assert len(build_index(job()).samples) == 2
    assert unpacked[0].stat().st_mtime_ns == before
    assert make_report(job(), index, None).datasets[0].layout == "webdataset"


@pytest.mark.skipif("HEIF" not in _formats(), reason="needs pillow-heif")
def test_heic_is_read_with_its_package(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    write(tmp_path / "d", {"a.heic": image(kind="HEIF"), "a.txt": "one"})
    assert check_dataset(job()) == 1
    assert len(build_index(job()).samples) == 1
