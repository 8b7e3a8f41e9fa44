"""What a supervisor makes of what it sees: clocks that are set, pauses, files full of nonsense.

The supervisor is the real one, in this process; its launcher and its ranks are made up.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jobs import service
from jobs.backends.local.ranks import LocalRanks
from jobs.backends.local.report import DatabaseReport
from jobs.queue.states import State
from jobs.run.rundir import RankStatus, write_atomic
from jobs.spec.file.load import load_spec
from jobs.supervise import supervisor
from jobs.supervise.port import Attempt
from jobs.supervise.supervisor import Supervisor, judge

if TYPE_CHECKING:
    from jobs.queue.store import Store
    from jobs.spec.job_spec import JobSpec

HANG: int = 600  # seconds


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.wall, self.since_boot = 1e9, 5e3

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.since_boot

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds

    def strftime(self, _: str) -> str:
        return "now"


class Watched:
    """A job of two ranks that wrote their status once, and its supervisor."""

    def __init__(self, store: Store, spec: JobSpec, clock: Clock) -> None:
        self.job = service.submit(store, spec)
        store.change(self.job.id, State.RUNNING, "all ranks are up")
        self.clock = clock
        self.store = store
        report = DatabaseReport(store, self.job)
        self.supervisor = Supervisor(self.job.run_dir, LocalRanks(self.job, report), report)
        self.attempt = Attempt(
            spec=spec,
            command="x",
            launcher=None,
            child=None,
            events_offset=0,
            restarts=0,
            oom_kills=0,
        )
        self.supervisor.watch.timeout = spec.hang_timeout
        for rank in range(2):
            self.write(rank)

    def write(self, rank: int, **changes: Any) -> None:
        """What a rank writes now; no process has its pid."""
        values: dict[str, Any] = {
            "rank": rank,
            "pid": 2**40 + rank,
            "started": 1.0,
            "host": "h",
            "device": "cpu",
            "phase": "train",
            "step": 3,
            "heartbeat": self.clock.wall,
            "progressed": self.clock.wall,
        }
        status = RankStatus(**values | changes)
        write_atomic(self.job.run_dir.rank_file(rank), status.to_json())

    def look(self, *, after: float = 0.2) -> str | None:
        """The supervisor looks, some seconds later; what it says of a hang."""
        self.clock.sleep(after)
        self.supervisor._poll(self.attempt)
        return self.supervisor.hang

    def judged(self) -> str:
        found = judge(self.job.run_dir, self.attempt, stop_level=0)
        assert found.state.ended
        return found.reason


@pytest.fixture
def watched(
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> Watched:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return Watched(store, load_spec(None, job_values | {"hang_timeout": HANG}), clock)


# -- clocks ----------------------------------------------------------------------------------


def test_a_clock_that_is_set_forward_ends_no_job(watched: Watched) -> None:
    assert watched.look() is None
    watched.clock.wall += 365 * 86400
    assert [watched.look() for _ in range(9)] == [None] * 9


def test_a_clock_that_is_set_back_hides_no_hang(watched: Watched) -> None:
    assert watched.look() is None
    watched.clock.wall -= 365 * 86400
    assert any(watched.look(after=5) for _ in range(HANG // 5))


@pytest.mark.parametrize("seconds", [HANG, 86400])
def test_a_pause_ends_no_job(watched: Watched, seconds: int) -> None:
    """A machine that was suspended, a container that was paused: all stood still, nobody looked."""
    assert watched.look() is None
    assert [watched.look(after=seconds) for _ in range(3)] == [None] * 3
    assert watched.look() is None


def test_after_a_pause_a_hang_is_still_found(watched: Watched) -> None:
    assert watched.look() is None
    assert watched.look(after=86400) is None
    looks = [watched.look(after=5) for _ in range(HANG // 5)]
    assert looks[:-1] == [None] * (HANG // 5 - 1)
    assert looks[-1] == f"ranks 0, 1 sent no heartbeat for {HANG} s at step 3 while training"


def test_stillness_counts_up_to_the_timeout_and_any_progress_ends_it(watched: Watched) -> None:
    watched.look()
    assert not any(watched.look(after=5) for _ in range(HANG // 5 - 1))
    watched.write(1, step=4)
    assert not any(watched.look(after=5) for _ in range(HANG // 5 - 1))
    watched.write(1, step=4, progressed=watched.clock.wall + 1)
    assert not any(watched.look(after=5) for _ in range(HANG // 5))
    assert watched.look(after=5) is not None


def test_a_stop_gets_its_grace_whatever_pauses_there_are(watched: Watched) -> None:
    watched.store.raise_stop_level(watched.job.id, 1)
    watched.look()
    assert watched.supervisor.stop_level == 1
    watched.look(after=86400)
    assert watched.supervisor.stop_level == 1
    grace = watched.attempt.spec.stop_grace_seconds
    for _ in range(int(grace / 5) - 1):
        watched.look(after=5)
    assert watched.supervisor.stop_level == 1
    watched.look(after=5)
    watched.look(after=5)
    assert watched.supervisor.stop_level == 2


@pytest.mark.parametrize(
    ("phase", "goes_on", "level"),
    [("save", True, 1), ("copy", True, 1), ("save", False, 2), ("train", True, 2)],
)
def test_a_save_that_goes_on_is_given_its_time(
    watched: Watched, phase: str, goes_on: bool, level: int
) -> None:
    """However long it takes; one that writes nothing for a minute does not."""
    watched.store.raise_stop_level(watched.job.id, 1)
    watched.look()
    for second in range(0, int(watched.attempt.spec.stop_grace_seconds) + 120, 5):
        watched.write(0, phase=phase, progressed=second if goes_on else 0.0)
        watched.look(after=5)
        if watched.supervisor.stop_level > 1:
            break
    assert watched.supervisor.stop_level == level


# -- files with anything in them -------------------------------------------------------------

WRONG: dict[str, str] = {
    "nothing": "",
    "no JSON": "{torn",
    "no object": "[1, 2]",
    "a number": "7",
    "a field is missing": '{"rank": 1}',
    "very deep": "[" * 100_000,
    "a long number": '{"rank": ' + "9" * 5000 + "}",
}
GOOD = {
    "rank": 1,
    "pid": 5,
    "started": 1.0,
    "host": "h",
    "device": "cpu",
    "phase": "train",
    "step": 3,
    "heartbeat": 1e9,
    "progressed": 1e9,
}
WRONG |= {
    f"{name} = {value!r:.20}": json.dumps(GOOD | {name: value})
    for name, value in [
        ("rank", "1"),
        ("rank", 0),
        ("pid", None),
        ("pid", -1),
        ("pid", 2**70),
        ("pid", True),
        ("started", "soon"),
        ("heartbeat", [1]),
        ("heartbeat", float("nan")),
        ("progressed", "x"),
        ("progressed", None),
        ("progressed", float("inf")),
        ("progressed", 10**400),
        ("step", {}),
        ("step", 1.5),
        ("phase", 3),
        ("phase", ["save"]),
        ("rss", "much"),
        ("peaks", [1]),
        ("peaks", {"load": "x"}),
        ("device_uuid", 4),
    ]
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_rank_file_with_anything_in_it_ends_no_job_and_is_named(
    watched: Watched, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.job.run_dir.rank_file(1).write_text(content)
    for _ in range(3):
        assert watched.look() is None
    said = capsys.readouterr().err
    assert said.count("cannot read ranks/1.json: ") == 1, "once, not at every look"
    assert said.count("\n") == 1
    watched.write(1, step=4)
    watched.look()
    assert [s.step for s in watched.job.run_dir.rank_statuses()] == [3, 4]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([2**70, -1, 10**400, "\ud800", "\x1b]52;", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*GOOD, "t", "type", "message"]), inner, max_size=9)
    ),
    max_leaves=12,
)
OBJECTS = st.builds(
    lambda some, good: good | some,
    st.dictionaries(
        st.sampled_from([*GOOD, "rss", "done", "peaks", "t", "type", "message", "launcher"]), VALUES
    ),
    st.sampled_from([{}, GOOD]),
)


@settings(
    max_examples=100,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rank=OBJECTS, error=VALUES | OBJECTS, launch=OBJECTS, raw=st.binary(max_size=8))
def test_no_content_of_any_file_ends_a_job(
    watched: Watched, rank: Any, error: Any, launch: dict[str, Any], raw: bytes
) -> None:
    files = watched.job.run_dir
    files.rank_file(1).write_text(json.dumps(rank))
    files.rank_error(0).write_text(json.dumps(error))
    files.rank_error(1).write_bytes(raw)
    files.events.write_bytes(json.dumps(error).encode() + b"\n" + raw)
    files.launcher_log.write_bytes(raw)
    named = {"run_id": watched.job.run_id, "attempt": watched.job.attempt}
    files.launch_file.write_text(json.dumps(launch | named))
    (files.checkpoints / "step-²").mkdir(parents=True, exist_ok=True)
    (files.checkpoints / "step-²" / "manifest.json").write_text("{}")
    watched.look()
    watched.supervisor.ranks.adopt()
    assert "\n" not in watched.judged()


@pytest.mark.parametrize("launcher", ["x", [1], ["a", "b"], {"pid": 1}, 7])
def test_a_launch_record_that_cannot_be_read_is_named_and_nothing_is_adopted(
    watched: Watched, launcher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {
        "run_id": watched.job.run_id,
        "attempt": watched.job.attempt,
        "command": ["x"],
        "events_offset": 0,
        "restarts": 0,
        "oom_kills": 0,
        "launcher": launcher,
    }
    watched.job.run_dir.launch_file.write_text(json.dumps(record))
    assert watched.supervisor.ranks.adopt() is None
    assert "cannot read launch.json: " in capsys.readouterr().err


@pytest.mark.parametrize("entries", [[{}], [7], {"a": 1}, [{"is_p2p": False}], "x"])
def test_no_flight_record_keeps_a_hang_from_its_end(watched: Watched, entries: Any) -> None:
    """Also one whose entries lack what is asked of them once two ranks are compared."""
    whole = {"process_group": ["0"], "is_p2p": False}
    for rank in range(2):
        files = watched.job.run_dir
        path = files.logs / f"{files.flight_prefix.name}{rank}.json"
        mine = [whole | {"collective_seq_id": 1 + rank}] if entries == [{}] else entries
        path.write_text(json.dumps([{"pg_config": {"0": {"name": "0"}}, "entries": mine}]))
    watched.look()
    hang = [watched.look(after=5) for _ in range(HANG // 5)][-1]
    assert hang is not None
    assert hang.startswith("ranks 0, 1 sent no heartbeat")


def test_a_mistake_of_ours_in_a_look_ends_no_training(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alive = iter([True] * 5 + [False])
    looks: list[int] = []

    def look(_: Any) -> None:
        looks.append(1)
        raise ArithmeticError("a mistake")

    monkeypatch.setattr(Attempt, "alive", lambda self: next(alive))
    monkeypatch.setattr(watched.supervisor, "_poll", look)
    watched.supervisor._watch(watched.attempt)
    assert len(looks) == 5
    assert capsys.readouterr().err.count("ArithmeticError: a mistake") == 1
