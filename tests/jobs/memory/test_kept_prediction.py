"""Predictions beside runs: kept at their start, compared with what they measured, learnt from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from jobs.errors import UserError
from jobs.launch import auto_room, build_launch, chosen_before, predicted_ddp
from jobs.machine.gpu import Gpu
from jobs.machine.procfs import started_at
from jobs.memory import calibration, question
from jobs.memory.calibration import Calibration, file, read_calibration, record
from jobs.memory.predicted import Predicted
from jobs.queue.states import State
from jobs.run.failure import Cause, Failure, keep_failure
from jobs.run.rundir import RunDir, event
from jobs.service import dry_run
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.strategy import AS_ASKED, Room, Whole, chosen_strategy, launched_strategy
from tests.support.jobs.fake_memory import GIB, predict
from tests.support.paths import FAKE_MEMORY
from tests.support.tui.made_up_runs import add_job, append_events, write_rank
from tests.support.waiting import PATIENCE, eventually
from tui.cli.job.show import show

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Store

PEAKS = {"forward": [100, 110], "backward": [204, 200], "step": [52, 50]}


@pytest.fixture(autouse=True)
def _fake_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "COMMAND", (sys.executable, "-S", str(FAKE_MEMORY)))


def job(**values: Any) -> JobSpec:
    usual = {
        "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
        "dataset": ".",
        "gradient_checkpointing": True,
    }
    return JobSpec.model_validate(usual | values)


def known(spec: JobSpec, strategy: str, ranks: int) -> Predicted:
    """A prediction that is in the cache already."""
    arranged = question.arranged(spec, strategy, ranks, on_gpus=True)
    found = Predicted.of(predict(arranged.to_dict(), ranks, strategy))
    question.remember(question.key_of(arranged), found)
    return found


def simple(**peaks: int) -> Predicted:
    """A prediction of which only the peaks matter."""
    values = predict(job().to_dict(), 2, "fsdp2")
    values["phases"] = [
        {"name": name, "parts": {"activations": peak}} for name, peak in peaks.items()
    ]
    return Predicted.of(values)


def predicting() -> list[threading.Thread]:
    """The threads that predict beside a run; each test waits for its own."""
    return [thread for thread in threading.enumerate() if thread.name == "predict"]


# -- kept ----------------------------------------------------------------------------------


def test_what_is_known_is_there_when_the_run_begins(tmp_path: Path) -> None:
    found, run_dir = known(job(), "fsdp2", 2), RunDir(tmp_path)
    calibration.keep(run_dir, job(), "fsdp2", 2, on_gpus=True)
    assert calibration.read(run_dir) == found
    assert predicting() == []


def test_what_is_not_known_is_predicted_beside_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    calibration.keep(run_dir, job(), "ddp", 2, on_gpus=True)
    for thread in predicting():
        thread.join(PATIENCE)
        assert not thread.is_alive()
    found = calibration.read(run_dir)
    assert found is not None
    assert (found.strategy, found.ranks) == ("ddp", 2)


def test_a_prediction_ends_with_its_supervisor(tmp_path: Path) -> None:
    """It may have minutes to go, and the next job needs the processor."""
    said = tmp_path / "pid"
    busy = f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from jobs.memory import calibration, question\n"
        "from jobs.run.rundir import RunDir\n"
        "from jobs.spec.job_spec import JobSpec\n"
        f"question.COMMAND = (sys.executable, '-S', '-c', {busy!r})\n"
        f"spec = JobSpec.model_validate({job().to_dict()!r})\n"
        f"calibration.keep(RunDir(Path({str(tmp_path)!r})), spec, 'ddp', 2, on_gpus=True)\n"
        f"while not (Path({str(said)!r}).exists() and Path({str(said)!r}).read_text()):\n"
        "    time.sleep(0.01)\n"
    )
    with open(tmp_path / "stderr", "w") as stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, check=True)
    pid = int(said.read_text())
    try:
        eventually(lambda: started_at(pid) is None)  # else it sleeps for ten minutes
        assert (tmp_path / "stderr").read_text() == ""
    finally:
        if started_at(pid) is not None:
            os.kill(pid, signal.SIGKILL)


def test_ranks_that_need_the_processors_get_none(tmp_path: Path) -> None:
    calibration.keep(RunDir(tmp_path), job(), "ddp", 2, on_gpus=False)
    assert predicting() == []
    assert not calibration.path_of(RunDir(tmp_path)).exists()


@pytest.mark.parametrize(
    "values",
    [
        {"pretrained_model_name_or_path": "/no/such/model"},
        {"name": "crash"},
        {"name": "refuse"},
        {"name": "whole"},
    ],
)
def test_no_start_fails_of_it(tmp_path: Path, values: dict[str, Any]) -> None:
    run_dir = RunDir(tmp_path)
    (tmp_path / "prediction.json").write_text("of an attempt before")
    calibration.keep(run_dir, job(**values), "fsdp2", 2, on_gpus=True)
    for thread in predicting():
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert calibration.read(run_dir) is None
    calibration.keep(RunDir(tmp_path / "gone"), job(), "fsdp2", 2, on_gpus=False)


def test_predicted_beside_measured() -> None:
    predicted = simple(load=40, forward=100, backward=200, optimizer=50)
    found = {one.phase: one for one in calibration.compare(predicted, "allocated", PEAKS)}
    assert found["forward"].ratio == pytest.approx(1.10)
    assert found["backward"].ratio == pytest.approx(1.02)
    assert found["optimizer"].measured == (52, 50)
    assert found["load"].ratio is None
    assert all(one.ratio is None for one in calibration.compare(predicted, "rss", PEAKS))


def test_show_has_it_for_people_and_scripts(store: Store, no_gpus: None) -> None:
    one = add_job(store, state=State.COMPLETED)
    calibration._write(
        one.run_dir, simple(forward=100 * GIB, backward=200 * GIB, optimizer=50 * GIB)
    )
    peaks = {name: [n * GIB for n in ranks] for name, ranks in PEAKS.items()}
    append_events(one, event("memory", measure="allocated", peaks=peaks, step=2))
    said = CliRunner().invoke(show, [str(one.id)])
    assert "backward       200 GiB  measured   204 GiB  +2.0 %" in said.output
    facts = json.loads(CliRunner().invoke(show, [str(one.id), "--json"]).output)
    assert facts["prediction"]["phases"][1] == {
        "name": "backward",
        "predicted": 200 * GIB,
        "measured": peaks["backward"],
        "ratio": 1.02,
    }
    other = add_job(store, "other", state=State.COMPLETED)
    facts = json.loads(CliRunner().invoke(show, [str(other.id), "--json"]).output)
    assert facts["prediction"] is None


# -- learnt from ---------------------------------------------------------------------------


def ended(store: Store, name: str, *, device: bool = True, **peaks: int) -> bool:
    """A run of two ranks that ended with these peaks; predicted were 100, 200 and 50."""
    one = add_job(store, name, state=State.RUNNING)
    calibration._write(one.run_dir, simple(forward=100, backward=200, optimizer=50))
    for rank in range(2):
        write_rank(
            one,
            rank,
            allocated=1 if device else None,
            peaks={key: peak - rank for key, peak in peaks.items()},
        )
    return record(one.run_dir)


def test_earlier_runs_say_how_right_predictions_are(store: Store) -> None:
    assert read_calibration() == Calibration()
    assert read_calibration().in_words() == ""
    for number, backward in enumerate((202, 204, 220)):
        assert ended(store, f"job{number}", forward=110, backward=backward, step=50)
    found = read_calibration()
    assert found.peak == (1.01, 1.02, 1.1)
    assert found.phases["forward"] == (1.1, 1.1, 1.1)
    assert found.in_words() == "runs on this machine used 2% more than predicted (3 runs)"
    assert found.factor == 1.1


def test_what_says_nothing_is_not_noted(store: Store, tmp_path: Path) -> None:
    assert not ended(store, "cpu", device=False, forward=1, backward=2, step=3)
    assert not ended(store, "early", forward=100)
    assert not record(RunDir(tmp_path))
    assert not file().exists()


def test_a_damaged_or_odd_file_counts_as_far_as_it_can(store: Store) -> None:
    ended(store, "good", forward=100, backward=190, step=50)
    ended(store, "shared", forward=100, backward=900, step=50)  # is of something else
    with open(file(), "a", encoding="utf-8") as out:
        out.write('{"schema": 99, "peak": 1.5}\n[]\n{"schema": 1, "peak": "x"}\n')
        out.write('{"schema": 1, "peak": 0.95, "phases": [1]}\n{"sche')
    found = read_calibration()
    assert found.peak == (0.95, 0.95)
    assert found.factor == 1.0
    assert found.in_words() == "runs on this machine used 5% less than predicted (2 runs)"


def test_the_file_does_not_grow_for_ever(store: Store) -> None:
    line = json.dumps({"schema": 1, "peak": 1.5, "phases": {}}) + "\n"
    file().write_text(line * 500)
    ended(store, "one", forward=100, backward=200, step=50)
    assert len(file().read_text().splitlines()) == 51
    assert read_calibration().peak[-1] == 1.0


# -- strategy: auto ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "strategy", "why"),
    [
        (Whole(70 << 30, 80 << 30, True), "ddp", "predicted: at most 70.0 of 80.0 GiB"),
        (Whole(90 << 30, 80 << 30, False), "fsdp2", "predicted: up to 90.0 of 80.0 GiB"),
        (None, "ddp", "rough estimate"),
    ],
)
def test_auto_goes_by_the_prediction_where_there_is_one(
    whole: Whole | None, strategy: str, why: str
) -> None:
    chosen, reason = chosen_strategy(job(num_processes=2), Room(10**9, 80 << 30, whole))
    assert chosen == strategy
    assert why in reason


def test_auto_asks_nobody_when_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(num_processes=2)
    gpus = [Gpu(n, f"GPU-{n}", "H100", 80 * GIB, n * 60 * GIB) for n in range(2)]
    monkeypatch.setattr(question, "COMMAND", ("/does/not/exist",))
    assert predicted_ddp(spec, gpus) is None
    found = known(spec, "ddp", 2)
    assert predicted_ddp(spec, []) is None
    whole = predicted_ddp(spec, gpus)
    assert whole == Whole(found.device[1], 20 * GIB, found.device[1] <= 20 * GIB)


def test_no_launch_fails_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, gpus = job(num_processes=2), [Gpu(0, "GPU-0", "H100", 80 * GIB, 0)]
    known(spec, "ddp", 2)
    monkeypatch.setattr("jobs.launch.read_calibration", lambda: 1 / 0)
    assert predicted_ddp(spec, gpus) is None


def test_what_the_form_asked_is_known_when_the_job_starts() -> None:
    """A queued job says what the form leaves open, and is the same job."""
    spec = job(num_processes=2)
    assert spec.cache_text_embeddings is None
    found = known(spec, "ddp", 2)
    queued = settle(spec)
    assert queued.cache_text_embeddings
    assert question.recall(queued, "ddp", 2, on_gpus=True) == found


def test_a_launch_knows_the_prediction(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., Path]
) -> None:
    model = make_model()
    config = {"_class_name": "FluxTransformer2DModel"}
    (model / "transformer" / "config.json").write_text(json.dumps(config))
    spec = job(num_processes=2, pretrained_model_name_or_path=str(model))
    gpus = [Gpu(n, f"GPU-{n}", "H100", 80 * GIB, 0) for n in range(2)]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)
    monkeypatch.setattr("jobs.launch.count_parameters", lambda folder: 4 * 10**9)
    room = auto_room(spec, [gpu.uuid for gpu in gpus])
    assert room is not None
    assert room.whole is None
    known(spec, "ddp", 2)
    room = auto_room(spec, [gpu.uuid for gpu in gpus])
    assert room is not None
    assert room.whole is not None
    assert room.whole.fits


def test_a_restart_goes_on_with_what_auto_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is known by then, unless it has other ranks or says what it wants."""
    spec, run_dir, gpus = job(num_processes=2), RunDir(tmp_path), ["GPU-0", "GPU-1"]
    rooms = iter([Room(10**9, 80 << 30), Room(10**12, 80 << 30), Room(10**12, 80 << 30)])
    monkeypatch.setattr("jobs.launch.auto_room", lambda spec, gpus: next(rooms))

    def launch(one: JobSpec, on: list[str]) -> tuple[str, tuple[str, str]]:
        started = build_launch(one, run_dir, gpus=on, run_id="r")
        record = {"environment": started.environment, "gpus": on}
        run_dir.launch_file.write_text(json.dumps(record))
        return started.strategy, launched_strategy(started.environment)

    first, (strategy, told) = launch(spec, gpus)
    assert first == strategy == "ddp"
    assert [launch(spec, gpus) for _ in range(2)] == [
        ("ddp", ("ddp", f"{told}, as on its first launch"))
    ] * 2
    more = spec.model_copy(update={"num_processes": 4})
    assert launch(more, [*gpus, "GPU-2", "GPU-3"])[0] == "fsdp2", "it is decided anew"
    asked = more.model_copy(update={"strategy": "ddp"})
    assert launch(asked, [*gpus, "GPU-2", "GPU-3"]) == ("ddp", ("ddp", "set in job"))


@pytest.mark.parametrize(
    ("environment", "gpus", "changes", "kept"),
    [
        ({"FSDP_TUI_STRATEGY": "ddp"}, 2, {}, "ddp"),
        ({"FSDP_TUI_STRATEGY": "fsdp2"}, 2, {}, "fsdp2"),
        ({"FSDP_TUI_STRATEGY": "ddp: it fits"}, 2, {}, "ddp"),  # as older launches have it
        ({"FSDP_TUI_STRATEGY": "hsdp"}, 2, {}, None),  # no choice of auto
        ({"FSDP_TUI_STRATEGY": "ddp", "FSDP_TUI_STRATEGY_REASON": AS_ASKED}, 2, {}, None),
        ({"FSDP_TUI_STRATEGY": "ddp"}, 4, {}, None),
        ({"FSDP_TUI_STRATEGY": "ddp"}, 2, {"strategy": "fsdp2"}, None),
        ({}, 2, {}, None),
        (None, 2, {}, None),
    ],
)
def test_what_auto_chose_is_read_from_the_last_launch(
    tmp_path: Path,
    environment: dict[str, str] | None,
    gpus: int,
    changes: dict[str, Any],
    kept: str | None,
) -> None:
    record = {"environment": environment, "gpus": [f"GPU-{n}" for n in range(gpus)]}
    RunDir(tmp_path).launch_file.write_text(json.dumps(record))
    chosen = chosen_before(job(num_processes=2, **changes), RunDir(tmp_path))
    assert (chosen and chosen[0]) == kept
    assert chosen is None or chosen[1].endswith(", as on its first launch")


# -- two real steps ------------------------------------------------------------------------


class FakeRuns:
    """Stands in for the queue: a submitted job trains, or fails, and is gone when it is removed."""

    def __init__(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, end: tuple[State, str]
    ) -> None:
        self.store, self.specs, self.end, self.cause = store, [], end, Cause.OTHER
        monkeypatch.setattr(dry_run, "plan_submit", self.plan)
        monkeypatch.setattr("jobs.service.carry_out", self.carry_out)
        monkeypatch.setattr("jobs.service.refresh", self.refresh)

    def plan(self, store: Store, spec: JobSpec) -> JobSpec:
        self.specs.append(spec)
        return spec

    def carry_out(self, store: Store, plan: JobSpec) -> Any:
        one = add_job(store, plan.name, state=State.RUNNING)
        self.root = one.run_dir.root
        if self.end[0] is State.RUNNING:
            append_events(
                one,
                event("start", strategy="fsdp2", strategy_reason="", step=0),
                event("step", step=1, loss=1.0),
                event("step", step=2, loss=1.0),
                event("memory", measure="allocated", peaks=PEAKS, step=2),
            )
        else:
            keep_failure(one.run_dir, Failure(self.end[1], self.cause))
            store.change(one.id, *self.end)
        return one

    def refresh(self, store: Store) -> None:
        for one in store.all():
            if one.stop_level == 3 and not one.state.ended:
                store.change(one.id, State.STOPPED, "killed")


def test_two_steps_are_measured_and_nothing_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.service.dispatch", lambda store: None)
    runs = FakeRuns(store, monkeypatch, (State.RUNNING, ""))
    spec = job(
        validation_prompts=[{"prompt": "a cat"}],
        validation_scores=["clip_t"],
        checkpoints_best_by="clip_t",
        checkpointing_steps=5,
    )
    told: list[str] = []
    found = dry_run.measure(store, spec, told.append)
    assert (found.strategy, found.measure, found.out_of_memory) == ("fsdp2", "allocated", False)
    assert found.peaks == PEAKS
    (ran,) = runs.specs
    assert (ran.validation_prompts, ran.checkpointing_steps) == ([], 0)
    assert ran.max_train_steps > 1000, "its end would save"
    assert store.all() == []
    assert not runs.root.exists()
    assert told


@pytest.mark.parametrize(
    ("reason", "out_of_memory"),
    [
        ("rank 1 ran out of GPU memory in backward", True),
        ("rank 0 lost its way", False),
    ],
)
def test_a_dry_run_that_fails_is_told_and_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch, reason: str, out_of_memory: bool
) -> None:
    runs = FakeRuns(store, monkeypatch, (State.FAILED, reason))
    if out_of_memory:
        runs.cause = Cause.GPU_MEMORY
        found = dry_run.measure(store, job())
        assert (found.out_of_memory, found.reason) == (True, reason)
    else:
        with pytest.raises(Exception, match="lost its way"):
            dry_run.measure(store, job())
    assert store.all() == []
    assert not runs.root.exists()


def test_a_dry_run_that_someone_stops_is_no_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRuns(store, monkeypatch, (State.STOPPED, "asked to"))
    with pytest.raises(UserError, match="stopped"):
        dry_run.measure(store, job())


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_dry_run_whose_terminal_is_closed_leaves_no_endless_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("jobs.service.dispatch", lambda store: None)
    runs = FakeRuns(store, monkeypatch, (State.RUNNING, ""))
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit):
            dry_run.measure(store, job(), lambda text: os.kill(os.getpid(), number))
        assert signal.getsignal(number) == signal.SIG_IGN, "as it was"
    finally:
        signal.signal(number, before)
    assert store.all() == []
    assert not runs.root.exists()
