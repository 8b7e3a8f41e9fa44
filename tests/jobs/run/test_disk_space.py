"""Logs that cannot fill a disk, and a warning before a save would."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from jobs.run.disk_space import cap_logs, directory_size, find_cut, space_warning
from jobs.run.rundir import MANIFEST, RunDir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def lines(first: int, last: int) -> str:
    return "".join(f"{n:04}\n" for n in range(first, last + 1))


def cut_line(missing: int) -> str:
    return f"[... fsdp-tui cut {missing} bytes here: the log grew too large ...]\n"


def test_a_log_that_grew_too_large_keeps_both_ends(run_dir: RunDir) -> None:
    path = run_dir.rank_log(0)
    path.write_text(lines(0, 999))  # 5000 bytes
    small = run_dir.rank_log(1)
    small.write_text("short")
    assert cap_logs(run_dir, limit=1000, kept=52) == [path]
    # 52 bytes are cut at line ends: the head loses half a line, and so does the end.
    assert path.read_text() == lines(0, 9) + cut_line(4900) + lines(990, 999)
    assert small.read_text() == "short"
    assert cap_logs(run_dir, limit=1000, kept=52) == []


def test_who_writes_a_log_goes_on_behind_its_end_and_cuts_add_up(run_dir: RunDir) -> None:
    """Ranks hold their log open in append mode, and are not asked to open it again."""
    path = run_dir.rank_log(0)
    with open(path, "a", buffering=1) as writer:
        writer.write(lines(0, 399))
        cap_logs(run_dir, limit=1000, kept=50)
        writer.write(lines(400, 799))
        cap_logs(run_dir, limit=1000, kept=50)
        writer.write("after\n")
    assert path.read_text() == lines(0, 9) + cut_line(3900) + lines(790, 799) + "after\n"


def test_a_log_of_one_endless_line_is_cut_too(run_dir: RunDir) -> None:
    path = run_dir.rank_log(0)
    path.write_text("ab" * 1000)
    cap_logs(run_dir, limit=1000, kept=10)
    assert path.read_text() == "ab" * 5 + cut_line(1980) + "ab" * 5


@pytest.mark.parametrize("read", [120, 1500, 2000])
def test_who_follows_a_log_finds_its_place_after_a_cut(run_dir: RunDir, read: int) -> None:
    """At the head, in what is cut out, and in the end; after a second cut as after the first."""
    path, before = run_dir.rank_log(0), None
    for _ in range(2):
        with open(path, "a") as file:
            file.write(lines(0, 399)[: 2000 - path.stat().st_size if path.exists() else 2000])
        place = path.read_bytes()[read:]
        cap_logs(run_dir, limit=1000, kept=100)
        with open(path, "rb") as file:
            cut = find_cut(file.fileno(), 100)
            assert cut is not None
            now = path.read_bytes()[cut.now_at(read, before) :]
        before = cut
        expected = place if len(place) <= 100 else path.read_bytes()[cut.start :]
        assert now == expected


def checkpoint(run_dir: RunDir, size: int) -> None:
    path = run_dir.checkpoint(5)
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("{}")
    with open(path / "weights", "wb") as file:
        file.truncate(size)


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    usage = shutil._ntuple_diskusage(total=1 << 50, used=0, free=count)  # type: ignore[attr-defined]
    monkeypatch.setattr("jobs.run.disk_space.shutil.disk_usage", lambda _: usage)


@pytest.mark.parametrize(
    ("size", "room", "warned"),
    [
        (0, 10 << 30, False),
        (0, 100 << 20, True),
        (8 << 30, 20 << 30, False),
        (8 << 30, 9 << 30, True),
    ],
)
def test_a_warning_comes_before_the_next_save_would_fail(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, size: int, room: int, warned: bool
) -> None:
    if size:
        checkpoint(run_dir, size)
    free(monkeypatch, room)
    warning = space_warning(run_dir)
    assert (warning is not None) == warned
    assert warning is None or f"only {room >> 20} MiB free" in warning


def test_all_files_of_a_directory_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 5000)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert 5000 <= directory_size(tmp_path) < 5000 + 64_000
    assert directory_size(tmp_path / "nowhere") == 0
