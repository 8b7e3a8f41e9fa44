"""`fsdp-tui hold`, `release`, `move` and `pause`, as people type them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.queue.states import State
from tests.support.tui.made_up_runs import add_job

if TYPE_CHECKING:
    from collections.abc import Callable
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


def test_stages_are_queued_shown_and_released(shell: Shell, store: Store, job_file: Path) -> None:
    store.pause(True)
    words = ("submit", str(job_file))
    code, _, err = shell(*words, "--after=1")
    assert (code, "no job 1" in err) == (2, True)
    for nothing in ("", ",", " "):  # as of an empty variable in a shell
        code, _, err = shell(*words, f"--after={nothing}")
        assert (code, f'"{nothing}" names no job' in err) == (2, True)
    first = add_job(store, "first")
    second = int(shell.json(*words, "--after", f"#{first.id}")["id"])
    sweep = shell.json(*words, "--sweep=seed=1,2", f"--after={first.id}, {second}")["jobs"]
    ids = [second, *(job["id"] for job in sweep)]
    rows = {row["id"]: row["waits_for"] for row in shell.json("list")}
    assert rows == {first.id: [], second: [1], ids[1]: [1, 2], ids[2]: [1, 2]}
    assert shell("hold", str(second))[0] == 0
    for _ in range(2):
        assert shell("release", str(second))[1] == "job 2 is queued: after job 1, which is queued\n"
    assert shell("release", str(ids[1]), "--now")[1] == f"job {ids[1]} is queued\n"
    store.change(first.id, State.STOPPED, "")
    code, out, err = shell(*words, f"--after={first.id}")
    assert (code, "job 1, which must complete first, is stopped" in err) == (0, True)
    reason = "after job 1, which was stopped: resume job 1, or release this job to start it all"
    assert reason in shell("show", out.strip())[1]
    assert shell("release", out.strip())[1] == f"job {out.strip()} is queued\n"
    assert shell.json("show", out.strip())["waits_for"] == []


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


def test_both_experts_are_queued_by_one_flag(
    shell: Shell, store: Store, job_file: Path, make_model: Callable[..., Path]
) -> None:
    parts = ("transformer", "transformer_2", "vae")
    root = make_model("wan", pipeline="WanPipeline", parts=parts)
    words = ("submit", str(job_file), "--name=cats", "--both-experts")
    code, _, err = shell(*words)
    assert (code, "both_experts: needs a model with two experts" in err) == (2, True)
    words = (*words, "--model_family=wan", f"--pretrained_model_name_or_path={root}")
    words = (*words, "--model_flavour=2.2-t2v-a14b-high")
    assert shell(*words, "--dry-run")[:2] == (0, "cats-high\ncats-low\n")
    code, _, err = shell(*words, "--other-expert", "3")
    assert (code, "will name each other" in err, "remove other_expert" in err) == (2, True, True)
    assert store.all() == []
    code, out, err = shell(*words)
    assert (code, out) == (0, "1\n2\n")
    assert "`fsdp-tui export 1 --both-experts` exports both" in err
    assert "sweep        cats: 2.2-t2v-a14b-low" in shell("show", "2")[1]
    code, _, err = shell("run", *words[1:])
    assert (code, "this is one job, and a pair is two" in err) == (2, True)


def test_several_jobs_are_acted_on_and_one_that_fails_stops_no_other(
    shell: Shell, store: Store
) -> None:
    store.pause(True)
    for name in ("one", "two", "three"):
        add_job(store, name)
    assert shell("hold", "1", "#2", "1")[:2] == (
        0,
        "job 1 is held; `fsdp-tui release 1` lets it start\n"
        "job 2 is held; `fsdp-tui release 2` lets it start\n",
    )
    code, out, err = shell("release", "1", "9", "2")
    assert (code, out) == (1, "job 1 is queued\njob 2 is queued\n")
    assert "fsdp-tui: job 9: no job 9" in err
    assert shell("release", "9")[0] == 2, "alone, it is a mistake as ever"
    assert shell("stop", "1", "3")[0] == 0
    assert [job.id for job in store.in_states([State.QUEUED])] == [2]
    code, _, err = shell("resume", "1", "2", "3")
    assert (code, err.count("fsdp-tui: job")) == (1, 3), "without a job file none can"
    assert shell("resume", "1", "cats")[0] == 2
    code, out, _ = shell("remove", "-y", "1", "2", "3")
    assert (code, out) == (1, "job 1 removed\njob 3 removed\n")
    assert shell("export", "2", "4", "--output", "there")[0] == 2


def test_the_list_is_narrowed_by_state_name_and_number(shell: Shell, store: Store) -> None:
    for name, state in (("cats", State.QUEUED), ("Cats-2", State.STOPPED), ("dogs", State.FAILED)):
        add_job(store, name, state=state)
    store.pause(True)

    def listed(*words: str) -> set[str]:
        return {str(row["name"]) for row in shell.json("list", *words)}

    assert listed("--name", "cat") == {"cats", "Cats-2"}
    assert listed("--state", "failed", "--state", "stopped") == {"Cats-2", "dogs"}
    assert listed("--state", "stopped", "--name", "dog") == set()
    assert len(listed("-n", "2")) == 2


@pytest.mark.parametrize(
    ("text", "last", "shown"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 5, "a\nb\n"),
        ("a\nb\n", 0, ""),
        ("", 3, ""),
        ("a\r50 %\rb\nc\n", 1, "c\n"),
        ("x" * 70_000 + "\n" + "y" * 70_000 + "\n", 1, "y" * 70_000 + "\n"),
    ],
)
def test_a_log_is_shown_from_its_last_lines(
    shell: Shell, store: Store, text: str, last: int, shown: str
) -> None:
    job = add_job(store, "cats", state=State.STOPPED)
    job.run_dir.rank_log(0).parent.mkdir(parents=True, exist_ok=True)
    job.run_dir.rank_log(0).write_text(text)
    assert shell("logs", "1", "--tail", str(last))[:2] == (0, shown)
