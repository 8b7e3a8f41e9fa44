"""Copying a log that grows, and is cut, to standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.run import disk_space
from jobs.run.rundir import RunDir
from tui.cli.job.follow import _Tail

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_log_that_is_cut_while_it_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is printed twice, and what was cut before it could be read is told of."""
    monkeypatch.setattr(disk_space.find_cut, "__defaults__", (100,))
    run_dir = RunDir(tmp_path)
    run_dir.create()
    path = run_dir.rank_log(0)
    lines = [f"{n:04}\n" for n in range(2000)]
    tail = _Tail(path)
    tail.copy_new()
    with open(path, "a", buffering=1) as log:
        for begin in range(0, 1200, 400):  # cut thrice, each time when all was read
            log.write("".join(lines[begin : begin + 390]))
            tail.copy_new()
            log.write("".join(lines[begin + 390 : begin + 400]))
            disk_space.cap_logs(run_dir, limit=1000, kept=100)
            tail.copy_new()
        assert capsys.readouterr().out == "".join(lines[:1200])
        log.write("".join(lines[1200:]))
        disk_space.cap_logs(run_dir, limit=1000, kept=100)
        tail.copy_new()
    end = capsys.readouterr().out
    assert end.startswith("[... fsdp-tui cut ")
    assert end.endswith("".join(lines[-20:]))
    path.write_text("another launch\n")
    tail.copy_new()
    assert capsys.readouterr().out == "another launch\n"
