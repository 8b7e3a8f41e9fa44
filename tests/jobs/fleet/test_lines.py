"""What a box tells is read back, in few bytes, whatever the box is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.fleet.lines import FORMAT, BoxJob, ReportReader, ReportWriter, Snapshot, UnreadableError

EVIL = "\x1b]52;c;aGk=\x07cats\u202e\nx"


def job(**changes: Any) -> dict[str, Any]:
    return {
        "id": 3,
        "name": "cats",
        "state": "running",
        "reason": "",
        "step": 40,
        "total_steps": 200,
        "loss": 0.41234567891,
        "seconds_per_step": 1.5000001,
        "eta": 239.9,
        "ranks": 2,
        "gpus": [0, 1],
        "run_dir": "/a",
        "created": 1.0,
    } | changes


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpu": 0, "name": "H200", "memory_total": 2**37, "memory_used": 2**30} | changes


def hear(listener: ReportReader, *lines: str) -> Snapshot | None:
    snapshot = None
    for line in lines:
        snapshot = listener.take(line.encode()) or snapshot
    return snapshot


def begun(**head: Any) -> ReportReader:
    listener = ReportReader()
    words = {"fleet": FORMAT, "version": "9.9", "host": "big"} | head
    assert listener.take(json.dumps(words).encode()) is None
    return listener


def test_the_whole_first_then_what_changed() -> None:
    teller, listener = ReportWriter(), ReportReader()
    hear(listener, teller.head("1.2", "big", 64, 5.0))
    first = list(teller.look(100.4, [job(), job(id=4, state="completed")], [gpu()], False))
    assert len(first) == 4
    snapshot = hear(listener, *first)
    assert snapshot is not None
    assert (snapshot.head.version, snapshot.head.host, snapshot.head.interval) == (
        "1.2",
        "big",
        5.0,
    )
    assert [one.id for one in snapshot.jobs] == [3, 4]
    assert snapshot.jobs[0].loss == 0.4123
    assert snapshot.jobs[0].gpus == (0, 1)
    assert snapshot.gpus[0].memory_used == 2**30

    second = list(teller.look(105.0, [job(step=41, eta=239.6)], [gpu()], True))
    assert [json.loads(line) for line in second] == [
        {"id": 3, "step": 41},
        {"id": 4, "state": "removed"},
        {"t": 105, "paused": True},
    ]
    snapshot = hear(listener, *second)
    assert snapshot is not None
    assert snapshot.paused
    assert [(one.id, one.step, one.name) for one in snapshot.jobs] == [(3, 41, "cats")]
    assert list(teller.look(110.0, [job(step=41)], [gpu()], False)) == ['{"t":110}']


def test_nothing_in_it_steers_a_terminal() -> None:
    teller, listener = ReportWriter(), ReportReader()
    hear(listener, teller.head(EVIL, EVIL, 1, 5.0))
    snapshot = hear(
        listener,
        *teller.look(1.0, [job(name=EVIL, reason=EVIL * 99)], [gpu(name=EVIL)], False),
    )
    assert snapshot is not None
    texts = [
        snapshot.head.host,
        snapshot.jobs[0].name,
        snapshot.jobs[0].reason,
        snapshot.gpus[0].name,
    ]
    assert all(text.isprintable() and "cats" in text for text in texts)
    assert max(map(len, texts)) <= 300
    snapshot = hear(listener, teller.trouble(2.0, EVIL))
    assert snapshot is not None
    assert snapshot.problem.isprintable()


def test_a_newer_box_is_understood_as_far_as_it_can_be() -> None:
    listener = begun(colour="red")
    snapshot = hear(
        listener,
        '{"id":3,"name":"cats","state":"dreaming","depth":[1]}',
        '{"gpu":0,"name":"X","watts":3}',
        '{"t":1,"mood":"good"}',
    )
    assert snapshot is not None
    assert snapshot.jobs == (BoxJob(id=3, name="cats", state="dreaming"),)
    assert not snapshot.newer
    snapshot = hear(
        listener, '{"id":3,"step":{"at":3}}', '{"tpu":3}', '{"id":4,"state":"running"}', '{"t":2}'
    )
    assert snapshot is not None
    assert snapshot.jobs == ()
    assert snapshot.newer
    assert [one.gpu for one in snapshot.gpus] == [0]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["Welcome to \x1b[31mbig!"] * 101, 'it says "Welcome to ?[31mbig!"'),
        (["Welcome", "{]"], 'it says "{]"'),
        (['{"id":3}'], "does not begin as"),
        (
            ['{"fleet":2,"version":"9.9"}'],
            "is 9.9, which speaks another format (2, not 1); update fsdp-tui here",
        ),
        (['{"fleet":1}', "[" * 3000], "it says"),
        (['{"fleet":1}', '{"t":"noon"}'], "end in another way"),
    ],
)
def test_what_is_no_box(lines: list[str], why: str) -> None:
    with pytest.raises(UnreadableError) as error:
        hear(ReportReader(), *lines)
    assert why in str(error.value)


def test_a_box_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.fleet.lines.MOST_JOBS", 3)
    listener = begun()
    with pytest.raises(UnreadableError, match="more than 3 jobs"):
        hear(listener, *(f'{{"id":{n},"name":"a","state":"b"}}' for n in range(5)))
    monkeypatch.setattr("jobs.fleet.lines.MOST_KEPT", 1000)
    listener = begun()
    for n in range(100):  # the same rows
        long = {"id": n % 2, "name": "n" * 60_000, "reason": [{"a": 1}] * 5000, "state": "s"}
        hear(listener, json.dumps(long), json.dumps({"gpu": n % 3, "name": "g"}))
        hear(listener, json.dumps({"gpu": n % 3, "state": "removed"}))
    assert [row["name"] for row in listener._rows["id"].values()] == ["n" * 300] * 2
    assert listener._kept == 2 * 301
    snapshot = hear(listener, '{"t":1}')
    assert snapshot is not None
    assert snapshot.newer, "a list is no reason"
    with pytest.raises(UnreadableError, match="its rows have more than"):
        hear(listener, *(json.dumps(job(id=n, name="n" * 300)) for n in range(2, 5)))


def test_numbers_are_numbers() -> None:
    listener = begun()
    snapshot = hear(
        listener, json.dumps(job(step=10**400)), json.dumps(job(id=4, loss=1)), '{"t":1}'
    )
    assert snapshot is not None
    assert [one.id for one in snapshot.jobs] == [4]
    for far in (-1, 1e300, 10**400, float("inf"), float("nan")):
        row = job(id=4, eta=far, seconds_per_step=far, loss=3e38)
        snapshot = hear(listener, json.dumps(row), json.dumps(gpu(utilisation=100)), '{"t":1}')
        assert snapshot is not None
        assert [(one.eta, one.loss) for one in snapshot.jobs] in ([(None, 3e38)], [])
        assert (snapshot.jobs == ()) == (far == 10**400)
        assert len(snapshot.gpus) == 1
    snapshot = hear(listener, json.dumps(gpu(utilisation=101)), json.dumps(gpu(gpu=-1)), '{"t":1}')
    assert snapshot is not None
    assert snapshot.gpus == ()
    hear(listener, json.dumps(job(id=4)), '{"id":4,"loss":NaN}')
    snapshot = hear(listener, '{"t":1}')
    assert snapshot is not None
    assert snapshot.jobs == ()
