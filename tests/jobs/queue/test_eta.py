"""How long a run still takes is told as it will be: steps, and what follows them."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.queue.eta import AFTER, TRAIN, Costs, Counted, Habits, habits_of, time_left, whole_time
from jobs.queue.job_list import Progress, progress
from jobs.queue.states import State
from jobs.run.eventlog import EventLog, read_phases
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.steps import Rhythm
from tests.support.tui.made_up_runs import add_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec

FULL: dict[str, Any] = {
    "model_type": "full",
    "pretrained_model_name_or_path": "/m",
    "dataset": "/d",
}
SAMPLES = {"validation_prompts": ["a", "b", "c", "d"]}
RECORDING = Path(__file__).with_name("recorded_run.txt")
RECORDED = (
    FULL
    | SAMPLES
    | {"model_type": "lora", "max_train_steps": 160, "validation_steps": 20}
    | {"validation_fraction": 0.2, "validation_loss_steps": 20, "checkpointing_steps": 40}
)


@dataclass
class Run:
    """Plays a run by a clock of its own, as the engine does, and writes what that writes.

    Attributes:
        seconds: What takes how long: `step`, what follows steps, `copy` of a save that goes on
            behind training.
        noise: By how much, at most, each takes more or less.
    """

    spec: JobSpec
    seconds: dict[str, float]
    noise: float = 0.1
    warm_up: float = 30.0
    now: float = 1e9
    lines: list[tuple[float, str]] = field(default_factory=list)

    def play(self) -> float:
        """Write everything; return when it has ended."""
        dice = random.Random(3)
        steps = self.spec.max_train_steps or 0
        self._write("start", step=0, total_steps=steps)
        self._write("phase", name="train", state="begin", done=0, total=steps)
        for step in range(steps + 1):
            if step:
                took = self.seconds["step"] * dice.uniform(1 - self.noise, 1 + self.noise)
                took += self.warm_up if step == 1 else 0
                self.now += took
                self._write("step", step=step, loss=0.5, seconds=took * 0.9)
            for what in Rhythm.of(self.spec).after(step, steps):
                last = what == "save" and step == steps
                name = "copy" if what == "save" and "copy" in self.seconds and not last else what
                took = self.seconds[name] * dice.uniform(1 - self.noise, 1 + self.noise)
                took += (
                    self.warm_up if what == "sample" and step <= self.spec.validation_steps else 0
                )
                self._phase(name, took)
                if what == "save":
                    self._write("checkpoint", step=step, seconds=self.seconds["save"])
        self._write("end", reason="completed", step=steps)
        return self.now

    def _phase(self, name: str, took: float) -> None:
        begun, parts = self.now, 4
        self._write("phase", name=name, state="begin", done=0, total=parts)
        for part in range(1, parts):
            self.now = begun + took * part / parts
            left = took * (parts - part) / parts if part > 1 else None
            facts = {"done": part, "total": parts, "seconds_left": left}
            self._write("phase", name=name, state="progress", **facts)
        self.now = begun + took
        facts = {"done": parts, "total": parts, "seconds": took}
        self._write("phase", name=name, state="end", **facts)

    def _write(self, kind: str, **facts: Any) -> None:
        self.lines.append((self.now, json.dumps({"t": self.now, "kind": kind, **facts}) + "\n"))


RUNS = {
    "sampling takes most": (
        SAMPLES | {"max_train_steps": 60, "validation_steps": 2, "checkpointing_steps": 20},
        {"step": 0.6, "sample": 27.0, "save": 3.0, "export": 3.0},
    ),
    "everything, saved behind training": (
        SAMPLES
        | {"max_train_steps": 400, "validation_steps": 50, "checkpointing_steps": 80}
        | {"validation_loss_steps": 40, "validation_fraction": 0.1},
        {"step": 2.0, "sample": 60.0, "validate": 20.0, "save": 90.0, "copy": 4.0, "export": 90.0},
    ),
    "seldom": (
        SAMPLES
        | {"max_train_steps": 3000, "validation_steps": 600, "validation_on_startup": True}
        | {"checkpointing_steps": 500},
        {"step": 1.0, "sample": 300.0, "save": 40.0, "export": 40.0},
    ),
}


def moments(run: Run, path: Path) -> Iterator[float]:
    """Let a run's file grow, a line at a time; yield the moment after each."""
    with open(path, "w", encoding="utf-8") as file:
        for t, line in run.lines:
            file.write(line)
            file.flush()
            yield t


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("follows", [True, False], ids=["followed", "read now and then"])
def test_the_time_left_is_right_from_the_second_sampling_on(
    store: Store, name: str, follows: bool
) -> None:
    keys, seconds = RUNS[name]
    spec = load_spec(None, FULL | keys, ignoring=("pretrained_model_name_or_path", "dataset"))
    steps = spec.max_train_steps or 0
    job = add_job(store, state=State.RUNNING, total_steps=steps, job_file=dump_spec(spec))
    run = Run(spec, seconds)
    end = run.play()
    whole, log = end - run.lines[0][0], EventLog(job.run_dir.events)
    samplings, looked, worst, told_at_least = 0, 0, 0.0, False
    for number, now in enumerate(moments(run, job.run_dir.events)):
        samplings += '"sample", "state": "end"' in run.lines[number][1]
        log.poll()
        if number % 7 and not follows:
            continue  # reading all of it anew each time takes a while
        at = progress(job, log if follows else None, now)
        if at.eta is None or end == now:
            continue
        told_at_least |= bool(at.eta_unknown)
        assert at.eta == pytest.approx(sum(at.eta_parts.values()))
        if samplings < 2:
            continue
        looked += 1
        assert "sample" not in at.eta_unknown
        # Of the last moments, a part of the whole.
        worst = max(worst, abs(at.eta - (end - now)) / max(end - now, 0.05 * whole))
    assert looked > 20
    assert worst < 0.15
    assert told_at_least, "as long as no sampling was seen"


def recorded_events() -> Iterator[dict[str, Any]]:
    """Return the events of a run that was recorded, as far as the time left goes by them."""
    step = 0
    for line in RECORDING.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        t, kind, *facts = line.split()
        event: dict[str, Any] = {"t": 1e9 + float(t), "kind": kind}
        if kind == "start":
            event |= {"step": 0, "total_steps": RECORDED["max_train_steps"]}
        elif kind == "step":
            step += 1
            event |= {"step": step, "loss": 0.5, "seconds": float(facts[0])}
        elif kind == "checkpoint":
            event |= {"step": step, "seconds": float(facts[0])}
        elif kind == "end":
            event |= {"step": step, "reason": "completed"}
        else:
            event |= {"kind": "phase", "name": kind, "state": facts[0]}
            event |= {"seconds": float(facts[1])} if facts[0] == "end" else {}
        yield event


def test_of_a_real_run_the_time_left_is_right_but_for_what_the_machine_does(store: Store) -> None:
    """Others used its two cores too: steps took 0.5 to 1.0 s, the same validation 9 to 15 s."""
    spec = load_spec(None, RECORDED, ignoring=("pretrained_model_name_or_path", "dataset"))
    job = add_job(store, state=State.RUNNING, total_steps=160, job_file=dump_spec(spec))
    events = list(recorded_events())
    end, samplings, errors = events[-1]["t"], 0, []
    log = EventLog(job.run_dir.events)
    with open(log.path, "w", encoding="utf-8") as file:
        for event in events[:-1]:
            file.write(json.dumps(event) + "\n")
            file.flush()
            log.poll()
            samplings += (event.get("name"), event.get("state")) == ("sample", "end")
            if samplings >= 2:
                at, left = progress(job, log, event["t"]), end - event["t"]
                assert at.eta is not None
                assert not at.eta_unknown
                errors.append(abs(at.eta - left) / max(left, 0.05 * (end - events[0]["t"])))
    assert samplings == 8
    assert statistics.median(errors) < 0.15
    assert max(errors) < 0.20


def test_what_a_step_takes_counts_no_phase_between_steps(store: Store) -> None:
    spec = load_spec(
        None,
        FULL | SAMPLES | {"max_train_steps": 12, "validation_steps": 1},
        ignoring=("pretrained_model_name_or_path", "dataset"),
    )
    run = Run(spec, {"step": 1.0, "sample": 50.0, "save": 1.0, "export": 1.0}, noise=0)
    run.play()
    job = add_job(store, state=State.RUNNING, total_steps=12, job_file=dump_spec(spec))
    job.run_dir.events.write_text("".join(line for _, line in run.lines))
    log = EventLog(job.run_dir.events).read_all()
    assert log.step_to_step() == pytest.approx(0.9), "as each says itself, if a phase is between"
    assert log.usual_seconds("sample") == pytest.approx(50.0)


STEPS = st.integers(1, 60)
RHYTHMS = st.builds(
    Rhythm,
    st.dictionaries(st.sampled_from(AFTER), st.integers(0, 20)),
    st.booleans(),
    st.dictionaries(st.sampled_from(AFTER), st.fractions(Fraction(1, 1000), 20)),
).flatmap(lambda rhythm: st.floats(0.01, 100).map(rhythm.counted))


@given(draws=st.integers(1, 500), batch=st.integers(1, 64), steps=STEPS, thirds=st.integers(1, 9))
def test_what_is_due_after_an_epoch_follows_the_step_that_completes_it(
    draws: int, batch: int, steps: int, thirds: int
) -> None:
    epochs = Fraction(thirds, 3)
    rhythm = Rhythm({"save": 0}, epochs={"save": epochs}).counted(draws / batch)
    saved = [step for step in range(1, steps) if rhythm.after(step, steps)]
    drawn = [step * batch // (draws * epochs) for step in range(steps)]
    assert saved == [step for step in range(1, steps) if drawn[step] > drawn[step - 1]]


def test_of_epochs_that_are_not_counted_nothing_is_told(store: Store) -> None:
    keys = {"num_train_epochs": 4, "checkpointing_steps": "2 epochs", "validation_steps": "epoch"}
    spec = load_spec(None, FULL | SAMPLES | keys, ignoring=("pretrained_model_name_or_path",))
    job = add_job(store, state=State.RUNNING, total_steps=0, job_file=dump_spec(spec))
    habits = habits_of(job.run_dir)
    assert habits is not None
    costs = Costs(1.0, dict.fromkeys(AFTER, 5.0), 5.0)
    unknown = whole_time(habits.counted(Counted.read(job.run_dir)), costs, 50)
    assert unknown is not None
    assert set(unknown.unknown) == {"save", "sample"}
    job.run_dir.rank_file(0).parent.mkdir(parents=True, exist_ok=True)
    job.run_dir.rank_file(0).write_text('{"total_steps": 50, "steps_per_epoch": 12.5}')
    told = whole_time(habits.counted(Counted.read(job.run_dir)), costs, 50)
    assert told is not None
    assert (told.parts, told.unknown) == ({TRAIN: 50, "save": 10, "sample": 20, "export": 5}, ())


@given(rhythm=RHYTHMS, steps=STEPS, done=st.integers(0, 70))
def test_what_is_counted_is_what_follows_each_step(rhythm: Rhythm, steps: int, done: int) -> None:
    counted: dict[str, int] = {}
    for step in range(done + 1, steps + 1):
        for what in rhythm.after(step, steps):
            counted[what] = counted.get(what, 0) + 1
    assert rhythm.count(done, steps) == counted


@given(rhythm=RHYTHMS, steps=STEPS, each=st.floats(0.1, 10))
def test_a_job_takes_its_steps_and_what_follows_them(
    rhythm: Rhythm, steps: int, each: float
) -> None:
    costs = Costs(1.0, dict.fromkeys(AFTER, each), each, start=5.0)
    left = whole_time(Habits(rhythm, False, {}), costs, steps)
    assert left is not None
    follow = sum(len(rhythm.after(step, steps)) for step in range(steps + 1))
    assert left.seconds == pytest.approx(5.0 + steps + each * follow)
    nothing = whole_time(Habits(rhythm, False, {}), Costs(1.0), steps)
    assert nothing is not None
    assert set(nothing.unknown) == set(rhythm.every)


def event_log(path: Path, *events: dict[str, Any]) -> EventLog:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return EventLog(path).read_all()


@pytest.mark.parametrize(
    ("phase", "now", "left"),
    [
        # After step 10 of 20 a save (3 s), the validation loss (5 s) and samples (20 s) follow;
        # after the last step the same once more, and an export (3 s).
        (None, 0.0, 28.0),
        ({"name": "copy", "state": "begin"}, 1.0, 2.0 + 5 + 20),
        ({"name": "save", "state": "end", "seconds": 3.0}, 0.0, 25.0),
        ({"name": "validate", "state": "begin"}, 0.0, 25.0),
        ({"name": "sample", "state": "begin"}, 4.0, 16.0),
        ({"name": "sample", "state": "progress", "seconds_left": 7.0}, 2.0, 5.0),
        ({"name": "sample", "state": "end", "seconds": 20.0}, 0.0, 0.0),
        ({"name": "resume", "state": "begin"}, 0.0, 0.0),
    ],
)
def test_of_what_follows_the_present_step_only_the_rest_counts(
    tmp_path: Path, phase: dict[str, Any] | None, now: float, left: float
) -> None:
    rhythm = Rhythm({"save": 10, "validate": 10, "sample": 10, "export": 0})
    costs = Costs(1.0, {"save": 3.0, "validate": 5.0, "sample": 20.0, "export": 3.0}, 3.0)
    step = {"t": 1000.0, "kind": "step", "step": 10, "loss": 1.0, "seconds": 1.0}
    more = [{"t": 1000.0, "kind": "phase", **phase}] if phase else []
    log = event_log(tmp_path / "events", step, *more)
    told = time_left(log, Habits(rhythm, False, {}), costs, 20, 1000.0 + now)
    assert told is not None
    assert told.seconds == pytest.approx(10 + 3 + 5 + 20 + 3 + left)


def test_the_first_sampling_says_for_the_next_ones(tmp_path: Path) -> None:
    rhythm = Rhythm({"sample": 10, "export": 0})
    habits = Habits(rhythm, small=True, values={})
    step = {"t": 100.0, "kind": "step", "step": 10, "loss": 1.0, "seconds": 1.0}
    begin = {"t": 100.0, "kind": "phase", "name": "sample", "state": "begin"}
    half = {**begin, "t": 130.0, "state": "progress", "seconds_left": 30.0}
    log = event_log(tmp_path / "events", step)
    unknown = time_left(log, habits, Costs.of(log), 20, 100.0)
    assert unknown is not None
    assert (unknown.seconds, unknown.unknown) == (10.0, ("sample",)), "a LoRA's export is nothing"
    log = event_log(tmp_path / "events", step, begin, half)
    told = time_left(log, habits, Costs.of(log), 20, 130.0)
    assert told is not None
    assert (told.parts, told.unknown) == ({TRAIN: 10.0, "sample": 30.0 + 60.0}, ())


def test_long_ago_phases_are_read_once_and_then_only_what_is_new(store: Store) -> None:
    keys = SAMPLES | {"max_train_steps": 900, "validation_steps": 400}
    spec = load_spec(None, FULL | keys, ignoring=("pretrained_model_name_or_path", "dataset"))
    run = Run(spec, {"step": 1.0, "sample": 50.0, "save": 1.0, "export": 1.0}, noise=0, warm_up=0)
    run.play()
    job = add_job(store, state=State.RUNNING, total_steps=900, job_file=dump_spec(spec))
    half = len(run.lines) // 2
    job.run_dir.events.write_text("".join(line for _, line in run.lines[:half]))
    log = read_phases(job.run_dir.events)
    assert (log.steps, log.usual_seconds("sample")) == ([], pytest.approx(50.0))
    at = progress(job, now=run.lines[half - 1][0])
    assert at.eta_parts["sample"] == pytest.approx(100.0 if at.step < 800 else 50.0)
    job.run_dir.events.write_text("".join(line for _, line in run.lines))
    assert len(read_phases(job.run_dir.events, log).took["sample"]) == 3


def test_a_job_whose_file_says_nothing_counts_steps(store: Store) -> None:
    for text in ("", "[]", "validation_steps: [", "validation_steps: x\nvalidation_prompts: 3"):
        job = add_job(store, state=State.RUNNING, job_file=text)
        habits = habits_of(job.run_dir)
        assert habits is None or habits.rhythm.every
        lines = [
            {"t": 5.0 + n, "kind": "step", "step": n, "loss": 1.0, "seconds": 1.0} for n in range(9)
        ]
        log = event_log(job.run_dir.events, *lines)
        assert progress(job, log).eta_parts[TRAIN] == pytest.approx(192.0)


def test_nothing_is_left_of_a_job_that_has_ended(store: Store) -> None:
    job: Job = add_job(store, state=State.COMPLETED)
    event_log(job.run_dir.events, {"t": 5.0, "kind": "step", "step": 9, "loss": 1.0, "seconds": 1})
    assert progress(job) == Progress(9, 1.0, 1.0)
