"""Why a job failed, in one line, from files as real launchers and ranks leave them behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from jobs.diagnosis import why_failed
from jobs.rundir import RankStatus, RunDir

if TYPE_CHECKING:
    from pathlib import Path

# As torch elastic prints it when rank 1 is killed (torch 2.13).
SUMMARY = """\
E1121 08:40:13.123000 411 torch/distributed/elastic/multiprocessing/api.py:1023] failed \
(exitcode: {code}) local_rank: {rank} (pid: 4242) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "/usr/bin/accelerate", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====================================================
engine FAILED
----------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
----------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_08:40:13
  host      : node
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 4242){signal}
  error_file: <N/A>
  traceback : {traceback}
====================================================
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    for rank in (0, 1):
        write_status(made, rank)
    return made


def write_status(run_dir: RunDir, rank: int, **changes: Any) -> None:
    values: dict[str, Any] = {
        "rank": rank, "pid": 1, "started": 1.0, "host": "h", "device": "cpu", "phase": "train",
        "step": 12, "heartbeat": 1.0, "progressed": 1.0,
    }  # fmt: skip
    run_dir.rank_file(rank).write_text(RankStatus(**values | changes).to_json())


def write_error(run_dir: RunDir, rank: int, kind: str, message: str, **changes: Any) -> None:
    record = {
        "t": 10.0 + rank, "rank": rank, "type": kind, "message": message, "phase": "train",
        "step": 12,
    } | changes  # fmt: skip
    run_dir.rank_error(rank).write_text(json.dumps(record))


def elastic(run_dir: RunDir, rank: int, code: int) -> None:
    text = SUMMARY.format(
        rank=rank, code=code, signal=" (SIGKILL)" if code == -9 else "",
        traceback="Signal 9 (SIGKILL) received by PID 4242" if code < 0 else "see the docs",
    )  # fmt: skip
    run_dir.launcher_log.write_text(text)


def test_a_rank_that_told_its_error(run_dir: RunDir) -> None:
    write_error(run_dir, 1, "ValueError", "bad\n  picture")
    elastic(run_dir, 1, 1)
    assert (
        why_failed(run_dir, 1) == "rank 1 failed at step 12 during train: ValueError: bad picture"
    )


def test_what_a_person_can_put_right_is_said_without_ceremony(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "UserError", "the loss is not finite at step 3")
    assert why_failed(run_dir, 1) == "the loss is not finite at step 3"


def test_a_gpu_that_is_full(run_dir: RunDir) -> None:
    write_error(run_dir, 1, "OutOfMemoryError", "79.1 of 79.6 GiB", phase="load", step=0)
    assert why_failed(run_dir, 1) == (
        "rank 1 ran out of GPU memory at step 0 during load: 79.1 of 79.6 GiB"
    )


def test_the_first_error_is_the_cause(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "KeyError", "later", t=20.0)
    write_error(run_dir, 1, "ValueError", "earlier", t=10.0)
    assert "rank 1 failed" in why_failed(run_dir, 1)


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
        "Broken pipe",
        "NCCL communicator was aborted on rank 0",
        "[Rank 0] Watchdog caught collective operation timeout",
    ],
)
def test_what_the_others_say_afterwards_is_not_the_cause(run_dir: RunDir, message: str) -> None:
    write_error(run_dir, 0, "RuntimeError", message, t=1.0)
    write_error(run_dir, 1, "ValueError", "the cause", t=2.0)
    assert why_failed(run_dir, 1).endswith("ValueError: the cause")


def test_a_rank_that_was_killed_is_named_though_only_the_other_complains(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "RuntimeError", "Connection closed by peer")
    elastic(run_dir, 1, -9)
    text = why_failed(run_dir, 1)
    assert text.startswith("rank 1 was killed by SIGKILL")
    assert "at step 12 during train" in text


def test_a_rank_that_vanished_without_a_trace(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "RuntimeError", "Connection closed by peer")
    assert why_failed(run_dir, 1) == "rank 1 vanished at step 12 during train"


def test_aftermath_alone_is_better_than_nothing(run_dir: RunDir) -> None:
    for rank in (0, 1):
        write_error(run_dir, rank, "RuntimeError", "Connection reset by peer")
    assert why_failed(run_dir, 1).startswith("rank 0 failed at step 12 during train: RuntimeError")


def test_a_rank_that_we_ended_is_not_blamed(run_dir: RunDir) -> None:
    elastic(run_dir, 0, -9)
    run_dir.launcher_log.write_text(
        run_dir.launcher_log.read_text() + SUMMARY.format(rank=1, code=-11, signal="", traceback="")
    )
    assert why_failed(run_dir, 1, ended_by_us={0}).startswith("rank 1 was killed by SIGSEGV")


def test_a_rank_that_only_exits(run_dir: RunDir) -> None:
    elastic(run_dir, 1, 3)
    run_dir.rank_log(1).write_text("hello\nI have seen enough\n\n")
    assert why_failed(run_dir, 1) == (
        "rank 1 exited with status 3 at step 12 during train; its log ends with: I have seen enough"
    )
    run_dir.rank_log(1).unlink()
    assert why_failed(run_dir, 1).endswith("its log is empty")


def test_a_rank_that_died_before_its_first_word(run_dir: RunDir) -> None:
    run_dir.rank_file(1).unlink()
    elastic(run_dir, 1, -11)
    assert why_failed(run_dir, 1) == "rank 1 was killed by SIGSEGV while starting"


def test_a_signal_without_a_name(run_dir: RunDir) -> None:
    assert why_failed(run_dir, -99) == "the launcher was killed by signal 99"


def test_a_launcher_that_was_killed(run_dir: RunDir) -> None:
    assert why_failed(run_dir, -9).startswith("the launcher was killed by SIGKILL")


def test_a_launcher_that_failed_by_itself(run_dir: RunDir) -> None:
    run_dir.launcher_log.write_text("usage: accelerate\nerror: no such option --x\n\n")
    assert why_failed(run_dir, 2) == "the launcher failed: error: no such option --x"
    run_dir.launcher_log.unlink()
    assert why_failed(run_dir, 2) == "the launcher failed: exit status 2"


def test_an_end_that_nobody_explains(run_dir: RunDir) -> None:
    assert "without saying why" in why_failed(run_dir, 0)


def test_it_is_one_line_that_fits_the_screen(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "ValueError", "x\n" * 9000)
    text = why_failed(run_dir, 1)
    assert "\n" not in text
    assert len(text) < 400


def test_only_the_end_of_a_large_log_is_read(run_dir: RunDir) -> None:
    run_dir.launcher_log.write_bytes(b"\xff" * 300_000 + b"\nthe end\n")
    assert why_failed(run_dir, 1) == "the launcher failed: the end"
