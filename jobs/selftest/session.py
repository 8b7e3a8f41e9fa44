"""A whole self-test: which GPUs, its scenes, its report, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Final

from jobs.doctor.checks.keeper import claimed
from jobs.errors import UserError
from jobs.machine import devices
from jobs.run.rundir import write_atomic
from jobs.selftest.scenes import perform
from jobs.selftest.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.doctor.finding import Finding
    from jobs.machine.gpu import Gpu
    from jobs.queue.store import Store

REPORT: Final = "selftest.json"
"""In the state directory: what the newest self-test found."""

COUNT: Final = 12
"""About how many results there are, for a progress bar."""


def choose_gpus(store: Store, names: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to test: those named, else all that nobody uses.

    Returns:
        None of them: this machine has no GPUs.

    Raises:
        UserError: A name means no GPU, or GPUs are there and all in use.
    """
    present = devices.gpus()
    claims = claimed()
    if names:
        matches = [devices.find(name, present) for name in names]
        if None in matches:
            raise UserError(f"no GPU {names[matches.index(None)]!r}", "see `fsdp-tui gpus`")
        return [gpu for match in matches if match is not None for gpu in match[:1]]
    others = devices.foreign_users(present, (), claims)
    free = [
        gpu
        for gpu in present
        if gpu.uuid not in claims and gpu.uuid not in others and not gpu.unusable
    ]
    if present and not free:
        raise UserError(
            "every GPU is in use", "wait, name GPUs with --gpus, or test CPU ranks with --cpu"
        )
    return free


def run(
    store: Store, gpus: Sequence[Gpu], ranks: int, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Play every scene, write the report, and leave no job behind but those that failed.

    Args:
        store: The jobs; the self-test's own stand in the same queue.
        gpus: What to test; empty for CPU ranks.
        ranks: How many ranks use all of it.
        say: Called with what is being done.

    Raises:
        UserError: The queue is paused.
    """
    if store.paused:
        raise UserError("the queue is paused", "`fsdp-tui pause --off` lets jobs start")
    root = store.home / "selftest"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    stage = Stage(store, root, gpus, ranks, say)
    findings: list[Finding] = []
    try:
        for finding in perform(stage):
            findings.append(finding)
            yield finding
    finally:
        stage.clear()
        if not stage.failed:
            shutil.rmtree(root, ignore_errors=True)
    report = {
        "t": round(time.time(), 3),
        "gpus": [{"uuid": gpu.uuid, "name": gpu.name} for gpu in gpus],
        "ranks": ranks,
        "findings": [finding.to_dict() for finding in findings],
    }
    write_atomic(store.home / REPORT, json.dumps(report, indent=1) + "\n")
