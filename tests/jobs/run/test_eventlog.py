"""The event stream as it is read: growing, torn, strange, replaced, resumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.run.eventlog import EventLog, Phase
from jobs.run.judging import Measurements
from jobs.run.rundir import event

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def step(number: int, loss: float = 0.5, **values: Any) -> str:
    return event("step", step=number, loss=loss, **values)


def append(path: Path, *lines: str | bytes) -> None:
    with open(path, "ab") as file:
        for line in lines:
            file.write(line.encode() if isinstance(line, str) else line)


def numbers(log: EventLog) -> list[int]:
    return [record.step for record in log.steps]


def test_a_stream_that_does_not_exist_yet_is_empty(path: Path) -> None:
    log = EventLog(path)
    assert log.poll() is False
    assert log.last is None
    assert log.seconds_per_step() is None
    append(path, step(1))
    assert log.poll() is True
    assert numbers(log) == [1]


def test_only_what_is_new_is_read(path: Path) -> None:
    append(path, step(1), step(2))
    log = EventLog(path).read_all()
    assert log.poll() is False
    append(path, step(3, loss=0.25, lr=1e-3, grad_norm=1.5, seconds=0.5, epoch=0.1))
    assert log.poll() is True
    assert numbers(log) == [1, 2, 3]
    assert log.last is not None
    last = log.last
    assert (last.loss, last.lr, last.grad_norm) == (0.25, 1e-3, 1.5)
    assert (last.seconds, last.epoch) == (0.5, 0.1)


def test_a_torn_last_line_waits_for_its_rest(path: Path) -> None:
    line = step(2)
    append(path, step(1), line[:9])
    log = EventLog(path).read_all()
    assert numbers(log) == [1]
    append(path, line[9:])
    log.read_all()
    assert numbers(log) == [1, 2]


def test_a_character_torn_in_two_is_put_together(path: Path) -> None:
    line = '{"kind": "warning", "message": "größer"}\n'.encode()
    cut = line.index("ö".encode()) + 1
    append(path, line[:cut])
    log = EventLog(path).read_all()
    append(path, line[cut:])
    assert log.read_all().warnings == ["größer"]


def test_small_reads_lose_nothing(path: Path) -> None:
    append(path, *(step(n) for n in range(1, 40)))
    log = EventLog(path)
    while log.poll(limit=150):
        pass
    assert numbers(log) == list(range(1, 40))


def test_kinds_of_tomorrow_are_kept_as_notes(path: Path) -> None:
    append(path, event("sharding", units=4), event("telepathy", x=1), step(1))
    log = EventLog(path).read_all()
    assert log.notes["sharding"]["units"] == 4
    assert log.notes["telepathy"]["x"] == 1
    assert numbers(log) == [1]


GARBAGE = [
    b"\n",
    b"not json\n",
    b"\xff\xfe\x00\n",
    b"[1, 2]\n",
    b"3\n",
    b"null\n",
    b"{}\n",
    b'{"kind": 7}\n',
    b'{"kind": null}\n',
    b'{"kind": "step"}\n',
    b'{"kind": "step", "step": "x", "loss": 1}\n',
    b'{"kind": "step", "step": null, "loss": 1}\n',
    b'{"kind": "step", "step": 1e999, "loss": 1}\n',
    b'{"kind": "step", "step": NaN, "loss": 1}\n',
    b'{"kind": "step", "step": 2, "loss": [1]}\n',
    b'{"kind": "phase"}\n',
    b'{"kind": "phase", "name": "load", "done": "many"}\n',
    b'{"kind": "phase", "name": "load", "done": 1e999}\n',
    b'{"kind": "phase", "name": "load", "total": {}}\n',
    b'{"kind": "phase", "name": "load", "t": null}\n',
    b'{"kind": "checkpoint"}\n',
    b'{"kind": "checkpoint", "step": {}}\n',
    b'{"kind": "start", "step": []}\n',
    b"[" * 100_000 + b"\n",
    b'{"kind": "warning", "message": ' + b"9" * 5000 + b"}\n",
]


@pytest.mark.parametrize("line", GARBAGE, ids=lambda line: repr(line[:44]))
def test_garbage_is_passed_over(path: Path, line: bytes) -> None:
    append(path, step(1), line, step(3))
    log = EventLog(path).read_all()
    assert numbers(log) == [1, 3]
    assert log.checkpoints == []


def test_numbers_that_are_no_numbers_do_not_reach_the_screen(path: Path) -> None:
    append(path, step(1, seconds="slow", lr={}), step(2, seconds=0.5), step(3, seconds=None))
    log = EventLog(path).read_all()
    assert log.seconds_per_step() == 0.5
    assert all(isinstance(r.lr, float | None) for r in log.steps)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
_KINDS = st.sampled_from(
    ["step", "phase", "start", "end", "checkpoint", "sample", "warning", "error", "new"]
)
_EVENTS = st.builds(
    lambda kind, values: values | {"kind": kind},
    _KINDS,
    st.dictionaries(
        st.sampled_from(["step", "loss", "seconds", "name", "done", "total", "t", "reason"]), _JSON
    ),
)


@given(events=st.lists(_EVENTS | _JSON, max_size=6))
@example(events=[{"kind": "step", "step": float("inf"), "loss": 1.0}])
@settings(max_examples=150, deadline=None)
def test_no_line_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in events), encoding="utf-8")
    log = EventLog(path).read_all()
    log.seconds_per_step()
    assert numbers(log) == sorted(set(numbers(log)))


@given(data=st.binary(max_size=80))
@settings(max_examples=100, deadline=None)
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(data + b"\n" + step(4).encode())
    assert numbers(EventLog(path).read_all()) == [4]


def test_a_truncated_file_is_read_from_its_new_beginning(path: Path) -> None:
    append(path, step(1), step(2), event("checkpoint", step=2))
    log = EventLog(path).read_all()
    path.write_text(step(7))
    log.read_all()
    assert (numbers(log), log.checkpoints) == ([7], [])


def test_a_replaced_file_is_read_from_its_beginning(path: Path) -> None:
    append(path, step(1))
    log = EventLog(path).read_all()
    other = path.with_name("other")
    append(other, step(5), step(6), step(7), event("end", reason="completed"))
    other.replace(path)
    log.read_all()
    assert numbers(log) == [5, 6, 7]
    assert log.end_reason == "completed"


def test_a_later_attempt_replaces_the_steps_it_repeats(path: Path) -> None:
    append(path, event("start", step=0), *(step(n, loss=1.0) for n in range(1, 8)))
    log = EventLog(path).read_all()
    append(path, event("end", reason="stopped"))
    log.read_all()
    assert log.end_reason == "stopped"
    append(path, event("start", step=4))
    log.read_all()
    assert log.end_reason is None, "it runs again"
    assert numbers(log) == [1, 2, 3, 4]
    append(path, step(5, loss=2.0), step(6, loss=2.0))
    log.read_all()
    assert [(r.step, r.loss) for r in log.steps][3:] == [(4, 1.0), (5, 2.0), (6, 2.0)]


def test_a_resume_is_the_same_whether_followed_or_read_afterwards(path: Path) -> None:
    lines = [
        event("start", step=0),
        *(step(n) for n in range(1, 6)),
        event("start", step=2),
        *(step(n, loss=0.1) for n in range(3, 5)),
    ]
    followed = EventLog(path)
    for line in lines:
        append(path, line)
        followed.poll()
    assert followed.steps == EventLog(path).read_all().steps
    assert numbers(followed) == [1, 2, 3, 4]


def test_the_phase_is_what_goes_on_outside_of_steps(path: Path) -> None:
    log = EventLog(path)
    append(path, '{"t": 5, "kind": "phase", "name": "load", "state": "begin", "total": 10}\n')
    log.read_all()
    assert log.phase == Phase("load", done=0, total=10, finished=False, t=5.0, since=5.0)
    append(path, event("phase", name="load", state="progress", done=4, total=10))
    log.read_all()
    assert log.phase is not None
    assert (log.phase.done, log.phase.total, log.phase.finished) == (4, 10, False)
    assert log.phase.since == 5.0
    append(path, event("phase", name="load", state="end", done=10, total=10))
    log.read_all()
    assert log.phase is not None
    assert log.phase.finished
    append(path, step(1))
    assert log.read_all().phase is None
    append(path, event("phase", name="save", state="begin"), event("end", reason="completed"))
    log.read_all()
    assert (log.phase, log.end_reason) == (None, "completed")


def test_the_pace_is_the_median_of_the_latest_steps(path: Path) -> None:
    append(path, step(1, seconds=60), *(step(n, seconds=n / 10) for n in range(2, 7)))
    log = EventLog(path).read_all()
    assert log.seconds_per_step(window=5) == 0.4
    assert log.seconds_per_step(window=1) == 0.6


def test_checkpoints_samples_and_warnings_are_collected(path: Path) -> None:
    append(
        path,
        event("checkpoint", step=5, path="p"),
        event("sample", step=5, files=["a.png"]),
        event("warning", message="w"),
        event("checkpoint", step=10),
    )
    log = EventLog(path).read_all()
    assert log.checkpoints == [5, 10]
    assert [s["files"] for s in log.samples] == [["a.png"]]
    assert log.warnings == ["w"]


def test_what_checkpoints_are_judged_by_is_what_the_latest_attempt_names(path: Path) -> None:
    def scored(at: int, **scores: Any) -> str:
        return event("scores", step=at, **scores)

    append(path, scored(5, clip_t=0.2), scored(10, clip_t=0.3, dino_i=float("nan")))
    append(path, event("validation", step=5, loss=1.0))
    log = EventLog(path).read_all()
    assert log.measured() == Measurements(((5, 1.0),))
    append(path, event("start", step=10, best_by="clip_t"))
    assert log.read_all().measured() == Measurements(((5, 0.2), (10, 0.3)), "clip_t")
    assert log.measured("validation_loss").best() == (5, 1.0)
    assert log.measured("dino_i").best() is None, "not finite"
    append(path, event("start", step=7, best_by="clip_t"), scored(8, clip_t="x", clip_i=0.5))
    assert log.read_all().measured() == Measurements(((5, 0.2),), "clip_t")
    append(path, scored(5, clip_t=0.9), event("start", step=9, best_by=["no such"]))
    assert log.read_all().measured() == Measurements(((5, 1.0),))
    assert log.scores == [(5, {"clip_t": 0.9})]


def test_validation_losses_are_replaced_by_those_of_a_later_attempt(path: Path) -> None:
    def measured(at: int, loss: float) -> str:
        return event("validation", step=at, loss=loss, levels=[[0.5, loss]], samples=3, seconds=1.0)

    append(path, measured(0, 3.0), measured(5, 2.0), measured(10, 1.0))
    log = EventLog(path).read_all()
    assert log.validations == [(0, 3.0), (5, 2.0), (10, 1.0)]
    append(path, event("start", step=7))
    assert log.read_all().validations == [(0, 3.0), (5, 2.0)]
    append(path, measured(5, 1.5), event("validation", step="x"), event("validation", loss=1.0))
    assert log.read_all().validations == [(0, 3.0), (5, 1.5)]
