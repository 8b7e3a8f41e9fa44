"""`fsdp-tui export`: real exports of a small checkpoint, where they go, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from engine import checkpoint
from engine.exports.__main__ import main
from engine.train.ema import Ema
from engine.train.optimizer import build_optimizer, build_scheduler
from engine.train.train_state import TrainState
from jobs import export as exports
from jobs import service
from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled
from jobs.queue.states import State
from jobs.run.export_places import check_place, default_place
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.exports import ALONE, trained_model
from tests.support.engine.toy_jobs import toy_values
from tests.support.left_over import runs_with
from tests.support.paths import ROOT
from tests.support.waiting import eventually
from tui.cli import commands

if TYPE_CHECKING:
    from jobs.queue.job import Job
    from jobs.queue.store import Store

Run = Callable[..., tuple[int, str, str]]
ENDLESS = "tests.support.engine.endless_export"

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="session")
def saved(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `step-2` and `step-4` of a LoRA with an average."""
    spec = load_spec(None, toy_values(toy, name="cats", use_ema=True))
    model = trained_model(spec, toy / "model")
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(spec, list(trained.values()), ALONE.device)
    training = TrainState(model, optimizer, build_scheduler(spec, optimizer), Ema(trained, 0.9))
    root = tmp_path_factory.mktemp("saved")
    for training.step in (2, 4):
        with torch.no_grad():
            for parameter in trained.values():
                parameter.mul_(1.5)
        contents = checkpoint.collect(training, spec, 1)
        checkpoint.write(contents, root / f"step-{training.step}", ALONE)
    return root


@pytest.fixture
def job(store: Store, toy: Path, saved: Path, no_gpus: None, started: list[int]) -> Job:
    """A stopped job with those checkpoints."""
    made = service.submit(store, load_spec(None, toy_values(toy, name="cats", use_ema=True)))
    store.change(made.id, State.STOPPED, "asked to")
    shutil.copytree(saved, made.run_dir.checkpoints)
    return store.get(made.id)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fsdp-tui export` in this process; the exporting is a process of its own."""

    def export(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fsdp-tui", "export", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            commands.main()
        out, err = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int | None)
        return code or 0, out, err

    return export


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the tool is started with, instead of starting it."""
    found: list[list[str]] = []

    def ask(module: str, arguments: list[str], *_: object) -> dict[str, Any]:
        found.append([module, *arguments])
        return {"path": arguments[1], "step": 4, "ema": True, "warnings": []}

    monkeypatch.setattr(exports, "ask", ask)
    return found


# -- real exports --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_job_that_ended_becomes_its_export(run: Run, job: Job) -> None:
    status, out, err = run(job.id)
    assert (status, out, err) == (0, f"{job.run_dir.export}\n", "")
    names = {path.name for path in job.run_dir.export.iterdir()}
    assert names == {"pytorch_lora_weights.safetensors", "cats-kohya.safetensors", "export.json"}

    # Another step goes elsewhere, and the weights themselves differ from their average.
    asked_for = ("--step", 2, "--no-ema", "--dtype", "bf16", "--format", "diffusers", "--json")
    status, out, err = run(job.id, *asked_for)
    assert (status, err) == (0, "")
    found = json.loads(out)
    target = job.run_dir.root / "export-step-2-no-ema"
    assert found == {"path": str(target), "step": 2, "ema": False, "warnings": []}
    (file,) = target.glob("*.safetensors")
    assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}


def test_a_damaged_checkpoint_is_not_exported(run: Run, job: Job, tmp_path: Path) -> None:
    victim = next(job.run_dir.checkpoint(4).glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    status, out, err = run(job.id, "--output", tmp_path / "here")
    assert (status, out) == (2, "")
    assert err.startswith("fsdp-tui: the checkpoint step-4 is damaged (")
    assert "--step N" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "here").exists()


def test_who_loses_interest_ends_the_export_and_leaves_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, told = exports.ask, list[tuple[int, int]]()
    monkeypatch.setattr(exports, "ask", lambda _, *words: ask(ENDLESS, *words))  # whoever is late
    with pytest.raises(Cancelled):
        exports.export_checkpoint(
            job,
            output=tmp_path / "out" / "here",
            progress=lambda done, total: told.append((done, total)),
            cancelled=lambda: bool(told),
        )
    assert told[0][1] == 100
    eventually(lambda: not runs_with(tmp_path / "out" / "here"))
    assert not (tmp_path / "out" / "here").exists()


@pytest.mark.slow
def test_an_export_that_is_ended_leaves_nothing_aside(saved: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", ENDLESS, str(saved / "step-4"), str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    with process.stderr:
        assert any("waits" in line for line in process.stderr), "it ended by itself"
        (aside,) = tmp_path.iterdir()
        assert re.fullmatch(r"\.out\.\d+\.tmp", aside.name)
        process.terminate()
        process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["*.distcp", ".metadata"])
def test_a_checkpoint_that_the_job_deletes_meanwhile_is_one_line(
    saved: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(saved / "step-2", tmp_path / "step-2")
    next((tmp_path / "step-2").glob(name)).unlink()
    monkeypatch.setattr("engine.exports.__main__.find_damage", lambda path, progress: None)
    assert main([str(tmp_path / "step-2"), str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == ""
    assert last.startswith(f"fsdp-tui: {tmp_path / 'step-2'}/")
    assert "is gone; the job may have deleted this checkpoint" in last
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


# -- where they go -------------------------------------------------------------------------


def test_a_running_job_keeps_its_own_export_directory_for_its_end(
    store: Store, job: Job, run: Run, asked: list[list[str]]
) -> None:
    store.requeue(job.id, "again")
    assert run(job.id)[0] == 0
    assert asked[0][:3] == [
        "engine.exports",
        str(job.run_dir.checkpoint(4)),
        str(job.run_dir.root / "export-step-4"),
    ]


def test_every_choice_reaches_the_tool(job: Job, run: Run, asked: list[list[str]]) -> None:
    words = ["--step", 2, "--dtype", "fp16", "--format", "kohya", "--format", "diffusers"]
    assert run(job.id, *words, "--output", "~/x", "--no-ema")[0] == 0
    assert asked[0][1:] == [
        str(job.run_dir.checkpoint(2)),
        str(Path("~/x").expanduser()),
        "--dtype=fp16",
        "--format=kohya",
        "--format=diffusers",
        "--no_ema",
    ]


def test_a_single_file_goes_beside_the_directory_and_may_be_fp8(
    job: Job, run: Run, asked: list[list[str]]
) -> None:
    assert run(job.id, "--as", "single-file", "--dtype", "fp8")[0] == 0
    assert asked[0][2] == f"{job.run_dir.export}-single-file"
    assert asked[0][3:] == ["--dtype=fp8", "--single_file"]
    status, _, err = run(job.id, "--dtype", "fp8")
    assert (status, "fp8 is for single files" in err) == (2, True)


def test_an_export_goes_where_nothing_else_is(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    own, step = run_dir.export, tmp_path / "export-step-4"

    def place(*, ends: bool = True, ema_left_out: bool = False) -> Path:
        return default_place(run_dir, 4, ends=ends, ema_left_out=ema_left_out)

    assert place() == own
    assert place(ends=False) == step
    assert place(ema_left_out=True) == tmp_path / "export-step-4-no-ema"
    own.mkdir()
    for ended_at, expected in ((3, step), (4, own)):
        facts = {"job": "t", "step": ended_at, "ema": False}
        (own / "export.json").write_text(json.dumps(facts))
        assert place() == expected
    assert place(ends=False) == step


def test_only_an_export_of_the_same_is_replaced(tmp_path: Path) -> None:
    wanted = {"job": "cats", "step": 4, "ema": True, "dtype": "bf16", "single_file": False}
    target = tmp_path / "out"
    check_place(target, wanted)
    target.mkdir()
    check_place(target, wanted)
    (target / "notes.txt").touch()
    with pytest.raises(UserError, match="already exists and is not an export"):
        check_place(target, wanted)
    (target / "export.json").write_text(json.dumps(wanted))
    check_place(target, wanted)
    for changes, words in (
        ({"step": 3}, "of job cats after step 3;"),
        ({"ema": False}, "after step 4 without averaged weights;"),
        ({"job": "dogs"}, "of job dogs after step 4;"),
        ({"dtype": "fp8"}, "after step 4 in dtype fp8;"),
        ({"dtype": "fp8", "single_file": True}, "after step 4 in dtype fp8 as a single file;"),
    ):
        (target / "export.json").write_text(json.dumps(wanted | changes))
        with pytest.raises(UserError, match=words):
            check_place(target, wanted)
    del wanted["single_file"]
    (target / "export.json").write_text(json.dumps(wanted))
    check_place(target, wanted | {"single_file": False})


def test_an_export_in_another_precision_or_kind_is_kept(
    job: Job, run: Run, asked: list[list[str]], tmp_path: Path
) -> None:
    facts = {"job": "cats", "step": 4, "ema": True, "dtype": "fp8", "single_file": True}
    (tmp_path / "export.json").write_text(json.dumps(facts))
    words = [job.id, "--output", tmp_path, "--as", "single-file"]
    for more, said in ((["--dtype", "bf16"], "in dtype fp8;"), ([], "in dtype fp8;")):
        status, _, err = run(*words, *more)
        assert (status, said in err, asked) == (2, True, [])
    status, _, err = run(*words[:3])
    assert "in dtype fp8 as a single file;" in err
    assert run(*words, "--dtype", "fp8")[0] == 0


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["7"], "7"),
        (["1", "--step", "3"], "job 1 has no checkpoint of step 3"),
        (["1", "--step", "-3"], "--step"),
        (["1", "--dtype", "int4"], "int4"),
        (["1", "--format", "a1111"], "a1111"),
        (["1", "--as", "single-file", "--format", "kohya"], "--format is for LoRAs"),
        (["1", "--output", "~nobody-of-that-name/x"], "no such home directory"),
        (["cats"], "cats"),
    ],
)
def test_bad_input_is_one_line(
    job: Job, run: Run, asked: list[list[str]], words: list[str], said: str
) -> None:
    status, out, err = run(*words)
    assert (status, out, asked) == (2, "", [])
    assert said in err
    assert err.startswith("fsdp-tui: ")
    assert err.count("\n") == 1


def test_a_newest_checkpoint_that_lacks_files_is_passed_over_and_told_of(
    job: Job, run: Run, asked: list[list[str]]
) -> None:
    next(job.run_dir.checkpoint(4).glob("*.distcp")).unlink()
    status, _, err = run(job.id)
    assert status == 0
    assert asked[0][1].endswith("step-2")
    assert err == "fsdp-tui: warning: step-4 is damaged; exported step 2\n"
    status, _, err = run(job.id, "--step", 4)
    assert status == 2
    assert "step-4 is damaged" in err


def test_a_job_without_checkpoints_says_so(job: Job, run: Run, asked: list[list[str]]) -> None:
    shutil.rmtree(job.run_dir.checkpoints)
    status, _, err = run(job.id)
    assert (status, err) == (2, "fsdp-tui: job 1 has no checkpoint\n")
