"""What a folder offers when it is odd: metadata that repeats, misses or breaks; locked folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from engine.data.index.data_index import build_index
from engine.data.read.folders import read_folder
from engine.data.report import count_tokens, make_report
from jobs.errors import UserError
from jobs.spec.file.load import load_spec
from jobs.spec.values.datasets import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.job_spec import JobSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures without captions."""
    root = tmp_path / "d"
    root.mkdir()
    for number in range(1, 4):
        Image.new("RGB", (64, 64), (50 * number, 0, 0)).save(root / f"{number}.png")
    return root


def write_rows(root: Path, *rows: Any) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (root / "metadata.jsonl").write_bytes("\n".join(lines).encode(errors="surrogatepass"))


def job(folder: Path, **changes: Any) -> JobSpec:
    values = {
        "pretrained_model_name_or_path": "m",
        "dataset": str(folder),
        "resolution": 64,
        "cache_dir": str(folder.parent / "cache"),
    }
    return load_spec(None, values | changes)


def captions(folder: Path) -> dict[str, tuple[str, ...] | None]:
    source = read_folder(Dataset(path=str(folder)), videos=False)
    return {entry.name: entry.captions for entry in source.entries if not entry.problem}


def problems(folder: Path) -> dict[str, str]:
    source = read_folder(Dataset(path=str(folder)), videos=False)
    return {entry.name: entry.problem for entry in source.entries if entry.problem}


def test_several_rows_for_a_picture_are_several_captions(folder: Path) -> None:
    write_rows(
        folder,
        {"file_name": "1.png", "text": "one"},
        {"file_name": "./1.png", "text": "uno"},
        {"file_name": "2.png", "text": "two"},
    )
    assert captions(folder) == {"1.png": ("one", "uno"), "2.png": ("two",), "3.png": None}


def test_links_to_one_file_keep_their_own_captions(folder: Path) -> None:
    """As the snapshots of a hub cache have them."""
    (folder / "a.png").symlink_to(folder / "1.png")
    (folder / "b.png").symlink_to(folder / "1.png")
    write_rows(
        folder, {"file_name": "a.png", "text": "first"}, {"file_name": "b.png", "text": "second"}
    )
    found = captions(folder)
    assert (found["a.png"], found["b.png"], found["1.png"]) == (("first",), ("second",), None)


def test_rows_that_name_no_picture_of_the_folder_are_named(folder: Path) -> None:
    (folder / ".hidden").mkdir()
    Image.new("RGB", (64, 64)).save(folder / ".hidden" / "h.png")
    (folder / "bare").write_bytes((folder / "1.png").read_bytes())
    Image.new("RGB", (64, 64)).save(folder.parent / "outside.png")
    rows = [
        {"file_name": name, "text": "x"}
        for name in (
            "1.png",
            ".hidden/h.png",
            "bare",
            "../outside.png",
            "gone.png",
            "n" * 300 + ".png",
        )
    ]
    write_rows(folder, *rows, {"text": "no file"})
    found = problems(folder)
    assert set(found) == {f"metadata.jsonl line {number}" for number in range(2, 8)}
    assert found["metadata.jsonl line 2"] == "does not name an image here: .hidden/h.png"
    index = build_index(job(folder))
    report = make_report(job(folder), index, None)
    assert {one.text: one.count for one in report.reasons} == {
        "does not name an image here": 6,
        "no caption": 2,
    }


def test_separators_that_only_unicode_knows_do_not_end_a_line(folder: Path) -> None:
    write_rows(
        folder, {"file_name": "1.png", "text": "a\u2028b"}, {"file_name": "2.png", "text": "c\x85d"}
    )
    (folder / "metadata.csv").write_text("file_name,text\r\n3.png,e\u2028f\x0bg\r\n", newline="")
    assert problems(folder) == {}
    assert captions(folder) == {
        "1.png": ("a\u2028b",),
        "2.png": ("c\x85d",),
        "3.png": ("e\u2028f\x0bg",),
    }


def test_half_a_surrogate_pair_in_a_caption_ends_nothing(folder: Path, toy: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "a cat \\ud83d"}')
    (text,) = captions(folder)["1.png"] or ()
    assert text == "a cat ?"
    spec = job(folder, model_family="flux")
    assert count_tokens([text], spec, toy / "model") is not None


def test_a_broken_tokenizer_leaves_tokens_uncounted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer_2").mkdir(parents=True)
    (tmp_path / "model" / "tokenizer_2" / "tokenizer.json").write_text('{"version": "1.0"}')
    assert count_tokens(["x"], job(folder), tmp_path / "model") is None
    assert count_tokens(["x"], job(folder), tmp_path / "nowhere") is None


def test_a_folder_that_may_not_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "locked").mkdir()
    (folder / "1.txt").write_text("x")
    stock = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return stock(path)

    monkeypatch.setattr("os.scandir", scandir)
    assert problems(folder) == {"locked": "an unreadable folder (Permission denied)"}


def test_control_characters_in_names_are_shown_as_such(folder: Path) -> None:
    (folder / "1.png").rename(folder / "a\x1b[2J\n.png")
    assert "a\\x1b[2J\\n.png" in captions(folder)


def test_files_without_a_suffix_are_one_kind(folder: Path) -> None:
    for name in ("LICENSE", "NOTICE", "x1", "x2"):
        (folder / name).write_text("")
    source = read_folder(Dataset(path=str(folder)), videos=False)
    assert source.others == {"files without an extension": 4}


def test_sizes_that_no_context_group_can_share_are_refused(folder: Path) -> None:
    spec = job(folder)
    spec = spec.model_copy(update={"context_parallel_size": 7})
    with pytest.raises(UserError, match="context_parallel_size 7 divides no bucket size"):
        build_index(spec)


def test_a_folder_that_went_away_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match="no such dataset folder"):
        build_index(job(folder / "gone"))


def test_a_full_cache_disk_costs_a_look_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "1.txt").write_text("x")

    def full(*words: object, **names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.data.read.memo.write_atomic", full)
    assert len(build_index(job(folder)).samples) == 1


def test_a_refusal_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.data.index import data_index as module
    from engine.data.read.images import PictureError

    (folder / "1.txt").write_text("x")
    (folder / "2.txt").write_text("x")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    monkeypatch.setattr("engine.data.read.memo._SETTLED", -1.0)
    stock: Callable[[bytes], Any] = module.inspect_image

    def out_of_memory(content: bytes) -> Any:
        if content == (folder / "1.png").read_bytes():
            raise PictureError("needs more memory than available")
        return stock(content)

    monkeypatch.setattr(module, "inspect_image", out_of_memory)
    assert len(build_index(job(folder)).samples) == 1
    monkeypatch.setattr(module, "inspect_image", stock)
    assert len(build_index(job(folder)).samples) == 2
