"""The table of states: what Slurm and a warden say, and what a job is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.backends.slurm.commands import Listed
from jobs.backends.slurm.records import Allocation, WardenReport
from jobs.backends.slurm.settle import Facts, Verdict, settle
from jobs.queue.states import State

NOW = Verdict(State.RUNNING, "all ranks are up")


def said(
    state: State, reason: str = "so", *, restart: int = 0, slurm_id: str = "7"
) -> WardenReport:
    return WardenReport(Allocation(slurm_id, restart), state, reason)


def listed(state: str, reason: str = "", restarts: int = 0, **more: str) -> Listed:
    return Listed("7", "n", state, reason, restarts, **more)


WARDEN = said(State.SAVING, "writing a checkpoint")
DONE = said(State.COMPLETED, "trained 6 steps")


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (Facts("7", listed("PENDING", "Resources")), State.QUEUED, "waiting for free nodes"),
        (
            Facts("7", listed("PENDING", "Priority", starts="2026-01-02T03:04:05")),
            State.QUEUED,
            "Slurm job 7: other jobs go first; expected to start 2026-01-02 03:04",
        ),
        (Facts("7", listed("PENDING")), State.QUEUED, "Slurm job 7 waits"),
        (Facts("7", listed("PENDING", "BeginTime", 1)), State.QUEUED, "requeued 1 time"),
        (Facts("7", listed("REQUEUED")), State.QUEUED, "Slurm job 7"),
        (
            Facts("7", listed("REQUEUE_HOLD", "launch_failed_requeued_held")),
            State.QUEUED,
            "launch failed requeued held",
        ),
        (Facts("7", listed("PENDING"), stopping=True), State.RUNNING, "all ranks are up"),
        (Facts("7", listed("RUNNING", nodes="n[1-2]")), State.STARTING, "on n[1-2]"),
        (Facts("7", listed("CONFIGURING")), State.STARTING, "Slurm job 7 starts"),
        (Facts("7", listed("RUNNING"), warden=WARDEN), State.SAVING, "writing a checkpoint"),
        (Facts("7", listed("RUNNING", restarts=1), warden=WARDEN), State.STARTING, "starts"),
        (
            Facts("7", listed("RUNNING"), warden=replace(WARDEN, allocation=Allocation("6"))),
            State.STARTING,
            "starts",
        ),
        (Facts("7", listed("RUNNING"), warden=WARDEN, outcome=DONE), State.RUNNING, "ranks are up"),
        (Facts("7", listed("COMPLETING"), warden=WARDEN), State.RUNNING, "all ranks are up"),
        (Facts("7", listed("SUSPENDED"), warden=WARDEN), State.RUNNING, "has suspended job 7"),
        (Facts("7", listed("COMPLETED"), outcome=DONE), State.COMPLETED, "trained 6 steps"),
        (
            Facts("7", listed("FAILED"), outcome=said(State.FAILED, "rank 1 …")),
            State.FAILED,
            "rank 1 …",
        ),
        (Facts("7", listed("CANCELLED"), outcome=DONE), State.COMPLETED, "trained 6 steps"),
        (
            Facts("7", listed("COMPLETED", restarts=1), outcome=DONE),
            State.FAILED,
            "ended without a result; see logs/supervisor.log",
        ),
        (Facts("7", listed("CANCELLED")), State.STOPPED, "stopped; no checkpoint"),
        (Facts("7", listed("CANCELLED"), saved=4), State.STOPPED, "resume continues after step 4"),
        (Facts("7", listed("TIMEOUT"), saved=4), State.LOST, "the time limit ended the job"),
        (Facts("7", listed("TIMEOUT"), stopping=True), State.STOPPED, "stopped"),
        (Facts("7", listed("NODE_FAIL")), State.LOST, "a node failed"),
        (Facts("7", listed("BOOT_FAIL")), State.LOST, "a node did not boot"),
        (Facts("7", listed("FAILED", "JobLaunchFailure")), State.LOST, "could not start the job"),
        (Facts("7", listed("PREEMPTED")), State.LOST, "was preempted"),
        (Facts("7", listed("DEADLINE")), State.LOST, "the deadline"),
        (Facts("7", listed("OUT_OF_MEMORY")), State.FAILED, "a node ran out of memory"),
        (
            Facts("7", listed("FAILED", "NonZeroExitCode"), log="python: not found"),
            State.FAILED,
            "the batch script failed: python: not found",
        ),
        (Facts("7", listed("FAILED", "RaisedSignal:9")), State.FAILED, "(RaisedSignal:9)"),
        (Facts("7", None, missing=10), State.RUNNING, "all ranks are up"),
        (Facts("7", None, missing=90, warden=WARDEN, fresh=True), State.RUNNING, "ranks are up"),
        (Facts("7", None, missing=90, warden=WARDEN), State.RUNNING, "does not have job 7; asking"),
        (Facts("7", None, missing=90, warden=WARDEN, gone=True), State.LOST, "no longer knows job"),
        (Facts("7", None, missing=90, stopping=True), State.RUNNING, "does not have job 7"),
        (Facts("7", None, missing=90, stopping=True, gone=True), State.STOPPED, "stopped"),
        (Facts("7", None, outcome=DONE), State.COMPLETED, "trained 6 steps"),
        (
            Facts("7", None, outcome=DONE, warden=replace(WARDEN, allocation=Allocation("7", 1))),
            State.RUNNING,
            "all ranks are up",
        ),
        (Facts("7", None, outcome=replace(DONE, allocation=Allocation("6"))), State.RUNNING, "up"),
        (
            Facts("7", listed("FAILED"), silent=44.0),
            State.RUNNING,
            "all ranks are up; Slurm has not responded for 40 s",
        ),
        (Facts("7", None, silent=700.0), State.RUNNING, "not responded for 12 min"),
    ],
)
def test_the_state_of_a_job(facts: Facts, state: State, words: str) -> None:
    verdict = settle(NOW, facts)
    assert verdict.state is state
    assert words in verdict.reason


def test_an_age_is_said_once_and_taken_back() -> None:
    silent = settle(NOW, Facts("7", None, silent=30.0))
    again = settle(silent, Facts("7", None, silent=60.0 * 60 * 5))
    assert again == Verdict(State.RUNNING, "all ranks are up; Slurm has not responded for 5 h")
    assert settle(again, Facts("7", listed("COMPLETING"))) == NOW
