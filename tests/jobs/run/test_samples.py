"""The samples of a run, what two jobs were told differently, moments of a run, and advice."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from jobs.queue.states import State
from jobs.run.failure import Cause, Failure, keep_failure, read_failure
from jobs.run.rundir import RunDir, event
from jobs.run.samples import Samples, list_samples
from jobs.run.timeline import Timeline, in_words
from jobs.spec.file.diff import differences
from jobs.spec.file.load import dump_spec, load_spec
from jobs.supervise.remedies import advice
from tests.support.tui.made_up_runs import add_job, append_events
from tui.cli.commands import cli
from tui.text.format import in_words as value_in_words

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store


def write_sample(run_dir: RunDir, step: int, number: int, **facts: Any) -> Path:
    """A picture that is none, with its facts."""
    directory = run_dir.samples / f"step-{step}"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{number:02d}.png"
    path.write_bytes(b"picture")
    if facts:
        path.with_suffix(".json").write_text(json.dumps(facts))
    return path


# -- samples -------------------------------------------------------------------------------


def test_samples_are_listed_by_step_and_prompt(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (20, 100, 3):
        for number in (1, 0):
            write_sample(run_dir, step, number, prompt=f"p{number}", size=[64, 32], seed=7)
    found = list_samples(run_dir)
    assert [(one.step, one.number) for one in found] == [
        (3, 0),
        (3, 1),
        (20, 0),
        (20, 1),
        (100, 0),
        (100, 1),
    ]
    assert found[0].prompt == "p0"
    assert found[0].size == (64, 32)
    assert found[0].bytes == 7
    assert json.dumps([one.to_dict() for one in found])


def test_what_is_no_sample_is_passed_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert list_samples(run_dir) == ()
    path = write_sample(run_dir, 5, 2)
    (path.parent / ".02.png.tmp").write_bytes(b"half")
    (path.parent / "notes.txt").write_text("mine")
    (run_dir.samples / "step-x").mkdir()
    (run_dir.samples / "step-9").write_text("a file")
    path.with_suffix(".json").write_text("{torn")
    path.with_suffix(".mp4").write_bytes(b"video")
    (one,) = list_samples(run_dir)
    assert (one.number, one.prompt, one.size, one.facts) == (2, "", None, {})
    assert one.video == path.with_suffix(".mp4")


def test_the_same_tuple_comes_back_while_nothing_changes(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_sample(run_dir, 5, 0, prompt="one")
    samples = Samples(run_dir)
    first = samples.look()
    assert samples.look() is first
    path = write_sample(run_dir, 5, 1)
    os.utime(path.parent, (time.time() + 3600,) * 2)  # for as long as this test may take
    second = samples.look()
    assert [one.number for one in second] == [0, 1]
    before = path.parent.stat()
    path.with_suffix(".json").write_text('{"prompt": "late"}')
    os.utime(path.parent, ns=(before.st_atime_ns, before.st_mtime_ns))  # as coarse clocks do
    assert samples.look()[1].prompt == "late", "facts that come after the picture are found"
    path.unlink()
    assert [one.number for one in samples.look()] == [0]


def test_directories_that_stay_the_same_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    directory = write_sample(run_dir, 5, 0).parent
    os.utime(directory, (time.time() - 60, time.time() - 60))
    samples = Samples(run_dir)
    first = samples.look()
    monkeypatch.setattr("jobs.run.samples._samples_in", lambda *_: pytest.fail("read again"))
    assert samples.look() is first


# -- differences ---------------------------------------------------------------------------


def test_differences_name_what_is_added_removed_and_changed(job_values: dict[str, Any]) -> None:
    first = load_spec(None, job_values | {"lora_rank": 8, "validation_prompts": ["a cat"]})
    second = load_spec(None, job_values | {"name": "other", "lora_rank": 16, "trigger_word": "sks"})
    found = {one.key: one for one in differences(first, second)}
    assert "name" not in found
    assert (found["lora_rank"].before, found["lora_rank"].after) == (8, 16)
    assert found["lora_rank"].kind == "changed"
    assert found["validation_prompts"].kind == "removed"
    assert found["trigger_word"].kind == "added"
    assert differences(first, first) == []
    assert json.dumps([one.to_dict() for one in found.values()])


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.text())))
def test_every_value_has_words(value: Any) -> None:
    assert value_in_words(value) or value == ""


# -- moments -------------------------------------------------------------------------------


def test_the_timeline_tells_what_happened_and_keeps_the_steps(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    append_events(
        job,
        event("start", step=0, world_size=2),
        event("phase", name="latents", state="begin"),
        event("phase", name="latents", state="end", seconds=192.0, total=500),
        event("phase", name="load", state="end", seconds=0.2),
        event("step", step=1, loss=0.5),
        event("checkpoint", step=10, path="x", bytes=3 << 30, seconds=2.0),
        event("sample", step=10, files=["00.png"]),
        event("warning", message="watch out"),
        event("error", rank=1, type="RuntimeError", step=3, phase="forward", message="no"),
        event("from-the-future", x=1),
        '{"kind": "checkpoint"}\n',
        '{"kind": "warning", "t": 1e20, "message": "of no year"}\n',  # no calendar can show it
        '{"kind": "checkpoint", "t": 1, "step": Infinity}\n',
        "torn",
    )
    log = Timeline(job.run_dir.events)
    log.read_all()
    assert [moment.words for moment in log.moments] == [
        "trains from step 0 on 2 ranks",
        "caching latents took 3 min 12 s (500)",
        "saved step-10 (3.0 GiB, 2.0 s)",
        "sampled 1 prompt at step 10",
        "watch out",
        "rank 1: RuntimeError at step 3 during forward: no",
    ]
    assert [step.step for step in log.steps] == [1]
    job.run_dir.events.unlink()
    append_events(job, event("end", reason="stopped"))
    log.read_all()
    assert [moment.words for moment in log.moments] == ["the ranks ended: stopped"]


def test_phases_that_train_are_no_moment() -> None:
    assert in_words("phase", {"t": 1.0, "name": "train", "state": "end", "seconds": 9999.0}) == ""


# -- advice --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "phase", "words"),
    [
        (Cause.GPU_MEMORY, "forward", "gradient_checkpointing"),
        (Cause.HOST_MEMORY, "", "fewer ranks"),
        (Cause.DISK_FULL, "save", "fsdp-tui prune"),
        (Cause.NOT_FINITE, "", "learning_rate"),
        (Cause.HANG, "", "stacks"),
        (Cause.COMMUNICATION, "forward", "doctor"),
        (Cause.KILLED, "", "what killed the rank"),
        (Cause.MISSING_PACKAGE, "load", "missing"),
        (Cause.OTHER, "forward", "traceback"),
    ],
)
def test_failures_come_with_advice(tmp_path: Path, cause: Cause, phase: str, words: str) -> None:
    run_dir, failure = RunDir(tmp_path), Failure("why", cause, 1, phase)
    keep_failure(run_dir, failure)
    assert read_failure(run_dir) == failure
    assert words in "; ".join(advice(State.FAILED, failure))


def test_a_failure_of_another_version_is_read(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_failure(run_dir) is None
    run_dir.failure_file.write_text('{"text": "why", "cause": "of tomorrow", "more": 1}')
    assert read_failure(run_dir) == Failure("why", Cause.OTHER)
    keep_failure(run_dir, None)
    assert read_failure(run_dir) is None
    assert "traceback" in "; ".join(advice(State.FAILED, None))


def test_what_went_well_needs_no_advice() -> None:
    full = Failure("why", Cause.GPU_MEMORY)
    assert advice(State.COMPLETED, None) == ()
    assert advice(State.RUNNING, full) == ()
    assert "resume it" in "; ".join(advice(State.LOST, None))


# -- command line --------------------------------------------------------------------------


def test_samples_on_the_command_line(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    run = CliRunner().invoke
    assert run(cli, ["samples", "1"]).output == "no samples\n"
    for step in (10, 20):
        path = write_sample(job.run_dir, step, 0, prompt="a red\ncircle", size=[64, 64])
    lines = run(cli, ["samples", "1"]).output.splitlines()
    assert lines[0].split() == ["STEP", "NO", "PROMPT", "PIXELS", "SIZE", "PATH"]
    assert len(lines) == 3
    assert "a red circle" in lines[2]
    assert lines[2].endswith(str(path))
    layers = [path.with_name(f"00-{number}.png") for number in (1, 2)]
    for layer in layers:
        layer.touch()
    rows = run(cli, ["samples", "1"]).output.splitlines()[3:]
    assert [(row.split()[2:4], row.split()[-1]) for row in rows] == [
        (["layer", str(number)], str(layer)) for number, layer in enumerate(layers, 1)
    ]
    assert json.loads(run(cli, ["samples", "1", "--json"]).output)[1]["layers"] == [
        *map(str, layers)
    ]
    newest = json.loads(run(cli, ["samples", "1", "--newest", "--json"]).output)
    assert [(one["step"], one["picture"]) for one in newest] == [(20, str(path))]
    assert run(cli, ["samples", "1", "--step", "11"]).output == "no samples of step 11\n"


def test_diff_on_the_command_line(store: Store, job_values: dict[str, Any]) -> None:
    for rank in (8, 16):
        spec = load_spec(None, job_values | {"lora_rank": rank})
        add_job(store, f"r{rank}", job_file=dump_spec(spec))
    run = CliRunner().invoke
    lines = run(cli, ["diff", "1", "2"]).output.splitlines()
    assert lines[0].split() == ["KEY", "#1", "r8", "#2", "r16"]
    assert lines[1].split()[:4] == ["changed", "lora_rank", "8", "16"]
    found = json.loads(run(cli, ["diff", "1", "2", "--json"]).output)
    assert found[0]["key"] == "lora_rank"
    assert run(cli, ["diff", "1", "1"]).output == "jobs 1 and 1 have the same settings\n"
    assert "no job 9" in str(run(cli, ["diff", "1", "9"]).exception)
