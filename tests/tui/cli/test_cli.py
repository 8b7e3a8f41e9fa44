"""The command line: exit status, one line for what is wrong, shapes of JSON. Nothing real starts,
but for `run`, which follows fake ranks under a real supervisor.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs.hub.pushes import Push
from jobs.machine.devices import Gpu, GpuProcess
from jobs.machine.processes import end, with_run_id
from jobs.queue.states import State
from jobs.queue.store import Job, Store
from jobs.run.rundir import event
from jobs.spec.file.load import load_spec
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.fakes.supervise import start_supervisor
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, eventually
from tui.cli import commands
from tui.cli.job.follow import _Tail

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 2**30


@dataclass
class Result:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as strict JSON: no NaN, nothing around it."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


@dataclass
class Shell:
    """Runs commands in this process, with a state directory of their own."""

    home: Path
    job_values: dict[str, Any]
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["fsdp-tui", *map(str, words)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            commands.main()
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, out, err)

    def ok(self, *words: object) -> Result:
        result = self(*words)
        assert (result.status, result.err) == (0, ""), result
        return result

    def refused(self, *words: object) -> str:
        """Bad input: status 2, nothing on standard output, one line on standard error."""
        result = self(*words)
        assert (result.status, result.out) == (2, ""), result
        assert result.err.startswith("fsdp-tui: ")
        assert result.err.count("\n") == 1
        assert result.err.endswith("\n")
        return result.err.removeprefix("fsdp-tui: ").strip()

    @property
    def store(self) -> Store:
        return Store(self.home)

    def job_file(self, **changes: Any) -> Path:
        path = self.home.parent / "job.yaml"
        values = {k: v for k, v in (self.job_values | changes).items() if v is not None}
        path.write_text(yaml.safe_dump(values))
        return path

    def submit(self, **changes: Any) -> int:
        return int(self.ok("submit", self.job_file(**changes)).out)

    def ended(self, state: State = State.STOPPED, *, step: int | None = 3, **changes: Any) -> Job:
        job = self.store.get(self.submit(**changes))
        if job.state is State.QUEUED:
            assert self.store.claim(job.id, [], "")
        self.store.change(job.id, state, f"was {state}")
        if step is not None:
            save_checkpoint(job.run_dir, step)
        return job


@pytest.fixture
def shell(
    home: Path,
    job_values: dict[str, Any],
    no_gpus: None,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shell:
    return Shell(home, job_values, monkeypatch, capsys)


def have_gpus(monkeypatch: pytest.MonkeyPatch, *indices: int) -> None:
    gpus = [
        Gpu(
            index=n,
            uuid=f"GPU-{n}abc",
            name="NVIDIA H200",
            memory_total=140 * GIB,
            memory_used=GIB // 2,
            utilisation=97,
            temperature=61,
            power=512.3,
        )
        for n in indices
    ]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)


# -- the command itself --------------------------------------------------------------------


def test_help_names_the_promised_commands(shell: Shell) -> None:
    text = shell.ok("--help").out
    for name in (
        "demo",
        "toy",
        "submit",
        "run",
        "list",
        "show",
        "logs",
        "stop",
        "resume",
        "remove",
        "gpus",
        "families",
        "detect",
        "doctor",
        "import",
    ):
        assert f"  {name} " in text, name
        assert shell.ok(name, "--help").out.startswith("Usage: fsdp-tui " + name)


def test_the_version_is_told(shell: Shell) -> None:
    assert shell.ok("--version").out.startswith("fsdp-tui, version ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lst"], "lst"),
        (["show"], "ID"),
        (["show", "abc"], "abc"),
        (["show", "7"], "no job 7"),
        (["show", "-7"], "-7"),
        (["show", "9" * 30], "9" * 30),
        (["show", "1", "2"], "2"),
        (["logs", "7"], "no job 7"),
        (["stop", "7"], "no job 7"),
        (["stop", "9" * 30], "9" * 30),
        (["resume", "7"], "no job 7"),
        (["remove", "7"], "no job 7"),
        (["list", "--jsn"], "--jsn"),
        (["submit"], "no job given"),
        (["submit", "a.yaml", "b.yaml"], 'got "a.yaml" and "b.yaml"'),
        (["submit", "/no/such.yaml"], "no such job file: /no/such.yaml"),
        (["run", "/no/such.yaml"], "no such job file: /no/such.yaml"),
        (["submit", "/"], "/ is a directory, not a job file"),
        (["submit", "--seed=3"], "pretrained_model_name_or_path is missing"),
        (["toy", "/dev/null/x"], "/dev/null/x"),
        (["toy", "x", "--family", "flx"], "flx"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_word_is_one_line(shell: Shell, words: list[str], said: str) -> None:
    assert said in shell.refused(*words)


def test_the_dashboard_needs_a_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - closed with the process
    assert "needs a terminal" in shell.refused()


def test_a_terminal_that_cannot_move_its_cursor_gets_a_sentence(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "TERM=dumb" in shell.refused()


def test_a_state_directory_that_is_a_file(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDP_TUI_HOME", str(tmp_path / "file" / "home"))
    for words in (["list"], ["submit", shell.job_file()], ["gpus"]):
        assert "cannot create the directory" in shell.refused(*words)


def test_a_database_that_is_none(shell: Shell) -> None:
    (shell.home / "jobs.db").write_text("not a database" * 100)
    assert "is damaged (file is not a database)" in shell.refused("list")


def test_an_error_of_the_disk_is_a_sentence(shell: Shell) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/jobs.lock")

    shell.monkeypatch.setattr("jobs.service.refresh", fail)
    result = shell("list")
    assert (result.status, result.err) == (
        1,
        "fsdp-tui: /state/jobs.lock: No space left on device\n",
    )


def test_a_job_that_is_queued_is_told_as_queued(shell: Shell) -> None:
    """Even if starting it fails: people who see an error submit the job again."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    shell.monkeypatch.setattr("jobs.service.dispatch", fail)
    (shell.home / "job.yaml").write_text(yaml.safe_dump(shell.job_values))
    result = shell("submit", shell.home / "job.yaml")
    assert result.status == 0, result.err
    assert Store(shell.home).get(1).state is State.QUEUED


def test_a_reader_that_goes_away_is_no_error(shell: Shell) -> None:
    shell.ended(State.COMPLETED, step=5)  # a waiting one would be started by whoever looks
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "tui", "show", "1"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
    )
    os.close(write)
    assert done.stderr == ""


# -- submit --------------------------------------------------------------------------------


def test_submit_prints_the_id(shell: Shell) -> None:
    assert shell.ok("submit", shell.job_file()).out == "1\n"
    assert shell.ok("submit", shell.job_file()).out == "2\n"
    assert [job.state for job in shell.store.all()] == [State.QUEUED, State.STARTING]


def test_submit_as_json(shell: Shell) -> None:
    answer = shell.ok("submit", shell.job_file(), "--json").json
    assert answer == {"id": 1, "run_dir": str(shell.home / "runs" / "1-t"), "changes": []}
    assert load_spec(Path(answer["run_dir"]) / "job.yaml").name == "t"


@pytest.mark.parametrize(
    "words",
    [
        ["--seed=7", "--lora-rank", "4", "--gradient_checkpointing"],
        ["--seed", "7", "--gradient-checkpointing", "--LORA_RANK=4"],
        ["--seed=1", "--gradient_checkpointing=yes", "--lora_rank=4", "--seed=7"],
    ],
)
def test_flags_win_over_the_file(shell: Shell, words: list[str]) -> None:
    shell.ok("submit", *words, shell.job_file(seed=3))
    spec = load_spec(shell.store.get(1).run_dir.job_file)
    assert (spec.seed, spec.lora_rank, spec.gradient_checkpointing) == (7, 4, True)


def test_flags_may_say_everything(shell: Shell) -> None:
    flags = [f"--{key}={value}" for key, value in shell.job_values.items()]
    answer = shell.ok("submit", "--dry-run", "--json", *flags).json
    assert {key: answer[key] for key in shell.job_values} == shell.job_values


def test_a_replayed_job_file_is_the_same_job(shell: Shell) -> None:
    shell.submit(validation_prompts=["a cat, asleep"], lora_alpha=3.5)
    first = shell.store.get(1).run_dir.job_file
    shell.ok("submit", first)
    assert shell.store.get(2).run_dir.job_file.read_text() == first.read_text()


def test_a_dry_run_shows_the_whole_job_and_queues_nothing(shell: Shell) -> None:
    path = shell.job_file(seed=11)
    answer = shell.ok("submit", path, "--dry-run", "--json").json
    assert answer["seed"] == 11
    assert answer["lr_scheduler"] == "constant", "defaults are shown too"
    text = shell.ok("submit", path, "--dry-run").out
    assert yaml.safe_load(text) == answer
    assert shell.store.all() == []
    assert not (shell.home / "runs").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"], ["--json"]])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rat": 1}, 'unknown key "learning_rat" (did you mean "learning_rate"?)'),
        ({"resolution": 3}, "resolution: input should be greater than or equal to 16 (got 3)"),
        ({"optimizer": "adm"}, 'optimizer: "adm" is not one of adamw, sgd'),
        ({"name": "a/b"}, "name: use letters"),
        ({"model_family": "flox"}, 'unknown model_family "flox" (did you mean "flux"?)'),
        ({"dataset": "/no/such"}, "no such dataset folder: /no/such"),
        ({"dataset": "~no_such_user_here/data"}, "~no_such_user_here/data"),
        ({"dataset": "x" * 5000}, "xxx"),
        ({"pretrained_model_name_or_path": "/no/such"}, "no such model directory: /no/such"),
        ({"pretrained_model_name_or_path": "/"}, "/ is not a diffusers model"),
        ({"cache_dir": "/dev/null/cache"}, "cannot create the directory /dev/null/cache"),
        ({"gpus": 2, "device": "auto"}, "asks for GPUs, and this machine has none"),
        ({"num_processes": 1, "strategy": "fsdp2"}, "fsdp2 needs two or more ranks"),
        ({"max_train_steps": 10**30}, "max_train_steps"),
        ({"priority": 10**30}, "priority"),
        ({"snr_gamma": 5}, "is a flow-matching model"),
        ({"seed": "2024-02-30"}, "seed"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_job_is_one_line(
    shell: Shell, changes: dict[str, Any], said: str, dry: list[str]
) -> None:
    assert said in shell.refused("submit", shell.job_file(**changes), *dry)
    assert shell.store.all() == []


def test_a_value_that_is_no_date_is_one_line(shell: Shell) -> None:
    path = shell.job_file()
    path.write_text(path.read_text() + "seed: 2024-02-30\n")
    assert "job.yaml" in shell.refused("submit", path)


def test_a_folder_without_pictures_is_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = shell.refused("submit", shell.job_file(dataset=str(tmp_path / "empty")))
    assert f"0 images in the dataset folder {tmp_path / 'empty'}" in said


def test_a_full_disk_is_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shell.job_file()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jobs.service.write_atomic", full)
    result = shell("submit", path)
    assert result.status in (1, 2)
    assert "No space left on device" in result.err
    assert result.err.count("\n") == 1


def test_what_waits_says_for_what(shell: Shell) -> None:
    shell.submit()
    waits = shell.submit()
    assert shell.ok("show", waits, "--json").json["reason"] == "waiting for job 1 to free the CPU"


# -- list and show -------------------------------------------------------------------------

PROMISED = {
    "id": int,
    "name": str,
    "state": str,
    "reason": str,
    "step": int,
    "total_steps": int,
    "gpus": list,
    "run_dir": str,
    "created": float,
    "started": float | None,
    "ended": float | None,
}


def test_an_empty_list(shell: Shell) -> None:
    assert shell.ok("list", "--json").json == []
    assert "no jobs yet" in shell.ok("list").out


def test_list_and_show_have_the_promised_shape(shell: Shell) -> None:
    shell.ended(State.COMPLETED, step=5)
    shell.submit(name="second")
    listed = shell.ok("list", "--json").json
    assert [job["id"] for job in listed] == [2, 1]
    for job in listed:
        for key, kind in PROMISED.items():
            assert isinstance(job[key], kind), (key, job[key])
        shown = shell.ok("show", job["id"], "--json").json
        assert {key: shown[key] for key in job} == job
    assert listed[1]["state"] == "completed"
    assert listed[1]["ended"] >= listed[1]["started"] >= listed[1]["created"]
    assert listed[0]["ended"] is None


def test_show_tells_the_history_and_the_checkpoints(shell: Shell) -> None:
    job = shell.ended(State.STOPPED, step=3)
    shown = shell.ok("show", job.id, "--json").json
    assert [change["to"] for change in shown["history"]] == ["queued", "starting", "stopped"]
    assert [change["from"] for change in shown["history"]] == [None, "queued", "starting"]
    assert shown["checkpoints"] == [3]
    text = shell.ok("show", job.id).out
    for word in ("job 1  t", "stopped: was stopped", "checkpoints  3", str(job.run_dir.root)):
        assert word in text


def test_show_names_what_was_pushed_and_why_a_push_failed(shell: Shell) -> None:
    job = shell.ended(State.STOPPED, step=3)
    assert "hub" not in shell.ok("show", job.id).out
    Push("me/cats", [2, 3], "", "no permission to write to me/cats").keep(job.run_dir)
    text = shell.ok("show", job.id).out
    assert "on the hub   me/cats: 2,3\n" in text
    assert "hub          the last push failed: no permission to write to me/cats\n" in text
    assert shell.ok("show", job.id, "--json").json["hub"]["pushed"] == [2, 3]


def test_progress_is_listed(shell: Shell) -> None:
    job = shell.store.get(shell.submit(max_train_steps=8))
    job.run_dir.events.write_text(
        "".join(event("step", step=n, loss=0.123456, seconds=0.5) for n in range(1, 5))
    )
    (listed,) = shell.ok("list", "--json").json
    assert (listed["step"], listed["loss"], listed["seconds_per_step"]) == (4, 0.123456, 0.5)
    assert listed["eta"] == 2.0
    line = shell.ok("list").out.splitlines()[1]
    assert "4/8" in line
    assert "0.1235" in line
    assert "2 ranks" in line


def test_a_loss_that_is_no_number_is_still_json(shell: Shell) -> None:
    job = shell.store.get(shell.submit())
    job.run_dir.events.write_text(
        event("step", step=1, loss=float("nan")) + event("validation", step=1, loss=float("nan"))
    )
    assert shell.ok("list", "--json").json[0]["loss"] is None
    shown = shell.ok("show", job.id, "--json").json
    assert (shown["loss"], shown["validation"]) == (None, [[1, None]])


def test_show_tells_the_loss_on_what_is_held_out(shell: Shell) -> None:
    job = shell.store.get(shell.submit())
    assert "validation" not in shell.ok("show", job.id).out
    job.run_dir.events.write_text(
        "".join(event("validation", step=n, loss=0.5 / n) for n in (1, 2))
    )
    assert "validation   0.2500 at step 2; 0.5000 at 1\n" in shell.ok("show", job.id).out
    assert shell.ok("show", job.id, "--json").json["validation"] == [[1, 0.5], [2, 0.25]]


def test_gpus_of_a_job_are_indices(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2, 3)
    job = shell.submit(device="auto", gpus=[3, 2])
    shown = shell.ok("show", job, "--json").json
    assert shown["gpus"] == [3, 2]
    assert shown["reason"] == "starting on GPU 3, 2"
    assert "gpu 2,3" in shell.ok("list").out


# -- logs ----------------------------------------------------------------------------------


def test_logs_of_each_kind(shell: Shell) -> None:
    run_dir = shell.store.get(shell.submit()).run_dir
    run_dir.rank_log(0).write_text("zero\n")
    run_dir.rank_log(1).write_text("one, größer\n")
    run_dir.launcher_log.write_text("launcher\n")
    run_dir.supervisor_log.write_text("supervisor\n")
    assert shell.ok("logs", 1).out == "zero\n"
    assert shell.ok("logs", 1, "--rank", 1).out == "one, größer\n"
    assert shell.ok("logs", 1, "--launcher").out == "launcher\n"
    assert shell.ok("logs", 1, "--supervisor").out == "supervisor\n"


def test_logs_that_are_not_there(shell: Shell) -> None:
    shell.submit()
    assert "has no rank0.log yet (starting: " in shell.refused("logs", 1)
    assert "has ranks 0 to 1, not 2" in shell.refused("logs", 1, "--rank", 2)
    assert "not -1" in shell.refused("logs", 1, "--rank", -1)


def test_logs_of_an_ended_job_can_be_followed_to_their_end(shell: Shell) -> None:
    job = shell.ended()
    job.run_dir.rank_log(0).write_bytes(b"torn \xff bytes\nand no last newline")
    assert shell.ok("logs", job.id, "-f").out == "torn \ufffd bytes\nand no last newline"


def test_a_character_is_not_torn_by_following(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    tail = _Tail(path)
    tail.copy_new()
    whole = "größer ✓\n".encode()
    with open(path, "ab", buffering=0) as file:
        for byte in whole:
            file.write(bytes([byte]))
            tail.copy_new()
    assert capsys.readouterr().out == "größer ✓\n"


# -- stop, resume, remove ------------------------------------------------------------------


def test_stop_says_what_happens_and_is_firmer_the_second_time(shell: Shell) -> None:
    job = shell.submit()
    assert "after the current step, with a checkpoint" in shell.ok("stop", job).out
    assert "SIGTERM" in shell.ok("stop", job).out
    assert "is killed" in shell.ok("stop", job).out
    assert shell.store.get(job).stop_level == 3


def test_stop_now(shell: Shell) -> None:
    job = shell.submit()
    assert "is killed" in shell.ok("stop", job, "--now").out


def test_a_queued_job_is_stopped_at_once(shell: Shell) -> None:
    shell.submit()
    waits = shell.submit()
    assert "removed from the queue" in shell.ok("stop", waits).out
    assert shell.ok("show", waits, "--json").json["state"] == "stopped"
    assert "has already ended (stopped)" in shell.refused("stop", waits)


def test_resume(shell: Shell) -> None:
    job = shell.ended()
    assert "job 1 is starting" in shell.ok("resume", job.id, "--max_train_steps=9").out
    shown = shell.ok("show", job.id, "--json").json
    assert shown["total_steps"] == 9
    assert "resumed after step 3" in [change["reason"] for change in shown["history"]]


def test_a_resume_that_makes_no_sense(shell: Shell) -> None:
    running = shell.submit()
    assert "is starting; there is nothing to resume" in shell.refused("resume", running)
    done = shell.ended(State.COMPLETED, step=5)
    said = shell.refused("resume", done.id)
    assert "has already trained 5 of 5 steps" in said
    assert f"resume {done.id} --max_train_steps=N" in said
    assert 'unknown key "max_train_step"' in shell.refused("resume", done.id, "--max_train_step=9")
    assert '"x" is neither a job id nor a --key' in shell.refused("resume", done.id, "x")
    assert shell.store.get(done.id).state is State.COMPLETED


def test_resume_when_the_pictures_are_gone(shell: Shell) -> None:
    job = shell.ended()
    Path(shell.job_values["dataset"]).rename(shell.home / "elsewhere")
    assert "no such dataset folder" in shell.refused("resume", job.id)


def test_remove(shell: Shell) -> None:
    running = shell.submit()
    assert "stop it first" in shell.refused("remove", running)
    kept, gone = shell.ended(), shell.ended()
    assert shell.ok("remove", gone.id).out == f"job {gone.id} removed\n"
    assert not gone.run_dir.root.exists()
    shell.ok("remove", kept.id, "--keep-files")
    assert kept.run_dir.job_file.exists()
    assert [job.id for job in shell.store.all()] == [running]


# -- the machine ------------------------------------------------------------------


def test_gpus_on_a_machine_without(shell: Shell) -> None:
    assert shell.ok("gpus", "--json").json == []
    assert "no GPUs on this machine" in shell.ok("gpus").out


_GPU_KEYS = (
    "index",
    "uuid",
    "name",
    "memory_total",
    "memory_used",
    "utilisation",
    "temperature",
    "power",
    "job",
)


def test_gpus_and_who_holds_them(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0, 1)
    job = shell.submit(device="auto", num_processes=1)
    first, second = shell.ok("gpus", "--json").json
    assert {
        "index": 0,
        "uuid": "GPU-0abc",
        "name": "NVIDIA H200",
        "memory_total": 140 * GIB,
        "memory_used": GIB // 2,
        "utilisation": 97,
        "temperature": 61,
        "power": 512.3,
        "job": job,
    } == {key: first[key] for key in _GPU_KEYS}
    assert (second["index"], second["job"]) == (1, None)
    lines = shell.ok("gpus").out.splitlines()
    assert "97 %" in lines[1]
    assert "61 °C" in lines[1]
    assert "512 W" in lines[1]


def test_what_the_driver_does_not_say_is_null(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Gpu(index=0, uuid="GPU-0", name="H", memory_total=0, processes=(GpuProcess(4, None),))
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: [silent])
    (gpu,) = shell.ok("gpus", "--json").json
    assert gpu["memory_used"] is gpu["utilisation"] is gpu["temperature"] is gpu["power"] is None
    (process,) = gpu["processes"]
    assert (process["pid"], process["memory"]) == (4, None)
    assert "–" in shell.ok("gpus").out


# -- run: fake ranks, real supervisor ------------------------------------------------------


@pytest.fixture
def running_shell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setattr("jobs.backends.local.dispatch._start_supervisor", start_supervisor)
    monkeypatch.setattr("tui.cli.job.follow._LOOK_EVERY", 0.03)
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.03")
    yield shell
    end([p for job in shell.store.all() for p in with_run_id(job.run_id)], grace=0)


def test_run_follows_a_job_to_its_end(running_shell: Shell) -> None:
    result = running_shell("run", running_shell.job_file())
    assert result.status == 0
    assert result.out.splitlines() == [
        "starting after step 0",
        *(f"step {n}/5" for n in range(1, 6)),
        "completed",
    ]
    notes = result.err.splitlines()
    assert "fsdp-tui: training (0 of 5)" in notes
    assert notes[0] == f"fsdp-tui: job 1 · {running_shell.home / 'runs' / '1-t'}"
    assert notes[-1] == "fsdp-tui: completed: trained 5 steps"


def test_run_tells_that_the_job_failed(
    running_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RANKS", "0:crash@1")
    monkeypatch.setenv("FAKE_FAILURE_GRACE", "0.1")
    result = running_shell("run", running_shell.job_file())
    assert result.status == 1
    assert result.err.splitlines()[-1] == (
        "fsdp-tui: failed: rank 0 failed at step 1 during train: ValueError: a bad day"
    )


def test_ctrl_c_stops_the_job_and_run_says_so(running_shell: Shell) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt = threading.Thread(
        target=lambda: (_when_it_trains(running_shell), os.kill(os.getpid(), signal.SIGINT))
    )
    interrupt.start()
    result = running_shell("run", running_shell.job_file(max_train_steps=100_000))
    interrupt.join()
    assert result.status == 3
    assert "stops after the current step, with a checkpoint" in result.err
    assert running_shell.store.get(1).state is State.STOPPED
    assert running_shell.store.get(1).run_dir.latest_checkpoint() is not None
    assert signal.getsignal(signal.SIGINT) is before


def _when_it_trains(shell: Shell) -> None:
    def trains() -> bool:
        jobs = shell.store.all()
        return bool(jobs) and jobs[0].state is State.RUNNING and jobs[0].run_dir.events.exists()

    eventually(trains)


def test_following_the_log_goes_on_until_the_job_ends(running_shell: Shell) -> None:
    job = running_shell.submit(max_train_steps=4)
    result = running_shell.ok("logs", job, "-f", "--rank", 1)
    assert result.out.splitlines()[-1] == "completed"
    assert running_shell.store.get(job).state is State.COMPLETED
