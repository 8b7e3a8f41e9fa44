"""Datasets of a job: spelling, layouts, what is refused, and what follows for text encoders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import SpecError
from jobs.preflight.data import check_dataset
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.cascade import find_overruled, settle
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.dataset_files import list_files
from jobs.spec.values.datasets import Dataset, datasets_of, find_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


def job(**values: Any) -> JobSpec:
    return load_spec(None, {"pretrained_model_name_or_path": "m", "dataset": "d", **values})


def several(*entries: Any, **values: Any) -> JobSpec:
    return load_spec(
        None, {"pretrained_model_name_or_path": "m", "datasets": list(entries), **values}
    )


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a", [("a", 1)]),
        ("a, b", [("a", 1), ("b", 1)]),
        ("a x3, b x10", [("a", 3), ("b", 10)]),
        ("my pictures x2", [("my pictures", 2)]),
        ("matrix", [("matrix", 1)]),
    ],
)
def test_datasets_may_be_written_in_a_line(text: str, entries: list[tuple[str, int]]) -> None:
    spec = load_spec(None, {"pretrained_model_name_or_path": "m", "datasets": text})
    assert [(d.path, d.repeats) for d in datasets_of(spec)] == entries


def test_one_dataset_is_a_list_of_one() -> None:
    assert datasets_of(job(dataset="d")) == [Dataset(path="d")]


def test_several_datasets_come_back_from_yaml_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "job.yaml").write_text(
        "pretrained_model_name_or_path: m\n"
        "datasets:\n"
        "  - path: cats\n"
        "    repeats: 3\n"
        "    trigger-word: sks cat\n"
        "  - dogs x2\n"
    )
    spec = load_spec(tmp_path / "job.yaml")
    cats, dogs = datasets_of(spec)
    assert (cats.path, cats.repeats, cats.trigger_word) == (str(tmp_path / "cats"), 3, "sks cat")
    assert (dogs.path, dogs.repeats) == ("dogs", 2)
    (tmp_path / "again.yaml").write_text(dump_spec(spec))
    assert load_spec(tmp_path / "again.yaml") == spec


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"path": "a", "repeat": 2}], 'entry 1 has an unknown key "repeat" (did you mean'),
        ([{"path": "a"}, {"path": "b", "repeats": 0}], "entry 2 repeats: input should be greater"),
        ([{"repeats": 2}], "entry 1 path: field required"),
        ([{"path": "a", "weight": 1}, "b"], "b has no weight but others do"),
        ([{"path": "a", "weight": 1, "repeats": 2}], "a has a weight and repeats"),
        (["a", "b", "a"], "names a twice; use repeats"),
        ([3], "entry 1"),
    ],
)
def test_wrong_datasets_are_refused_by_entry(entries: list[Any], message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        several(*entries)
    assert message in str(refusal.value)


def test_different_splits_of_one_directory_are_different_datasets() -> None:
    spec = several({"path": "a", "split": "train"}, {"path": "a", "split": "test"})
    assert [d.split for d in datasets_of(spec)] == ["train", "test"]


def test_layouts_are_told_apart(tmp_path: Path) -> None:
    for name, files in {
        "folder": ["a.png", "a.txt"],
        "imagefolder": ["train/metadata.jsonl", "train/0.parquet"],
        "saved": ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"],
        "splits": ["dataset_dict.json", "train/state.json"],
        "hub": ["README.md", "data/train-00000-of-00001.parquet"],
        "nothing": ["notes.md"],
    }.items():
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("")
    assert {path.name: find_layout(path) for path in tmp_path.iterdir()} == {
        "folder": "folder",
        "imagefolder": "folder",
        "saved": "arrow",
        "splits": "arrow",
        "hub": "parquet",
        "nothing": "folder",
    }


def test_every_file_of_a_folder_is_sorted_and_counted(tmp_path: Path) -> None:
    for name in (
        "b.PNG",
        "a.jpg",
        "a.txt",
        "clip.mp4",
        "phone.heic",
        "metadata.csv",
        "notes.md",
        ".hidden.png",
        ".cache/x.png",
        "deep/c.webp",
        "deep/LICENSE",
        "lost.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "deep" / "up").symlink_to(tmp_path)  # must not go round for ever
    found = list_files(tmp_path)
    assert [p.name for p in found.pictures] == ["a.jpg", "b.PNG", "c.webp"]
    assert [p.name for p in found.videos] == ["clip.mp4"]
    assert [p.name for p in found.foreign] == ["phone.heic"]
    assert [p.name for p in found.metadata] == ["metadata.csv"]
    assert [p.name for p in found.lonely] == ["lost.txt"]
    assert [p.name for p in found.folders] == ["folder.png"]
    assert found.others == {".md files": 1, "files without an extension": 1}


def test_each_dataset_is_looked_at_before_the_job_starts(
    make_data: Callable[..., Path], tmp_path: Path
) -> None:
    one, two = make_data("one", pictures=2), make_data("two", pictures=3)
    assert check_dataset(several(str(one), str(two))) == 5
    with pytest.raises(SpecError, match="no such dataset folder"):
        check_dataset(several(str(one), str(tmp_path / "three")))


def test_pictures_without_captions_need_a_word_of_the_person(
    make_data: Callable[..., Path],
) -> None:
    silent = make_data(captions=False)
    with pytest.raises(SpecError, match="missing_captions: empty"):
        check_dataset(job(dataset=str(silent)))
    assert check_dataset(job(dataset=str(silent), missing_captions="empty")) == 3
    (silent / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": "x"}))
    assert check_dataset(job(dataset=str(silent))) == 3


def test_a_folder_of_unreadable_kinds_names_one(tmp_path: Path) -> None:
    (tmp_path / "IMG_1.HEIC").write_text("")
    with pytest.raises(SpecError, match=r"0 images.*IMG_1\.HEIC"):
        check_dataset(job(dataset=str(tmp_path)))


@pytest.mark.parametrize(
    ("ranks", "cache", "unload", "settled", "overruled"),
    [
        (1, None, None, (True, True), []),
        (1, True, None, (True, True), []),
        (1, False, None, (False, False), []),
        (1, None, False, (True, False), []),
        (1, True, False, (True, False), []),
        (1, False, False, (False, False), []),
        (1, None, True, (True, True), []),
        (1, False, True, (True, True), ["cache_text_embeddings"]),
        (2, None, None, (True, True), []),
        (2, False, None, (True, True), ["cache_text_embeddings"]),
        (2, None, False, (True, True), ["unload_text_encoder"]),
        (2, False, False, (True, True), ["cache_text_embeddings", "unload_text_encoder"]),
    ],
)
def test_several_ranks_and_freed_encoders_turn_caching_on(
    ranks: int,
    cache: bool | None,
    unload: bool | None,
    settled: tuple[bool, bool],
    overruled: list[str],
) -> None:
    spec = job(
        num_processes=ranks, cache_text_embeddings=cache, unload_text_encoder=unload, device="cpu"
    )
    after = settle(spec)
    assert (after.cache_text_embeddings, after.unload_text_encoder) == settled
    assert settle(after) == after
    assert [sentence.partition(":")[0] for sentence in find_overruled(spec)] == overruled
    assert find_overruled(after) == []
    assert set(find_overruled(spec)) <= set(find_warnings(spec))
