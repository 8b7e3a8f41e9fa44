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


def test_a_sweep_is_queued_and_compared(shell: Shell, store: Store, job_file: Path) -> None:
    words = ("submit", str(job_file), "--name=cats", "--sweep", "learning_rate=1e-5,3e-5")
    assert shell(*words, "--dry-run")[:2] == (0, "cats-lr1e-5\ncats-lr3e-5\n")
    code, _, err = shell(*words, "--sweep=lora_rank=8,many")
    assert (code, "sweep, learning_rate=1e-5, lora_rank=many: " in err) == (2, True)
    code, _, err = shell(*words, f"--sweep=seed={','.join(map(str, range(51)))}")
    assert (code, "102 jobs, more than 100; add --yes" in err) == (2, True)
    assert store.all() == [], "nothing is queued while anything is wrong"
    code, out, err = shell(*words, "--stop-worse-than-median-after=10")
    assert (code, out) == (0, "1\n2\n")
    assert "no job will be stopped: it takes 2 others" in err
    assert "`fsdp-tui list --sweep cats` compares them" in err
    head, first, second, note = shell("list", "--sweep", "cats")[1].splitlines()
    assert head.split()[:3] == ["ID", "LEARNING_RATE", "STATE"]
    assert [line.split()[:2] for line in (first, second)] == [["1", "1e-5"], ["2", "3e-5"]]
    assert "validation_fraction" in note
    rows = shell.json("list")
    assert [(row["sweep"], row["differs"]) for row in rows] == [
        ("cats", {"learning_rate": 3e-5}),
        ("cats", {"learning_rate": 1e-5}),
    ]
    assert "sweep        cats: lr 3e-5" in shell("show", "2")[1]
    made = shell.json(*words, "--sweep", "again")
    assert (made["sweep"], [job["id"] for job in made["jobs"]]) == ("again", [3, 4])
    code, _, err = shell("list", "--sweep", "dogs")
    assert (code, "there are again, cats" in err) == (2, True)
