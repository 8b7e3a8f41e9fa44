"""`fsdp-tui hold`, `release`, `move` and `pause`, as people type them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.queue.states import State

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store
    from tests.support.tui.shell import Shell


def test_jobs_are_held_released_and_moved(shell: Shell, store: Store, job_file: Path) -> None:
    assert shell("pause")[:2] == (0, "the queue is paused; `fsdp-tui pause --off` resumes it\n")
    assert store.paused
    first, second = (int(shell.json("submit", str(job_file))["id"]) for _ in range(2))
    assert f"job {first} is held" in shell("hold", str(first))[1]
    assert store.get(first).held
    assert shell("release", str(first))[:2] == (0, f"job {first} is queued\n")
    assert not store.get(first).held
    assert [job.id for job in store.in_states([State.QUEUED])] == [first, second]
    assert shell("move", str(second), "--up")[:2] == (0, f"job {second} moved\n")
    assert [job.id for job in store.in_states([State.QUEUED])] == [second, first]
    assert shell("move", str(first), "--priority", "5")[0] == 0
    assert store.get(first).priority == 5
    code, _, err = shell("move", str(first))
    assert (code, "choose one of --first" in err) == (2, True)
    assert shell("move", "99", "--up")[0] == 2
