"""`fsdp-tui checkpoints`, `resume --from` and beginning from another job, as people type them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.queue.states import State
from jobs.run.checkpoint_files import set_aside
from jobs.run.events import Scores, Start, Validation
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from tests.support.jobs.checkpoints import save_checkpoint
from tui.text.checkpoint_text import age

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store
    from tests.support.tui.shell import Shell


@pytest.fixture
def run_dir(store: Store, shell: Shell, job_file: Path) -> RunDir:
    """Of job 1, which was stopped after steps 10, 20 and 30."""
    assert shell("submit", str(job_file))[0] == 0
    store.change(1, State.STOPPED, "")
    run_dir = store.get(1).run_dir
    spec = load_spec(run_dir.job_file).to_dict()
    for step in (10, 20, 30):
        save_checkpoint(run_dir, step, spec, time=1_700_000_000 + step)
    return run_dir


def names(run_dir: RunDir) -> list[str]:
    return sorted(path.name for path in run_dir.checkpoints.glob("step-*"))


# -- looking -------------------------------------------------------------------------------


def test_the_table_says_what_there_is_and_what_a_resume_takes(
    shell: Shell, run_dir: RunDir
) -> None:
    set_aside(run_dir.checkpoint(10), "rewound")
    (run_dir.checkpoint(30) / "__0_0.distcp").unlink()
    status, out, err = shell("checkpoints", "1")
    head, first, second, third, totals, legend = out.splitlines()
    assert head.split() == [
        "CHECKPOINT",
        "WRITTEN",
        "SIZE",
        "LAYOUT",
        "RANKS",
        "EMA",
        "HEALTH",
    ]
    assert first.split()[0] == "step-10.rewound"
    assert first.endswith("sharded  2      no   set aside (rewound)")
    assert second.startswith("→  step-20 ")
    assert second.endswith("complete")
    assert "2023-11-1" in second
    assert third.split()[0] == "step-30"
    assert third.endswith("damaged: __0_0.distcp is missing")
    assert totals.startswith("3 checkpoints, ")
    assert "set aside) · " in totals
    assert totals.endswith("free on its disk")
    assert legend == "→ marks where a resume starts"
    assert (status, err) == (0, ""), "the status is 1 only when every byte was asked for"


def test_the_json_has_every_fact(shell: Shell, run_dir: RunDir) -> None:
    facts = shell.json("checkpoints", "1")
    assert [one["step"] for one in facts["checkpoints"]] == [10, 20, 30]
    assert facts["next"] == "step-30"
    assert facts["total_bytes"] == sum(one["bytes"] for one in facts["checkpoints"])
    assert facts["free_bytes"] > 0
    assert facts["checkpoints"][0] == {
        "name": "step-10",
        "step": 10,
        "path": str(run_dir.checkpoint(10)),
        "time": 1_700_000_010,
        "bytes": facts["checkpoints"][0]["bytes"],
        "layout": "sharded",
        "world_size": 2,
        "ema": False,
        "damage": None,
        "set_aside": None,
        "verified": False,
        "next": False,
        "health": "complete",
        "loss": None,
        "loss_step": None,
        "best": False,
    }
    assert facts["best"] is None


def test_the_best_one_may_be_judged_by_a_score(shell: Shell, run_dir: RunDir) -> None:
    measured = [Start(best_by="clip_t"), Validation(30, 0.1)]
    measured += [Scores(step, clip_t=value) for step, value in ((10, 0.2), (20, 0.4), (30, 0.3))]
    run_dir.events.write_text("".join(event.line() for event in measured))
    lines = shell("checkpoints", "1")[1].splitlines()
    assert lines[0].split()[-2:] == ["CLIP-T", "HEALTH"]
    assert lines[-1] == "★ marks the best one, CLIP-T 0.4000"
    facts = shell.json("checkpoints", "1")
    assert facts["best"] == "step-20"
    assert {**facts["checkpoints"][1]}.items() >= {
        "score": 0.4,
        "by": "clip_t",
        "loss": None,
    }.items()
    shown = shell("show", "1")[1]
    assert "★ step 20: CLIP-T 0.4000" in shown
    assert "scores       CLIP-T 0.3000 at step 30" in shown
    assert shell.json("show", "1")["scores"][-1] == [30, {"clip_t": 0.3}]
    assert "★ 20 0.4000" in shell("list")[1]


def test_the_best_one_is_marked_and_can_be_resumed(shell: Shell, run_dir: RunDir) -> None:
    status, _, err = shell("resume", "1", "--from", "best")
    assert (status, "set validation_fraction" in err) == (2, True)
    measured = ((10, 3.0), (18, 1.0), (30, 2.0))
    run_dir.events.write_text("".join(Validation(step, loss).line() for step, loss in measured))
    lines = shell("checkpoints", "1")[1].splitlines()
    assert lines[0].split()[-2:] == ["VAL", "HEALTH"]
    assert lines[2].split()[:2] == ["★", "step-20"]
    assert lines[3].split()[:2] == ["→", "step-30"]
    assert lines[-1] == "★ marks the best one, validation loss 1.000 of step 18"
    assert shell.json("checkpoints", "1")["best"] == "step-20"
    assert "★ step 20: validation loss 1.000, measured at step 18" in shell("show", "1")[1]
    assert "★ 20 1.000" in shell("list")[1]
    (row,) = shell.json("list")
    assert row["best"] == {"step": 20, "loss": 1.0, "loss_step": 18}
    assert row["validation_loss"] == 2.0
    for command in ("export", "push"):
        status, _, err = shell(command, "1", "--step=10", "--best")
        assert (status, "use one of them" in err) == (2, True)
    status, _, err = shell("resume", "1", "--from", "best")
    assert status == 0
    assert "resumes after step 20: validation loss 1, measured at step 18" in err
    assert names(run_dir) == ["step-10", "step-20", "step-30.rewound"]


def test_verify_reads_every_byte(shell: Shell, run_dir: RunDir) -> None:
    status, out, _ = shell("checkpoints", "1", "--verify")
    assert (status, out.count("verified")) == (0, 3)
    file = run_dir.checkpoint(20) / "__0_0.distcp"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    assert shell("checkpoints", "1")[0] == 0
    status, out, _ = shell("checkpoints", "1", "--verify")
    assert status == 1
    assert "damaged: __0_0.distcp has changed since it was written" in out
    set_aside(run_dir.checkpoint(20), "damaged")
    assert shell("checkpoints", "1", "--verify")[0] == 0, "that one was dealt with"


def test_verify_shows_how_far_it_is_on_a_terminal(
    shell: Shell, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("checkpoints", "1", "--verify")[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    err = shell("checkpoints", "1", "--verify")[2]
    assert "reading checkpoints ━" in err
    assert err.endswith("\r\x1b[K")


def test_there_may_be_none(shell: Shell, run_dir: RunDir) -> None:
    assert shell("checkpoints", "1", "--delete", "10", "20", "30")[1].endswith(
        "no checkpoints yet\n"
    )
    assert shell.json("checkpoints", "1")["next"] is None


def test_a_run_directory_that_is_gone_is_one_line(
    shell: Shell, run_dir: RunDir, tmp_path: Path
) -> None:
    run_dir.root.rename(tmp_path / "elsewhere")
    status, _, err = shell("checkpoints", "1")
    assert status == 2
    gone = f"the run directory of job 1 is gone: {run_dir.root}"
    assert err == f"fsdp-tui: {gone}; forget the job with `fsdp-tui remove 1`\n"
    assert shell("checkpoints", "7")[0] == 2


# -- deleting ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--delete", "10", "--delete", "step-20"),
        ("--delete", "10", "20"),
        ("--delete=10,20", "-y"),
        ("-y", "--delete", "step-10", "step-20"),
    ],
)
def test_several_are_deleted(shell: Shell, run_dir: RunDir, words: tuple[str, ...]) -> None:
    status, out, err = shell("checkpoints", "1", *words)
    assert status == 0, err
    assert names(run_dir) == ["step-30"]
    assert "deleted step-10 (" in err
    assert "step-30" in out


def test_one_that_was_set_aside_is_deleted_by_its_name(shell: Shell, run_dir: RunDir) -> None:
    set_aside(run_dir.checkpoint(30), "rewound")
    assert shell("checkpoints", "1", "--delete", "30")[0] == 2
    assert shell.json("checkpoints", "1", "--delete", "step-30.rewound")["deleted"] == [
        "step-30.rewound"
    ]
    assert names(run_dir) == ["step-10", "step-20"]


def test_deleting_asks_at_a_terminal(
    shell: Shell, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(text: str, *, abort: bool) -> None:
        asked.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    assert shell("checkpoints", "1", "--delete", "10")[0] == 130
    assert asked[0].startswith("delete step-10 (")
    assert names(run_dir) == ["step-10", "step-20", "step-30"]
    assert shell("checkpoints", "1", "--delete", "25")[0] == 2
    assert len(asked) == 1, "nobody is asked about what is not there"
    assert shell("checkpoints", "1", "--delete", "10", "-y")[0] == 0
    assert names(run_dir) == ["step-20", "step-30"]


def test_what_cannot_be_deleted_is_one_line(shell: Shell, store: Store, run_dir: RunDir) -> None:
    assert shell("checkpoints", "1", "--delete", "25") == (
        2,
        "",
        "fsdp-tui: job 1 has no checkpoint step-25; there are step-10, step-20, step-30\n",
    )
    status, _, err = shell("checkpoints", "1", "10")
    assert (status, err) == (
        2,
        'fsdp-tui: "10" is an extra argument; to delete it, use --delete 10\n',
    )
    store.requeue(1, "")
    status, _, err = shell("checkpoints", "1", "--delete", "30")
    assert status == 2
    assert "is its newest complete checkpoint; a restart needs it" in err
    assert names(run_dir) == ["step-10", "step-20", "step-30"]


# -- resuming ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("--from", "10"), ("--from=step-10",), ("--seed=42", "--from", "10", "--lora-alpha", "16")],
)
def test_a_resume_goes_back(
    shell: Shell, store: Store, run_dir: RunDir, words: tuple[str, ...]
) -> None:
    status, out, err = shell("resume", "1", *words)
    assert status == 0, err
    assert names(run_dir) == ["step-10", "step-20.rewound", "step-30.rewound"]
    assert "fsdp-tui: set aside, not deleted: step-20, step-30\n" in err
    assert out.startswith("job 1 is ")
    assert "the result changes" not in err
    listed = shell("checkpoints", "1")[1]
    assert listed.count("set aside (rewound)") == 2


def test_no_key_of_a_job_is_called_from() -> None:
    assert "from" not in JobSpec.model_fields


def test_a_resume_says_what_changes(shell: Shell, run_dir: RunDir) -> None:
    status, out, err = shell("resume", "1", "--learning_rate=0.0005", "--num_processes=4")
    assert status == 0
    assert err.splitlines() == [
        "fsdp-tui: the result changes: learning_rate: 0.0001 → 0.0005",
        "fsdp-tui: the result changes: the global batch: 2 → 4, so steps train on different "
        "samples",
    ]
    assert "the result" not in out


def test_scripts_get_what_changes(shell: Shell, store: Store, run_dir: RunDir) -> None:
    facts = shell.json("resume", "1", "--from", "20", "--seed=7")
    assert (facts["id"], facts["step"], facts["run_dir"]) == (1, 20, str(run_dir.root))
    assert facts["changes"] == ["seed: 42 → 7"]
    assert facts["set_aside"] == ["step-30"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "25"), "job 1 has no checkpoint of step 25; there are 10, 20, 30"),
        (("--from", "x"), '"x" is not a step; use a number such as 20 or step-20'),
        (("--from",), "Option '--from' requires an argument."),
        (
            ("--lora_rank=4",),
            "cannot resume from step-30: lora_rank: the checkpoint was written "
            "with 16, not with 4: the adapter's weights have a different shape; "
            "set lora_rank to 16, or start a job without the checkpoint",
        ),
        (("cats",), '"cats" is neither a job id nor a --key=value flag'),
    ],
)
def test_a_resume_that_cannot_be_is_one_line(
    shell: Shell, store: Store, run_dir: RunDir, words: tuple[str, ...], said: str
) -> None:
    assert shell("resume", "1", *words) == (2, "", f"fsdp-tui: {said}\n")
    assert names(run_dir) == ["step-10", "step-20", "step-30"]
    assert store.get(1).state is State.STOPPED


# -- beginning from another job ------------------------------------------------------------


def test_a_job_begins_from_another_and_says_what_changes(
    shell: Shell, store: Store, run_dir: RunDir, job_file: Path
) -> None:
    begin = ("--resume-from-checkpoint=1:step-20", "--seed=7")
    answer = shell.json("submit", str(job_file), *begin)
    assert answer["changes"] == ["seed: 42 → 7"]
    spec = load_spec(RunDir(store.get(answer["id"]).run_dir.root).job_file)
    assert spec.resume_from_checkpoint == str(run_dir.checkpoint(20))
    status, out, err = shell("submit", str(job_file), *begin, "--dry-run")
    assert status == 0
    assert f"resume_from_checkpoint: {run_dir.checkpoint(20)}" in out
    assert err == "fsdp-tui: the result changes: seed: 42 → 7\n"
    assert len(store.all()) == 2, "a dry run queues nothing"


def test_a_begin_that_cannot_be_queues_nothing(
    shell: Shell, store: Store, run_dir: RunDir, job_file: Path
) -> None:
    for dry in ((), ("--dry-run",)):
        assert shell("submit", str(job_file), "--resume-from-checkpoint=1:25", *dry) == (
            2,
            "",
            "fsdp-tui: resume_from_checkpoint: job 1 has no checkpoint of step 25; there "
            "are 10, 20, 30\n",
        )
    assert len(store.all()) == 1


def test_what_a_waiting_job_needs_is_not_removed(
    shell: Shell, store: Store, run_dir: RunDir, job_file: Path
) -> None:
    store.pause(True)
    assert shell("submit", str(job_file), "--resume-from-checkpoint=1:20")[0] == 0
    for words in (
        ("remove", "1", "-y"),
        ("prune", "--keep-last", "0", "-y"),
        ("checkpoints", "1", "--delete", "20", "-y"),
        ("resume", "1", "--from", "10"),
    ):
        status, _, err = shell(*words)
        assert status == 2, words
        assert err.startswith("fsdp-tui: job 2 (queued) is set to start from "), words
    assert names(run_dir) == ["step-10", "step-20", "step-30"]


# -- words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "now"),
        (0, "now"),
        (30, "< 1 min"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (86399, "23 h"),
        (86400, "1 d"),
        (4e6, "46 d"),
    ],
)
def test_an_age_is_coarse(seconds: float, text: str) -> None:
    assert age(seconds) == text
