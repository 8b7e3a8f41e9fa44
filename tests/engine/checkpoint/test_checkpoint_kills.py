"""Ranks are killed at random moments around their saves; what is complete is always whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pytest

from engine import checkpoint
from jobs.run.checkpoint_files import find_damage, list_checkpoints
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.ranks.checkpoint import check, numbered, save_for_ever, save_with_trouble
from tests.support.engine.toy_jobs import ALONE, start_ranks, toy_values
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.forks.client import Ranks

KILLS: Final = 12
LONGEST: Final = 0.25  # seconds between two moments; a save takes a few hundredths


@pytest.mark.parametrize(
    ("part", "layout"),
    [
        ("engine.checkpoint.saver.collect", "SHARDED_STATE_DICT"),
        ("engine.checkpoint.write.sha256", "SHARDED_STATE_DICT"),
        ("engine.checkpoint.full.own_files", "FULL_STATE_DICT"),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_ranks_agree_on_a_save_that_only_one_of_them_could_not_do(
    tmp_path: Path, part: str, layout: str, times: int
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    values = toy_values(tmp_path, num_processes=2, strategy="ddp", fsdp_state_dict_type=layout)
    start_ranks(save_with_trouble, 2, values, str(run_dir.root), part, times).join()
    came = {(run_dir.root / f"came.{rank}").read_text() for rank in (0, 1)}
    if times == 1:
        assert came == {"saved"}
    else:
        assert came == {
            "cannot save step-0: rank 1: ZeroDivisionError: odd (tried twice); "
            "there is no other checkpoint"
        }
    steps = [0, 1] if times == 1 else [1]
    assert [one.step for one in list_checkpoints(run_dir)] == steps
    assert [find_damage(one.path) for one in list_checkpoints(run_dir)] == [None] * len(steps)


def newest(run_dir: RunDir) -> int:
    found = run_dir.latest_checkpoint()
    return found[0] if found else 0


@pytest.mark.e2e
@pytest.mark.slow
def test_ranks_killed_around_saves_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    values = toy_values(
        tmp_path,
        num_processes=2,
        strategy="fsdp2",
        checkpoints_total_limit=3,
        checkpointing_async=True,
    )
    chance, torn = random.Random(6), 0
    for moment in range(KILLS):
        before = newest(run_dir)
        kill_some_rank(run_dir, values, before, chance, within_save=moment % 2 == 0)
        torn += bool(list(run_dir.checkpoints.glob(".step-*.tmp")))
        found = list_checkpoints(run_dir)
        assert found, f"moment {moment}"
        assert found[-1].step > before
        assert [find_damage(one.path) for one in found] == [None] * len(found), f"moment {moment}"
        assert len(found) <= 4, "the limit, and one that was just completed"
        training = numbered(
            load_spec(None, values | {"num_processes": 1, "strategy": "single"}), ALONE
        )
        checkpoint.load(training, found[-1].path, ALONE)
        assert training.step == found[-1].step
        check(training)
    assert torn >= KILLS // 2, "each second moment is within a save"
    run_dir.forget_unfinished()
    assert not list(run_dir.checkpoints.glob(".*"))


def kill_some_rank(
    run_dir: RunDir,
    values: dict[str, Any],
    before: int,
    chance: random.Random,
    *,
    within_save: bool,
) -> None:
    """Let two ranks save on after step `before`; kill one of them, then what is left.

    Args:
        run_dir: Theirs.
        values: Their job.
        before: The step of the newest checkpoint.
        chance: Chooses the moment, and who dies first.
        within_save: At a moment at which a checkpoint is begun and not completed.
    """
    ranks = start_ranks(save_for_ever, 2, values, str(run_dir.root))
    try:
        eventually(lambda: newest(run_dir) > before or not ranks.all_alive())
        time.sleep(chance.random() * LONGEST)
        if within_save:
            eventually(lambda: stopped_within_save(run_dir, ranks) or not ranks.all_alive())
        assert ranks.all_alive(), f"a rank failed by itself: {ranks.output.read_text()}"
    finally:
        for pid in chance.sample(ranks.pids, 2):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(chance.random() * 0.02)  # until it is noticed
        ranks.kill()
    shutil.rmtree(run_dir.ranks, ignore_errors=True)
    run_dir.ranks.mkdir()


def stopped_within_save(run_dir: RunDir, ranks: Ranks) -> bool:
    """Stop both ranks; whether that was within a save. Else they go on."""
    if not any(run_dir.checkpoints.glob(".step-*.tmp")):
        return False
    for pid in ranks.pids:
        os.kill(pid, signal.SIGSTOP)
    if any(run_dir.checkpoints.glob(".step-*.tmp")):
        return True
    for pid in ranks.pids:
        os.kill(pid, signal.SIGCONT)
    return False
