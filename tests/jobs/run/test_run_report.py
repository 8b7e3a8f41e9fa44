"""What a run said about itself, read from its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.run.eventlog import EventLog, RunReport, read_report
from jobs.run.rundir import RunDir, event
from tui.text.tables import memory_line, memory_table, validation_line

if TYPE_CHECKING:
    from pathlib import Path


def written(tmp_path: Path, *events: tuple[str, dict[str, Any]]) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.events.write_text("".join(event(kind, **values) for kind, values in events))
    return run_dir


def test_a_run_that_has_not_begun_says_nothing(tmp_path: Path) -> None:
    assert read_report(RunDir(tmp_path)) == RunReport()


def test_strategy_sharding_and_memory(tmp_path: Path) -> None:
    run_dir = written(
        tmp_path,
        ("sharding", {"ranks": 2, "units": {"Block": 3}}),
        ("start", {"strategy": "fsdp2", "strategy_reason": "as asked", "step": 0}),
        ("memory", {"measure": "allocated", "peaks": {"load": [1, 2]}, "step": 1}),
        ("warning", {"message": "hot"}),
        ("memory", {"measure": "allocated", "peaks": {"load": [1, 2], "step": [3, 4]}, "step": 2}),
    )
    report = read_report(run_dir)
    assert (report.strategy, report.reason) == ("fsdp2", "as asked")
    assert report.sharding == {"ranks": 2, "units": {"Block": 3}}
    assert report.peaks == {"load": [1, 2], "step": [3, 4]}, "the latest counts"
    assert report.warnings == ("hot",)


def test_what_some_other_version_wrote_is_passed_over(tmp_path: Path) -> None:
    run_dir = written(
        tmp_path,
        ("memory", {"peaks": {"load": [1, None], "step": "much", "save": [], "sample": [5]}}),
    )
    assert RunReport.of(EventLog(run_dir.events).read_all()).peaks == {"sample": [5]}


def test_the_newest_validation_losses(tmp_path: Path) -> None:
    run_dir = written(
        tmp_path, *(("validation", {"step": step, "loss": 1 / step}) for step in range(1, 9))
    )
    report = read_report(run_dir)
    assert report.validations == tuple((step, 1 / step) for step in range(4, 9))
    line = validation_line(report.validations)
    assert line.startswith("0.1250 at step 8; 0.1429 at 7; ")
    assert line.endswith("0.2500 at 4")
    assert validation_line([(3, 0.5)]) == "0.5000 at step 3"


def test_the_line_for_people() -> None:
    line = memory_line({"load": [1 << 30, 2 << 30], "step": [3 << 20, 1]}, "rss")
    assert line.startswith("load 2.0 GiB · step 3")
    assert line.endswith("(resident, peak of any rank)")


def test_the_table_for_people_has_a_column_for_each_rank_or_the_extremes() -> None:
    two = memory_table({"load": [1 << 30, 2 << 30], "step": [3 << 30, 4 << 30]}).splitlines()
    assert [line.split()[0] for line in two] == ["phase", "load", "step"]
    assert "rank 1" in two[0]
    assert "2.0 GiB" in two[1]
    many = memory_table({"load": [n << 30 for n in range(1, 9)]}).splitlines()
    assert many[0].split() == ["phase", "least", "most"]
    assert "1.0 GiB" in many[1]
    assert "8.0 GiB" in many[1]
