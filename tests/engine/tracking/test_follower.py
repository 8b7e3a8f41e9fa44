"""A tracker gets all of a run once, and nothing that goes wrong with it reaches the run."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import accelerate.tracking
import pytest
import yaml
from accelerate.tracking import GeneralTracker
from PIL import Image

from engine.ranks.telemetry import Telemetry
from engine.tracking import follower
from engine.tracking.follower import Follower
from jobs.run.rundir import RankStatus, RunDir, event
from jobs.spec.keys.tracking import Tracker
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET = "0123456789abcdef0123456789abcdef"
GIB = 1 << 30
VALUES = {
    "name": "cats",
    "pretrained_model_name_or_path": "/no/model",
    "dataset": "/no/data",
    "report_to": "wandb",
}


class Stub(GeneralTracker):
    """A tracker that remembers what it is sent; a test may let it fail or hang."""

    requires_logging_directory = False
    opened: ClassVar[list[Stub]] = []
    trouble: ClassVar[dict[str, Callable[..., None]]] = {}

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__(_blank=True)
        self.project, self.options = project, options
        self.config: dict[str, Any] = {}
        self.sent: list[tuple[int | None, str, float]] = []
        self.images: list[tuple[int | None, str]] = []
        self.finished = False

    def start(self) -> None:
        self._may("start", self.options)
        self.opened.append(self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int | None = None, **more: Any) -> None:
        self._may("log", step)
        self.sent += [(step, name, value) for name, value in values.items()]

    def log_images(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.images += [(step, name) for name in values]

    def finish(self) -> None:
        self._may("finish")
        self.finished = True

    def _may(self, what: str, *words: Any) -> None:
        if what in self.trouble:
            self.trouble[what](*words)


class Run:
    """A run directory in which a test writes events."""

    def __init__(self, root: Path) -> None:
        self.dir = RunDir(root / "7-cats")
        self.dir.create()
        self.dir.tracking.mkdir()
        self.dir.job_file.write_text(yaml.safe_dump(VALUES))

    def say(self, kind: str, **values: Any) -> None:
        with open(self.dir.events, "a", encoding="utf-8") as file:
            file.write(event(kind, **values))

    def steps(self, *numbers: int) -> None:
        for step in numbers:
            self.say("step", step=step, loss=step / 10, lr=1e-4, peak_bytes=2 * GIB)

    def follow(self, name: str = "wandb") -> int:
        return Follower(self.dir, name).run()

    def warning(self) -> str:
        path = self.dir.tracker_warning("wandb")
        return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follower, "POLL_EVERY", 0.01)
    monkeypatch.setattr(follower, "_GRACE", 0.0)
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Stub)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(Stub, "opened", [])
    monkeypatch.setattr(Stub, "trouble", {})
    return Run(tmp_path)


def losses(tracker: Stub) -> list[tuple[int | None, float]]:
    return [(step, value) for step, name, value in tracker.sent if name == "train/loss"]


def test_the_trackers_are_those_of_accelerate() -> None:
    assert set(get_args(Tracker)) == set(accelerate.tracking.LOGGER_TYPE_TO_CLASS)


def test_a_tracker_gets_scalars_samples_memory_and_the_job_s_keys(run: Run) -> None:
    gone = RankStatus(1, 1, 0.0, "h", "cuda:1", "train", 2, 0.0, 0.0, allocated=3 * GIB, rss=GIB)
    run.dir.rank_file(1).write_text(gone.to_json())
    run.dir.rank_file(0).write_text(replace(gone, rank=0, allocated=None).to_json())
    (run.dir.samples / "step-2").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(run.dir.samples / "step-2" / "00.png")
    run.say("phase", name="train", state="begin")
    run.say("start", step=0)
    run.steps(1, 2)
    run.say("validation", step=2, loss=0.5, levels=[[0.25, 0.4], [0.75, 0.6]])
    run.say("sample", step=2, directory="x", files=["00.png"])
    run.say("scores", step=2, clip_t=0.25, clip_i=None, dino_i=0.5, samples=1)
    run.say("end", reason="completed", step=2)
    assert run.follow() == 0
    (tracker,) = Stub.opened
    assert tracker.project == "fsdp-tui"
    assert tracker.options["name"] == "7-cats"
    assert tracker.config["name"] == "cats"
    assert "dataset" not in tracker.config, "it is not public"
    assert tracker.sent == [
        (1, "train/loss", 0.1),
        (1, "train/learning_rate", 1e-4),
        (1, "memory/peak_gib", 2.0),
        (2, "train/loss", 0.2),
        (2, "train/learning_rate", 1e-4),
        (2, "memory/peak_gib", 2.0),
        (2, "validation/loss", 0.5),
        (2, "validation/loss_at_0.250", 0.4),
        (2, "validation/loss_at_0.750", 0.6),
        (2, "validation/clip_t", 0.25),
        (2, "validation/dino_i", 0.5),
        (2, "memory/rank0_gib", 1.0),
        (2, "memory/rank1_gib", 3.0),
    ]
    assert tracker.images == [(2, "samples/0")]
    assert tracker.finished
    assert run.warning() == ""


def test_a_resumed_run_continues_its_curve(run: Run) -> None:
    run.say("start", step=0)
    run.steps(1, 2, 3)
    with open(run.dir.events, "a", encoding="utf-8") as file:
        file.write('{"t": 1, "kind": "st')  # rank 0 was killed here
    assert run.follow() == 0
    with open(run.dir.events, "a", encoding="utf-8") as file:
        file.write("\n")
    run.say("start", step=2)  # from an earlier checkpoint: step 3 is repeated
    run.steps(3, 4)
    assert run.follow() == 0
    first, second = Stub.opened
    assert second.options["id"] == first.options["id"]
    assert second.options["resume"] == "allow"
    assert losses(first) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert losses(second) == [(4, 0.4)]


def test_the_end_of_an_earlier_attempt_is_not_the_end_of_this_one(run: Run) -> None:
    run.say("end", reason="stopped", step=0)
    run.dir.launch_file.write_text(json.dumps({"events_offset": run.dir.events.stat().st_size}))
    one = Follower(run.dir, "wandb")
    one._read()
    assert not one.ended
    run.say("end", reason="completed", step=0)
    one._read()
    assert one.ended


def test_what_a_tracker_raises_is_said_once_and_without_secrets(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(step: int) -> None:
        if step in (1, 2):
            raise ConnectionError(f"403 for key {SECRET} at https://me:pass@host/x\nmore")

    Stub.trouble["log"] = refuse
    run.say("start", step=0)
    run.steps(1, 2, 3)
    assert run.follow() == 0
    assert losses(Stub.opened[0]) == [(3, 0.3)]
    said = "wandb did not take an event: ConnectionError: 403 for key (not shown) at https"
    assert run.warning().startswith(said)
    assert run.warning().endswith("; training is not affected\n")
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("Traceback") == 1
    assert SECRET not in printed.out + printed.err + run.warning()
    assert "pass@" not in printed.out + printed.err + run.warning()


def test_without_login_or_network_wandb_records_offline(run: Run) -> None:
    def no_network(options: dict[str, Any]) -> None:
        if options.get("mode") != "offline":
            raise TimeoutError("no answer")

    Stub.trouble["start"] = no_network
    run.say("start", step=0)
    run.steps(1)
    assert run.follow() == 0
    assert losses(Stub.opened[0]) == [(1, 0.1)]
    assert "wandb sync" in run.warning()


def test_what_could_not_be_sent_is_sent_by_the_next_attempt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: dict[str, Any]) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setenv("WANDB_MODE", "online")
    Stub.trouble["start"] = fail
    run.say("start", step=0)
    run.steps(1)
    assert run.follow() == 1
    assert run.warning().startswith("wandb stopped: TimeoutError: no answer")
    Stub.trouble.clear()
    run.say("start", step=1)
    run.steps(2)
    assert run.follow() == 0
    assert losses(Stub.opened[0]) == [(1, 0.1), (2, 0.2)]


def test_a_tracker_that_hangs_is_named_and_ends_with_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, ended = threading.Event(), threading.Event()
    Stub.trouble["log"] = lambda step: released.wait(PATIENCE) and None
    monkeypatch.setattr(follower, "STUCK", 0.0)
    # In place of `os._exit`, which would end the test.
    monkeypatch.setattr(follower, "_leave", ended.set)
    run.say("start", step=0)
    run.steps(1)
    thread = threading.Thread(target=run.follow)
    thread.start()
    try:
        eventually(lambda: run.warning().startswith("wandb has not responded for 0 s; training is"))
        monkeypatch.setattr(follower, "FLUSH", 0.0)
        eventually(ended.is_set)
    finally:
        released.set()
        thread.join()


def test_tensorboard_drops_the_steps_after_the_one_that_a_run_resumes_from(run: Run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run.dir.samples / "step-2").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(run.dir.samples / "step-2" / "00.png")
    run.say("start", step=0)
    run.steps(1, 2, 3)
    run.say("sample", step=2, directory="x", files=["00.png"])
    assert run.follow("tensorboard") == 0
    run.say("start", step=2)
    run.say("step", step=3, loss=9.0)
    assert run.follow("tensorboard") == 0
    assert not run.dir.tracker_warning("tensorboard").exists()
    kept = EventAccumulator(str(run.dir.tracking / "tensorboard")).Reload()
    assert [(s.step, round(s.value, 3)) for s in kept.Scalars("train/loss")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 9.0),
    ]
    assert [image.step for image in kept.Images("samples/0")] == [2]


def test_rank_0_says_what_a_tracker_warns_of_and_says_it_once(run: Run) -> None:
    run.dir.tracker_warning("wandb").write_text("wandb hangs\n")
    main = Telemetry(run.dir, 0)
    main._emit_warnings()
    main._emit_warnings()
    main.close()
    said = [json.loads(line) for line in run.dir.events.read_text().splitlines()]
    assert [one["message"] for one in said if one["kind"] == "warning"] == ["wandb hangs"]
