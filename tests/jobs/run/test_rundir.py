"""The run directory: whole files, requests, ranks, and only complete checkpoints."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from typing import TYPE_CHECKING

import pytest

from jobs.run.rundir import MANIFEST, REQUESTS, RankStatus, RunDir, event, read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "1-t")
    made.create()
    return made


def status(rank: int = 0, **changes: object) -> RankStatus:
    values: dict[str, object] = {
        "rank": rank,
        "pid": 10 + rank,
        "started": 1.5,
        "host": "h",
        "device": "cpu",
        "phase": "train",
        "step": 3,
        "heartbeat": 2.0,
        "progressed": 2.0,
    }
    return RankStatus(**values | changes)  # type: ignore[arg-type]


def test_naming_a_run_directory_touches_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "x")
    assert run_dir.rank_statuses() == []
    assert run_dir.rank_errors() == []
    assert run_dir.latest_checkpoint() is None
    assert not run_dir.requested("stop")
    assert not run_dir.root.exists()


def test_it_is_nobody_elses_to_read(run_dir: RunDir) -> None:
    for path in (run_dir.root, run_dir.control, run_dir.ranks, run_dir.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    run_dir.create()  # again: nothing to complain about


def test_the_paths_of_the_contract(run_dir: RunDir) -> None:
    root = run_dir.root
    assert run_dir.job_file == root / "job.yaml"
    assert run_dir.launch_file == root / "launch.json"
    assert run_dir.events == root / "events.jsonl"
    assert run_dir.rank_file(3) == root / "ranks" / "3.json"
    assert run_dir.rank_log(3) == root / "logs" / "rank3.log"
    assert run_dir.launcher_log == root / "logs" / "launcher.log"
    assert run_dir.supervisor_log == root / "logs" / "supervisor.log"
    assert run_dir.checkpoint(7) == root / "checkpoints" / "step-7"
    assert (run_dir.samples, run_dir.export) == (root / "samples", root / "export")


# -- whole files ---------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old", durable=durable)
    with open(path) as before:
        write_atomic(path, "né w", durable=durable)
        assert before.read() == "old", "who has it open keeps the old text"
    assert path.read_text(encoding="utf-8") == "né w"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_readers_never_see_a_part_whoever_writes(tmp_path: Path) -> None:
    """A rank writes its status from two threads: at a new phase, and once a second."""
    path = tmp_path / "0.json"
    texts = [json.dumps({"who": n, "fill": str(n) * 20_000}) for n in range(3)]
    write_atomic(path, texts[0])
    problems: list[BaseException] = []
    ended = threading.Event()

    def write(text: str) -> None:
        try:
            for _ in range(150):
                write_atomic(path, text)
        except BaseException as error:
            problems.append(error)

    def look() -> None:
        while not ended.is_set():
            if path.read_text() not in texts:
                problems.append(AssertionError("a part was seen"))
                return

    reader = threading.Thread(target=look)
    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert problems == []
    assert os.listdir(tmp_path) == ["0.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '{"a": 1}{'])
def test_what_is_no_json_object_reads_as_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert read_json(path) is None


def test_bytes_that_are_no_text_read_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert read_json(path) is None
    assert read_json(tmp_path) is None
    assert read_json(tmp_path / "gone") is None


# -- requests ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_a_file_that_goes_away_when_honoured(run_dir: RunDir, name: str) -> None:
    assert not run_dir.requested(name)
    run_dir.request(name)
    run_dir.request(name)
    assert run_dir.requested(name)
    assert os.listdir(run_dir.control) == [name]
    run_dir.clear_request(name)
    run_dir.clear_request(name)
    assert not run_dir.requested(name)


def test_an_unknown_request_is_a_mistake_of_ours(run_dir: RunDir) -> None:
    with pytest.raises(ValueError, match="unknown request"):
        run_dir.request("../stop")


# -- ranks ---------------------------------------------------------------------------------


def test_what_a_rank_writes_is_what_a_reader_gets(run_dir: RunDir) -> None:
    told = [status(11, rss=5), status(2, allocated=7, device_uuid="GPU-a")]
    for one in told:
        write_atomic(run_dir.rank_file(one.rank), one.to_json())
    assert run_dir.rank_statuses() == [told[1], told[0]], "by rank, 2 before 11"


def test_rank_files_that_cannot_be_used_are_left_out(run_dir: RunDir) -> None:
    write_atomic(run_dir.rank_file(0), status(0).to_json())
    run_dir.rank_file(1).write_text('{"rank": 1, "pid"')
    run_dir.rank_file(2).write_text('{"rank": 2}')
    newer = json.loads(status(3).to_json()) | {"field_of_tomorrow": 1}
    run_dir.rank_file(3).write_text(json.dumps(newer))
    run_dir.rank_error(4).write_text('{"rank": 4}')
    assert [s.rank for s in run_dir.rank_statuses()] == [0, 3]


def test_errors_come_the_earliest_first(run_dir: RunDir) -> None:
    run_dir.rank_error(0).write_text(json.dumps({"rank": 0, "t": 20}))
    run_dir.rank_error(1).write_text(json.dumps({"rank": 1, "t": 10}))
    run_dir.rank_error(2).write_text("{torn")
    assert [e["rank"] for e in run_dir.rank_errors()] == [1, 0]


def test_a_new_attempt_forgets_only_what_concerned_the_last(run_dir: RunDir) -> None:
    run_dir.request("stop")
    write_atomic(run_dir.rank_file(0), status(0).to_json())
    run_dir.rank_error(0).write_text("{}")
    run_dir.events.write_text(event("step", step=1))
    run_dir.rank_log(0).write_text("x")
    run_dir.forget_attempt()
    assert os.listdir(run_dir.ranks) == []
    assert os.listdir(run_dir.control) == []
    assert run_dir.events.exists()
    assert run_dir.rank_log(0).exists()


# -- checkpoints ---------------------------------------------------------------------------


def checkpoint(run_dir: RunDir, name: str, manifest: str | None = "{}") -> Path:
    path = run_dir.checkpoints / name
    path.mkdir(parents=True)
    if manifest is not None:
        (path / MANIFEST).write_text(manifest)
    return path


def test_only_complete_checkpoints_count(run_dir: RunDir) -> None:
    ten, nine = checkpoint(run_dir, "step-10"), checkpoint(run_dir, "step-9")
    checkpoint(run_dir, "step-11", manifest=None)
    checkpoint(run_dir, "step-12", manifest='{"step": 12')
    checkpoint(run_dir, "step-13.tmp")
    checkpoint(run_dir, ".step-14")
    checkpoint(run_dir, "step-")
    (run_dir.checkpoints / "step-15").write_text("a file")
    assert run_dir.complete_checkpoints() == [(9, nine), (10, ten)], "by number, not by name"
    assert run_dir.latest_checkpoint() == (10, ten)


def test_an_event_is_one_line() -> None:
    before = time.time()
    line = event("warning", message="a\nb")
    assert line.endswith("\n")
    assert line.count("\n") == 1
    data = json.loads(line)
    assert (data["kind"], data["message"]) == ("warning", "a\nb")
    assert before - 0.001 <= data["t"] <= time.time() + 0.001
