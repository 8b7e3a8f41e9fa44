"""The moving average: what it comes to, where it lies, and when it may be looked at."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from engine.train import ema as ema_module
from engine.train.ema import Ema, Follower, follow
from tests.support.engine.toy_jobs import parameter
from tests.support.waiting import PATIENCE

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def test_the_average_follows_by_its_decay() -> None:
    weight = parameter(1.0, 2.0)
    ema = Ema({"w": weight}, decay=0.5)
    weight.data += 4.0
    ema.update(step=100)
    assert torch.allclose(ema.shadow["w"], torch.tensor([3.0, 4.0]))


def test_the_decay_warms_up() -> None:
    ema = Ema({}, decay=0.999)
    assert ema.decay_at(1) == pytest.approx(2 / 11)
    assert ema.decay_at(100_000) == 0.999
    assert [ema.decay_at(n) for n in range(1, 50)] == sorted(ema.decay_at(n) for n in range(1, 50))


@pytest.mark.parametrize("on_cpu", [False, True])
def test_within_the_context_the_model_is_the_average_and_afterwards_itself(on_cpu: bool) -> None:
    weight = parameter(1.0)
    held = weight.data
    ema = Ema({"w": weight}, decay=0.5, on_cpu=on_cpu)
    weight.data += 1.0
    with ema.in_place():
        assert weight.item() == 1.0
        assert weight.data.data_ptr() == held.data_ptr(), "whoever holds it still does"
    assert weight.item() == 2.0
    assert ema.shadow["w"].item() == 1.0


def test_an_error_within_the_context_leaves_the_model_as_it_was() -> None:
    weight = parameter(1.0)
    ema = Ema({"w": weight}, decay=0.5)
    weight.data += 1.0

    def fail() -> None:
        with ema.in_place():
            raise RuntimeError("sampling failed")

    with pytest.raises(RuntimeError, match="sampling failed"):
        fail()
    assert weight.item() == 2.0


def some_pairs() -> Pairs:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3,), (2, 5), (40,), (0,), (1,)]
    return [(torch.randn(s, generator=draw), torch.randn(s, generator=draw)) for s in shapes]


def moved(pairs: Pairs, weight: float) -> list[torch.Tensor]:
    return [torch.lerp(average, current, weight) for average, current in pairs]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema_module, "_BUCKET", 12)  # less than the largest tensor


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("spoilt", [None, 0.0, 1.0])
def test_many_tensors_move_as_each_would(spoilt: float | None) -> None:
    pairs = some_pairs()
    wanted = moved(pairs, 0.0 if spoilt else 0.3)
    follow(pairs, 0.3, None if spoilt is None else torch.tensor(spoilt))
    for (average, _), one in zip(pairs, wanted, strict=True):
        assert torch.allclose(average, one, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("spoilt", [None, 0.0, 1.0])
def test_an_average_in_host_memory_comes_to_the_same(spoilt: float | None) -> None:
    """Here without a GPU: the buffers are not pinned, and there is no stream."""
    pairs = some_pairs()
    follower = Follower(torch.device("cpu"))
    for weight in (0.3, 0.01):
        wanted = moved(pairs, 0.0 if spoilt else weight)
        follower.begin(pairs, weight, None if spoilt is None else torch.tensor(spoilt))
        follower.finish()
        for (average, _), one in zip(pairs, wanted, strict=True):
            assert torch.equal(average, one)
    assert [len(buffer) for buffer in follower._buffers] == [12, 12]


def test_an_average_in_host_memory_is_complete_before_anyone_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    move = Follower._move

    def slowly(*words: Any) -> None:
        assert go_on.wait(PATIENCE)
        move(*words)

    monkeypatch.setattr(Follower, "_move", slowly)
    weight = parameter(1.0)
    ema = Ema({"w": weight}, decay=0.5)
    ema._follower = follower = Follower(torch.device("cpu"))
    follower.begin([(ema._shadow["w"], weight.detach() + 4)], 0.5, None)
    assert follower._job is not None
    assert not follower._job.done()
    threading.Timer(0.05, go_on.set).start()
    assert ema.shadow["w"].item() == 3.0


def test_only_what_lies_elsewhere_goes_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter on `meta` stands for one on a GPU."""
    there = torch.zeros(2, device="meta")
    here = parameter(1.0)
    ema = Ema({"w": here}, decay=0.5)
    here.data += 4.0
    apart = (torch.zeros(2), there)
    pairs = ema._pairs
    monkeypatch.setattr(ema, "_pairs", lambda: iter([*pairs(), apart]))
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Follower, "begin", lambda self, *words: begun.append((self, *words)))
    spoilt = torch.tensor(0.0)
    for _ in range(2):
        ema.update(100, spoilt)
    first, second = begun
    assert first[0] is second[0], "one thread"
    assert first[0]._device == there.device
    assert (first[1], first[2]) == ([apart], 0.5)
    assert first[3] is spoilt
    assert ema._shadow["w"].item() == 4.0, "moved twice halfway from 1 to 5"


def test_an_average_moves_when_its_copy_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Mark:
        def synchronize(self) -> None:
            seen.append("arrived")

    monkeypatch.setattr(Follower, "_mark", lambda self: Mark())
    monkeypatch.setattr(ema_module, "follow", lambda *_: seen.append("moved"))
    follower = Follower(torch.device("cpu"))
    follower.begin([(torch.zeros(2), torch.ones(2))], 0.5, None)
    follower.finish()
    assert seen == ["arrived", "moved"]


def test_no_bucket_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema_module, "_BUCKET", 4)
    pairs = [(torch.zeros(size), torch.zeros(size)) for size in (2, 2, 1, 3, 1)]
    buckets = [[len(average) for average, _ in bucket] for bucket in ema_module._buckets(pairs)]
    assert buckets == [[2, 2], [1, 3], [1]]


def test_a_failure_behind_trainings_back_is_not_lost() -> None:
    follower = Follower(torch.device("cpu"))
    follower.begin([(torch.zeros(2), torch.zeros(3))], 0.5, None)
    with pytest.raises(RuntimeError, match="must match"):
        follower.finish()
    follower.finish()


def test_the_average_of_a_spoilt_step_stays_as_it_was() -> None:
    weight = parameter(1.0, 2.0)
    ema = Ema({"w": weight}, decay=0.5)
    weight.data += 4.0
    ema.update(step=100, spoilt=torch.tensor(1.0))
    assert ema.shadow["w"].tolist() == [1.0, 2.0]
    ema.update(step=100, spoilt=torch.tensor(0.0))
    assert ema.shadow["w"].tolist() == [3.0, 4.0]


def test_the_average_lies_where_the_parameter_does_unless_it_is_to_be_on_the_cpu() -> None:
    elsewhere = torch.nn.Parameter(torch.empty(2, device="meta"))
    assert Ema({"w": elsewhere}, decay=0.5).shadow["w"].is_meta
    with pytest.raises(NotImplementedError, match="meta"):  # nothing can be copied from there
        Ema({"w": elsewhere}, decay=0.5, on_cpu=True)


def test_an_average_that_restarts_is_what_is_trained_now() -> None:
    weight = parameter(1.0)
    ema = Ema({"w": weight}, decay=0.5)
    weight.data += 1.0
    ema.restart()
    weight.data += 1.0
    assert ema.shadow["w"].item() == 2.0
