"""Ranks that wait for each other: waiting is not moving on, and the waiting one tells of others."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.data.encode.tensor_cache import pieces, together
from engine.data.index import data_index
from engine.data.prepare import prepare
from engine.ranks.team import Control, FileBarrier, StoppedError, Team
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from jobs.run.hang import Watch, find_hang
from jobs.run.rundir import RunDir
from tests.support.engine.run_context import run_context
from tests.support.engine.toy_jobs import toy_spec
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT = 8.0  # seconds of a clock that only `Pair.hang` moves


def never() -> bool:
    return False


class CountingBarrier(FileBarrier):
    """Counts how often it is asked who has arrived, which who waits does again and again."""

    asked = 0

    def arrived(self, place: str) -> int:
        self.asked += 1
        return super().arrived(place)


class Pair:
    """Two ranks of a run, in threads of this process."""

    def __init__(self, root: Path) -> None:
        self._watch, self._now = Watch(TIMEOUT), 0.0
        self.files = RunDir(root / "run")
        self.files.create()
        self.teams = [self.team(rank) for rank in range(2)]

    def team(self, rank: int) -> Team:
        world = World(rank, 2, torch.device("cpu"), "ddp", "t")
        barrier = CountingBarrier(self.files, "t", rank, 2)
        telemetry = Telemetry(self.files, rank)
        return Team(world=world, barrier=barrier, telemetry=telemetry, stop_requested=never)

    @contextmanager
    def waiting(self, phase: str, total: int) -> Iterator[None]:
        """Rank 0 has done nothing of a phase and waits; at the end rank 1 is to have met it."""

        def wait() -> None:
            with together(phase, total, self.teams[0]):
                pass

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        eventually(lambda: self.teams[0].barrier.arrived(phase) == 1)
        yield
        thread.join(PATIENCE)
        assert not thread.is_alive()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.events.read_text().splitlines()]

    def waits_on(self) -> None:
        """Until rank 0, which waits, has looked a few more times whether it still has to."""
        barrier = self.teams[0].barrier
        assert isinstance(barrier, CountingBarrier)
        before = barrier.asked
        eventually(lambda: barrier.asked > before + 3)

    def hang(self) -> str | None:
        """What the supervisor finds when it looks half a timeout later."""
        self._now += TIMEOUT / 2
        ranks = self._watch.observe([t.telemetry.status() for t in self.teams], self._now)
        found = find_hang(ranks, TIMEOUT)
        return found.reason if found else None


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(tmp_path)
    yield both
    for team in both.teams:
        team.telemetry.close()


def test_when_the_rank_that_others_wait_for_is_stuck_the_job_stands_still(pair: Pair) -> None:
    with pair.waiting("latents", 5), together("latents", 5, pair.teams[1]) as shared:
        shared.add()
        assert pair.hang() is None
        pair.waits_on()
        assert pair.hang() is None
        assert "caching latents" in str(pair.hang())


def test_while_it_works_the_job_moves_on_and_the_waiting_one_tells_of_it(pair: Pair) -> None:
    def works_on() -> bool:
        shared.add()
        assert pair.hang() is None
        # How many the events say the ranks have done together.
        return max(sum(event.get("ranks") or [0]) for event in pair.events) >= 10

    with pair.waiting("latents", 10**6), together("latents", 10**6, pair.teams[1]) as shared:
        stood = pair.teams[0].telemetry.status().progressed
        eventually(works_on)
        assert pair.teams[0].telemetry.status().progressed == stood, "waiting is not moving on"
    (end,) = {tuple(e["ranks"]) for e in pair.events if e.get("state") == "end"}
    assert end == (0, shared.done)


def test_a_rank_that_wants_to_stop_takes_nothing_more_and_all_leave(pair: Pair) -> None:
    asked = threading.Event()
    pair.teams[1] = replace(pair.teams[1], stop_requested=asked.is_set)
    names = [str(number) for number in range(40)]
    done: list[str] = []

    def work() -> None:
        with together("latents", 40, pair.teams[1]) as shared:
            for piece in pieces(names, 8, "latents", pair.teams[1]):
                for name in piece:
                    done.append(name)
                    shared.add()
                    if len(done) == 10:
                        asked.set()

    def wait() -> None:
        with together("latents", 40, pair.teams[0]):
            pass

    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(work), ranks.submit(wait)]
    assert done == names[:10], "not to the end of the piece"
    assert [type(rank.exception()) for rank in both] == [StoppedError, StoppedError]


def test_a_wish_that_was_seen_stays_though_its_file_goes(pair: Pair) -> None:
    control = Control(pair.files, World(0, 1, torch.device("cpu"), "single", "t"))
    assert not control.stop_requested()
    pair.files.request("stop")
    assert control.stop_requested()
    pair.files.clear_request("stop")
    assert control.stop_requested()
    assert control.agree().stop


def test_looking_at_the_data_ends_soon_after_the_wish(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What readers are at is finished; of the other pictures none is begun."""
    looked, leaving = [], threading.Event()
    stock = data_index._read_facts

    def look(*words: Any) -> Any:
        looked.append(words)
        if len(looked) > 1:
            assert leaving.wait(PATIENCE)
        return stock(*words)

    class Readers(ThreadPoolExecutor):
        def shutdown(self, *words: Any, **names: Any) -> None:
            leaving.set()
            super().shutdown(*words, **names)

    monkeypatch.setattr(data_index, "_read_facts", look)
    monkeypatch.setattr(data_index, "ThreadPoolExecutor", Readers)
    files = RunDir(tmp_path / "run")
    files.create()
    spec = toy_spec(toy, cache_dir=str(tmp_path / "cache"))
    world = World(0, 1, torch.device("cpu"), "single", "t")
    telemetry = Telemetry(files, 0)
    with pytest.raises(StoppedError, match="index"):
        prepare(run_context(spec, files, world, telemetry, stop_requested=lambda: True))
    telemetry.close()
    assert len(looked) <= 1 + data_index.READERS < 24
