"""What kind of failure a rank records: by types, never by words."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from engine.checkpoint.together import is_full
from engine.ranks.failure import cause_of, record_failure
from engine.ranks.telemetry import Telemetry
from jobs.errors import DiskFullError, NotFiniteError, UserError
from jobs.run.failure import Cause
from jobs.run.fence import FENCE_VARIABLE, raise_fence
from jobs.run.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path


def led_to(error: Exception, first: BaseException) -> Exception:
    error.__cause__ = first
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DiskFullError("no words"), Cause.DISK_FULL),
        (OSError(errno.EDQUOT, "no words"), Cause.DISK_FULL),
        (led_to(UserError("a cache"), OSError(errno.ENOSPC, "no words")), Cause.DISK_FULL),
        (OSError(errno.EIO, "No space left on device"), Cause.OTHER),
        (NotFiniteError("no words"), Cause.NOT_FINITE),
        (UserError("the disk is full"), Cause.OTHER),
    ],
)
def test_the_kind_of_a_failure(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause
    assert is_full(error) == (cause is Cause.DISK_FULL)


def test_a_rank_that_was_cut_off_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm has started its job elsewhere: it neither says how it is nor why it failed."""
    run_dir, ends = RunDir(tmp_path), []
    run_dir.create()
    monkeypatch.setenv(FENCE_VARIABLE, "7.0")
    raise_fence(tmp_path, "7.0")
    monkeypatch.setattr("engine.ranks.telemetry.os._exit", ends.append)
    telemetry = Telemetry(run_dir, 1)
    telemetry._exit_if_replaced()
    assert ends == []
    raise_fence(tmp_path, "7.1")
    telemetry._exit_if_replaced()
    assert set(ends) == {1}, "the thread may have seen it too"
    record_failure(run_dir, 1, ValueError("connection closed"), telemetry)
    assert run_dir.rank_errors() == []
    telemetry.close()


def test_an_interrupt_ends_a_rank_at_once(tmp_path: Path) -> None:
    """Even while it imports: raised in there, a KeyboardInterrupt became "No module named …"."""
    run_dir = RunDir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    values = {"name": "a", "model_family": "flux", "dataset": "d"}
    values["pretrained_model_name_or_path"] = str(tmp_path / "model")
    run_dir.job_file.write_text(json.dumps(values))
    rank = subprocess.Popen(
        [sys.executable, "-m", "engine", str(tmp_path)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while [one.phase for one in run_dir.rank_statuses()] != ["import"]:
        assert rank.poll() is None
        time.sleep(0.01)
    rank.send_signal(signal.SIGINT)
    assert rank.wait() == -signal.SIGINT
    assert run_dir.rank_errors() == []
