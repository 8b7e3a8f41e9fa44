"""Tables of the `datasets` library: splits, columns, rows, and the copies that are kept of them."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from engine.data.index.data_index import build_index, read_content
from engine.data.read import tables
from engine.data.read.tables import RowError, Table, open_table, read_table, split_files
from engine.data.report import make_report
from jobs.errors import UserError
from jobs.spec.file.load import load_spec
from jobs.spec.values.datasets import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache that copies of tables go to; the library's own must stay as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    theirs = tmp_path / "theirs"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", theirs)
    yield tmp_path / "xdg" / "fsdp-tui" / "tables"
    assert not theirs.exists()


@pytest.fixture
def table(tmp_path: Path) -> Any:
    rows = {
        "image": [Image.new("RGB", (64, 48 + 8 * n), (50 * n, 0, 0)) for n in range(4)],
        "text": ["zero", "one", "", "three"],
    }
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": made, "test": made.select([3])}).save_to_disk(
        str(tmp_path / "splits")
    )
    (tmp_path / "hub" / "data").mkdir(parents=True)
    made.to_parquet(str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"))
    return made


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobSpec]:
    """A job on one directory below `tmp_path`."""

    def make(folder: str, **entry: Any) -> JobSpec:
        values = {
            "pretrained_model_name_or_path": "m",
            "resolution": 64,
            "max_upscale": 4,
            "datasets": [{"path": str(tmp_path / folder), **entry}],
            "cache_dir": str(tmp_path / "cache"),
        }
        return load_spec(None, values)

    return make


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., Path]:
    """Writes a parquet file `d/NAME` with a row for each text, and says where `d` is."""

    def write(name: str, *texts: str, **columns: list[Any]) -> Path:
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"image": [{"bytes": png(), "path": None}] * len(texts), "text": texts}
        pq.write_table(pa.table({**values, **columns}), path)
        return tmp_path / "d"

    return write


def png(colour: str = "red", size: tuple[int, int] = (64, 64)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def captions(root: Path, **entry: Any) -> list[tuple[str, ...] | None]:
    return [one.captions for one in read_table(Dataset(path=str(root), **entry)).entries]


def others(root: Path, **entry: Any) -> dict[str, int]:
    return dict(read_table(Dataset(path=str(root), **entry)).others)


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files written just now look old enough to be trusted."""
    monkeypatch.setattr("engine.data.read.memo._SETTLED", -1.0)


# -- splits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["saved", "splits", "hub"])
def test_tables_of_the_datasets_library_are_read_row_by_row(
    folder: str, table: Any, job: Callable[..., JobSpec]
) -> None:
    spec = job(folder)
    index = build_index(spec)
    assert [(s.name, s.captions, s.width, s.height) for s in index.samples] == [
        ("row 0", ("zero",), 64, 48),
        ("row 1", ("one",), 64, 56),
        ("row 3", ("three",), 64, 72),
    ]
    assert {one.name: one.why for one in index.skipped} == {"row 2": "no caption"}
    for sample in index.samples:
        assert hashlib.sha256(read_content(sample, spec)).hexdigest() == sample.digest
    assert make_report(spec, index, None).datasets[0].layout in ("arrow", "parquet")


def test_splits_and_columns_of_tables_are_asked_for_by_name(
    table: Any, job: Callable[..., JobSpec]
) -> None:
    test = build_index(job("splits", split="test"))
    assert [sample.captions for sample in test.samples] == [("three",)]
    for entry, message in (
        ({"split": "dev"}, "has no split dev; it has train, test"),
        ({"image_column": "photo"}, "has no column photo; it has image, text"),
        ({"caption_column": "alt"}, "has no column alt; it has image, text"),
    ):
        with pytest.raises(UserError, match=message):
            build_index(job("splits", **entry))


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("0000 0001", {"": 2}),
        ("a b", {"": 2}),
        ("data_1 data_2", {"": 2}),
        ("trainer tests-of-strength", {"": 2}),
        ("train test", {"train": 1, "test": 1}),
        ("train_1 train-2 Train3 val.1", {"train": 3, "val": 1}),
        ("data/train-00000-of-00002 data/train-00001-of-00002", {"train": 2}),
        ("train-00000-of-00001-0123456789abcdef", {"train": 1}),
        ("my_own-00000-of-00001 test-00000-of-00001", {"my_own": 1, "test": 1}),
        ("data/train/0000 data/train/0001 data/test/0000", {"train": 2, "test": 1}),
        ("default/partial-train/0000 default/validation/0000", {"train": 1, "validation": 1}),
        ("data/trains/0000 data/cars/0000", {"": 2}),
    ],
)
def test_files_belong_to_the_split_that_they_or_their_folders_name(
    names: str, splits: dict[str, int], tmp_path: Path
) -> None:
    for name in names.split():
        path = tmp_path / "test" / f"{name}.parquet"  # what is above the dataset does not matter
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = split_files(tmp_path / "test")
    assert {split: len(files) for split, files in found.items()} == splits


def test_files_of_no_split_are_one_table(parquet: Callable[..., Path]) -> None:
    root = parquet("0000.parquet", "a", "b")
    parquet("0001.parquet", "c")
    assert captions(root) == [("a",), ("b",), ("c",)]
    assert others(root) == {}
    assert captions(root, split="train") == captions(root)


def test_rows_beside_the_training_split_are_counted(parquet: Callable[..., Path]) -> None:
    root = parquet("train-00000-of-00001.parquet", "a")
    parquet("test-00000-of-00001.parquet", "b", "c")
    parquet("more.parquet", "d")
    (root / "dev.parquet").write_bytes(b"torn")
    assert captions(root) == [("a",)]
    assert others(root) == {
        "rows of the split test": 2,
        "rows of files of no split": 1,
        "damaged parquet files of the split dev": 1,
    }
    assert others(root, split="train") == {"rows of files of no split": 1}
    assert captions(root, split="test") == [("b",), ("c",)]


def test_the_splits_of_a_saved_table_are_counted_too(table: Any, tmp_path: Path) -> None:
    assert others(tmp_path / "splits") == {"rows of the split test": 1}
    assert others(tmp_path / "splits", split="test") == {}


def test_one_of_several_splits_must_be_named_unless_one_is_for_training(
    table: Any, parquet: Callable[..., Path], tmp_path: Path
) -> None:
    root = parquet("test.parquet", "a")
    assert captions(root) == [("a",)], "the only one"
    parquet("validation.parquet", "b")
    message = "has several splits but no train; set split to one of test, validation"
    with pytest.raises(UserError, match=message):
        Table(str(root), None, None)
    assert captions(root, split="validation") == [("b",)]
    two = datasets.DatasetDict({"test": table, "validation": table})
    two.save_to_disk(str(tmp_path / "two"))
    with pytest.raises(UserError, match=message):
        Table(str(tmp_path / "two"), None, None)


# -- the copy --------------------------------------------------------------------------------


def test_only_the_split_asked_for_is_copied_and_only_once(
    parquet: Callable[..., Path], cache: Path
) -> None:
    root = parquet("train.parquet", "a")
    (root / "test.parquet").write_bytes(b"torn, and never opened")
    assert len(Table(str(root), None, None)) == 1
    (copy,) = cache.glob("*.arrow")
    before = copy.stat().st_ino
    assert len(Table(str(root), None, None)) == 1
    assert copy.stat().st_ino == before
    parquet("train.parquet", "b", "c")
    assert len(Table(str(root), None, None)) == 2
    assert len(list(cache.glob("*.arrow"))) == 1, "the copy of what is no more went"
    assert not list(cache.glob("*.part"))


def test_a_table_is_opened_once_however_many_there_are(parquet: Callable[..., Path]) -> None:
    root = parquet("0000.parquet", "a")
    for number in range(20):
        shutil.copytree(root, f"{root}{number}")
    paths = [str(path) for path in root.parent.glob("d?*")]
    first = [id(open_table(path, None, None)) for path in paths]
    assert [id(open_table(path, None, None)) for path in paths] == first


def test_a_place_without_room_is_named(
    parquet: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = parquet("0000.parquet", "a")
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(root)._replace(free=10)
        patch.setattr(shutil, "disk_usage", lambda place: usage)
        with pytest.raises(UserError, match=r"cannot write a copy .*fsdp-tui/tables.* are free"):
            Table(str(root), None, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError, match=r"fsdp-tui/tables \(File too large\); free space"):
            Table(str(root), None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    cache.parent.rename(cache.parent.with_name("gone"))
    cache.parent.write_text("in the way")
    with pytest.raises(UserError, match=r"fsdp-tui/tables \(Not a directory\)"):
        Table(str(root), None, None)


def test_a_damaged_table_is_one_line(
    table: Any, parquet: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    for path in (tmp_path / "saved").glob("*.arrow"):
        path.write_bytes(path.read_bytes()[:100])
    root = parquet("a.parquet", "a")
    content = (root / "a.parquet").read_bytes()
    (root / "a.parquet").write_bytes(bytes(300) + content[300:])  # its footer is sound
    for path in (tmp_path / "saved", root):
        with pytest.raises(UserError, match="cannot be read") as refusal:
            Table(str(path), None, None)
        assert "\n" not in str(refusal.value)
        assert "tables" not in str(refusal.value), "the cache is not at fault"
    assert not list(cache.glob("*.part"))


def test_files_of_one_table_fit_together(parquet: Callable[..., Path]) -> None:
    root = parquet("a.parquet", "x", "y")
    parquet("b.parquet", "", "", text=pa.nulls(2))
    parquet("c.parquet", "z", image=[{"bytes": png(), "path": "z.png"}])
    assert captions(root) == [("x",), ("y",), None, None, ("z",)]
    assert Table(str(root), None, None).content(4) == png()
    parquet("d.parquet", "x", tags=["t"])
    with pytest.raises(UserError, match=r"has different columns .*image, text, tags instead of"):
        Table(str(root), None, None)


# -- rows ------------------------------------------------------------------------------------


def test_a_row_without_a_picture_is_a_matter_of_that_row(parquet: Callable[..., Path]) -> None:
    cells = [None, {"bytes": None, "path": None}, {"bytes": png(), "path": "x.png"}]
    root = parquet("a.parquet", "a", "b", "c", image=cells)
    found = Table(str(root), None, None)
    for row in (0, 1):
        with pytest.raises(RowError, match=r"^no image in this row$"):
            found.content(row)
    assert found.content(2) == png()
    words = Table(str(root), None, "text")
    assert words.stamp_of(0) == words.stamp
    with pytest.raises(RowError):
        words.content(0)
    parquet("a.parquet", "a", image=[png("blue")])
    assert Table(str(root), None, None).content(0) == png("blue"), "bytes are a file as well"


def test_captions_are_read_without_the_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = {"bytes": b"no picture", "path": None}
    picture = {"bytes": png(), "path": None}
    made = datasets.Dataset.from_dict(
        {
            "image": [picture] * 3,
            "mask": [damaged] * 3,
            "captions": [["a", "b"], [], None],
            "prompt": ["x", "y", ""],
            "long": ["1", "2", "3"],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "mask": datasets.Image(),
                "captions": [datasets.Value("string")],
                "prompt": datasets.Value("string"),
                "long": datasets.Value("string"),
            }
        ),
    )
    made.save_to_disk(str(tmp_path / "d"))
    monkeypatch.setattr(tables, "_CAPTIONS_READ", 2)
    assert captions(tmp_path / "d") == [("a", "b"), ("y",), None]
    assert captions(tmp_path / "d", caption_column="long") == [("1",), ("2",), ("3",)]
    assert Table(str(tmp_path / "d"), None, None).content(2) == png()
    made.select_columns(["image", "mask"]).save_to_disk(str(tmp_path / "without"))
    assert captions(tmp_path / "without") == [None] * 3


def test_rows_are_read_by_many_threads_at_once(parquet: Callable[..., Path]) -> None:
    pictures = [png(size=(8 + n % 40, 8 + n // 40)) for n in range(400)]
    cells = [{"bytes": one, "path": None} for one in pictures]
    root = parquet("a.parquet", *(f"{n}" for n in range(400)), image=cells)

    def read(row: int) -> tuple[bytes, str]:
        shared = open_table(str(root), None, None)
        return shared.content(row), shared.stamp_of(row)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, list(range(400)) * 5))
        assert len(set(pool.map(lambda n: id(open_table(str(root), None, None)), range(50)))) == 1
    assert [content for content, _ in found] == pictures * 5


# -- stamps ----------------------------------------------------------------------------------


def test_a_stamp_changes_with_the_files_and_is_empty_while_they_are_fresh(
    table: Any, parquet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.data.read.memo._SETTLED", 1e9)
    roots = [tmp_path / name for name in ("saved", "splits", "hub")] + [parquet("a.parquet", "a")]
    assert [Table(str(root), None, None).stamp for root in roots] == [""] * 4
    settle(monkeypatch)
    for root in roots:
        before = Table(str(root), None, None).stamp
        assert before
        assert Table(str(root), None, None).stamp == before
        assert Table(str(root), None, "text").stamp != before, "the rows are other pictures"
        file = next(path for path in root.rglob("*") if path.suffix in (".arrow", ".parquet"))
        status = file.stat()
        twin = file.with_suffix(".twin")
        twin.write_bytes(file.read_bytes())
        os.utime(twin, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` would
        twin.replace(file)
        assert Table(str(root), None, None).stamp != before


def test_a_row_that_names_a_file_depends_on_it(
    parquet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near, far = tmp_path / "d" / "near.bin", tmp_path / "far.png"
    cells = [
        {"bytes": png(), "path": "near.bin"},
        {"bytes": None, "path": "near.bin"},
        {"bytes": None, "path": str(far)},
        {"bytes": None, "path": "gone.png"},
        None,
    ]
    root = parquet("a.parquet", *"abcde", image=cells)
    near.write_bytes(png("blue"))
    far.write_bytes(png("green"))
    monkeypatch.setattr("engine.data.read.memo._SETTLED", 1e9)
    fresh = Table(str(root), None, None)
    assert [fresh.stamp_of(row) for row in (0, 1, 2, 4)] == [""] * 4
    settle(monkeypatch)
    found = Table(str(root), None, None)
    assert [found.content(row) for row in range(3)] == [png(), png("blue"), png("green")]
    assert found.stamp_of(0) == found.stamp_of(4) == found.stamp != ""
    first = found.stamp_of(1)
    assert len({found.stamp, first, found.stamp_of(2)}) == 3
    os.utime(near, ns=(1, 1))
    assert found.stamp_of(1) not in (first, found.stamp_of(0))
    with pytest.raises(FileNotFoundError):
        found.stamp_of(3)
    with pytest.raises(FileNotFoundError):
        found.content(3)


def test_a_row_without_a_picture_is_left_out_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pictures = [Image.new("RGB", (64, 64), "red"), None, Image.new("RGB", (64, 64), "blue")]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": pictures, "text": ["one", "two", "three"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "t"))
    spec = load_spec(
        None,
        {"pretrained_model_name_or_path": "m", "dataset": str(tmp_path / "t"), "resolution": 64},
    )
    index = build_index(spec)
    assert [sample.name for sample in index.samples] == ["row 0", "row 2"]
    assert [(one.name, one.why) for one in index.skipped] == [("row 1", "no image in this row")]
