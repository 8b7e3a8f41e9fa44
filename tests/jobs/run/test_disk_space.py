"""Logs that cannot fill a disk, and a warning before a save would."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from jobs.run.disk_space import cap_logs, directory_size, space_warning
from jobs.run.rundir import MANIFEST, RunDir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_a_log_that_grew_too_large_keeps_its_end(run_dir: RunDir) -> None:
    path = run_dir.rank_log(0)
    path.write_text("".join(f"{n:04}\n" for n in range(1000)))  # 5000 bytes
    small = run_dir.rank_log(1)
    small.write_text("short")
    assert cap_logs(run_dir, limit=1000, kept=50) == [path]
    assert path.read_text() == ""
    assert path.with_name("rank0.log.1").read_text() == "".join(
        f"{n:04}\n" for n in range(990, 1000)
    )
    assert small.read_text() == "short"
    assert cap_logs(run_dir, limit=1000, kept=50) == []


def test_who_writes_a_log_goes_on_at_its_beginning(run_dir: RunDir) -> None:
    """Ranks hold their log open in append mode, and are not asked to open it anew."""
    path = run_dir.rank_log(0)
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"x" * 2000)
        cap_logs(run_dir, limit=1000, kept=10)
        writer.write(b"after\n")
    assert path.read_bytes() == b"after\n"


def test_the_second_cut_replaces_what_the_first_kept(run_dir: RunDir) -> None:
    path = run_dir.rank_log(0)
    for letter in "ab":
        path.write_text(letter * 2000)
        cap_logs(run_dir, limit=1000, kept=10)
    assert path.with_name("rank0.log.1").read_text() == "b" * 10


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
