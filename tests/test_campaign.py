"""A few trials of the campaign: that it can find something, and finds nothing."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from jobs.errors import UserError
from tests.campaign import fuzz, targets
from tests.campaign.__main__ import run
from tests.campaign.faults import Broken
from tests.campaign.journal import Journal
from tests.campaign.slurm_faults import check_events

if TYPE_CHECKING:
    import random
    from pathlib import Path


def test_a_campaign_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path, "fuzz", 1)
    first.note(0, "a", count=50)
    first.note(2, "b", "a traceback", count=50)
    Journal(path, "fuzz", 2).note(1, "a")
    again = Journal(path, "fuzz", 1)
    assert list(again.trials(4)) == [1, 3]
    assert again.broken == [2]
    assert "100 trials (a 50, b 50); 1 broken [2]" in again.summary()
    assert list(again.trials(4, hours=-1)) == []


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("raise ValueError('bad')", "input 0: ValueError: bad at "),
        ("raise UserError('x' * 2, 'y' * 9000)", "input 0: an error of 9004 characters"),
        ("bytearray(b'x') * (300 << 20)", "input 0: 3.. MB|input 0: 29. MB"),
        ("while True: pass", "input 0: the process ended with status -24"),
        ("a = []\nwhile True: a.append(bytearray(b'x') * (64 << 20))", "input 0: more than 600 MB"),
        (
            "try: bytearray(9 << 30)\nexcept MemoryError: raise UserError('swallowed') from None",
            "input 0: more than 8 GB, asked for at once",
        ),
        ("raise UserError('a sentence')", ""),
    ],
)
def test_the_fuzzer_notices(monkeypatch: pytest.MonkeyPatch, how: str, found: str) -> None:
    def target(rng: random.Random, place: Path) -> targets.Call:
        return lambda: exec(how, {"UserError": UserError})

    monkeypatch.setattr(targets, "TARGETS", {"one": target})
    monkeypatch.setattr(fuzz, "_HANGS_AFTER", 1 if "pass" in how else 60)
    monkeypatch.setattr(fuzz, "_EATS", 600 << 20)
    monkeypatch.setattr(fuzz, "SECONDS", 30.0)
    journal = Journal(None, "fuzz", 1)
    notes: list[str] = []
    monkeypatch.setattr(journal, "note", lambda trial, what, text, **facts: notes.append(text))
    fuzz.fuzz(journal, 0, size=1)
    assert re.match(found or "^$", notes[0]), notes


def _launch(allocation: str, begin: int, end: int, t: float) -> list[dict[str, object]]:
    """Events of ranks that trained from one step to another, and saved at the end."""
    one = {"allocation": allocation, "t": t}
    steps = [{"kind": "step", "step": step} for step in range(begin + 1, end + 1)]
    last = {"kind": "checkpoint", "step": end}
    return [one | event for event in ({"kind": "start", "step": begin}, *steps, last)]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([*_launch("7.0", 0, 20, 1), *_launch("7.1", 20, 60, 9)], ""),
        ([*_launch("7.0", 0, 20, 1)[:-1], *_launch("7.1", 0, 60, 9)], ""),
        ([*_launch("7.0", 0, 20, 1), *_launch("7.1", 0, 60, 9)], "begins after step 0, saved was"),
        (
            [*_launch("7.0", 0, 60, 1), *_launch("7.1", 60, 60, 9), *_launch("7.0", 60, 60, 1e6)],
            "7.0 still trains",
        ),
        ([*_launch("7.0", 0, 20, 1), *_launch("7.0", 20, 60, 9)[2:]], "trains step 22 after 20"),
        (_launch("7.0", 0, 59, 1), "the last step is 59"),
    ],
)
def test_the_slurm_campaign_notices(events: list[dict[str, object]], found: str) -> None:
    if found:
        with pytest.raises(Broken, match=found):
            check_events(events)
    else:
        check_events(events)


@pytest.mark.slow
def test_some_inputs_of_each_kind() -> None:
    journal = Journal(None, "fuzz", 20261122)
    fuzz.prepare()
    for batch in range(len(targets.TARGETS)):
        fuzz.fuzz(journal, batch, size=5)
    assert journal.broken == []
    assert set(journal.counts) == set(targets.TARGETS)


@pytest.mark.slow
def test_some_faults_on_fake_ranks() -> None:
    journal = Journal(None, "faults", 20261122)
    run(journal, trials=4)
    assert (len(journal.done), journal.broken) == (4, [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the library that breaks operations is C")
def test_some_fault_points() -> None:
    journal = Journal(None, "fault-points", 20261126)
    run(journal, trials=60)
    assert (len(journal.done), journal.broken) == (60, [])
