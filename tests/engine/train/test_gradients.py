"""Gradients that are whole on every rank, averaged in buckets while backward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ranks.world import World
from engine.train import gradients
from engine.train.gradients import Averager, average_gradients

CPU = torch.device("cpu")
OTHERS = 10.0  # what the other rank has in every gradient


class Chain(torch.nn.Module):
    """Layers one after the other, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(5))
        self.idle = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Ranks:
    """Stands for `torch.distributed` on the first of two ranks, and notes what was sent when."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.moment = ""
        self.under_way = self.most = 0

    def all_reduce(self, flat: torch.Tensor, **_: Any) -> Ranks:
        self.sent.append((self.moment, flat.numel()))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        flat += OTHERS
        return self

    def wait(self) -> None:
        self.under_way -= 1


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    fake = Ranks()
    monkeypatch.setattr(gradients.dist, "all_reduce", fake.all_reduce)
    monkeypatch.setattr(gradients, "BUCKET", 20)  # a layer has 16 numbers
    monkeypatch.setattr(World, "from_main", lambda world, value: value)
    return fake


def world() -> World:
    return World(0, 2, CPU, "ddp", "t")


def alone(times: int) -> dict[str, torch.Tensor]:
    """Gradients of one rank, of as many micro-batches."""
    model = chain()
    for number in range(times):
        model(inputs(number)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def inputs(number: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_means_replace_gradients_while_backward_runs(ranks: Ranks, micro_batches: int) -> None:
    model, wanted = chain(), alone(micro_batches)
    averager = Averager(list(model.parameters()), world())
    averager.watch()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        ranks.sent.clear()
        for number in range(micro_batches):
            ranks.moment = f"micro-batch {number}"
            if number == micro_batches - 1:
                averager.begin()
            model(inputs(number)).backward()
        ranks.moment = "after"
        averager.finish()
        for name, parameter in model.named_parameters():
            own = wanted.get(name, torch.zeros(4, 4))
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, (own + OTHERS) / 2), name
        moments = [moment for moment, _ in ranks.sent]
        # The first step finds out in which order gradients come; the idle layer's never does.
        last = f"micro-batch {micro_batches - 1}"
        assert moments == (["after"] * 6 if step == 0 else [last] * 5 + ["after"])
        assert ranks.under_way == 0
    assert ranks.most == gradients.UNDER_WAY + 1


def test_what_is_in_a_bucket_does_not_depend_on_the_order_in_which_they_are_sent(
    ranks: Ranks,
) -> None:
    """Else a resumed run would add up in another order than one that went straight."""
    model = chain()
    averager = Averager(list(model.parameters()), world())
    averager.watch()
    before = [list(map(id, bucket)) for bucket in averager._buckets]
    averager.begin()
    model(inputs(0)).backward()
    averager.finish()
    assert averager._order != list(range(len(before)))
    assert [list(map(id, bucket)) for bucket in averager._buckets] == before


def test_without_being_told_all_are_averaged_afterwards(ranks: Ranks) -> None:
    model, wanted = chain(), alone(1)
    model(inputs(0)).backward()
    average_gradients(list(model.parameters()), world())
    for name, parameter in model.named_parameters():
        own = wanted.get(name, torch.zeros(4, 4))
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, (own + OTHERS) / 2), name
    assert len(ranks.sent) == 6


def test_one_rank_sends_nothing(ranks: Ranks) -> None:
    model = chain()
    averager = Averager(list(model.parameters()), World(0, 1, CPU, "single", "t"))
    averager.watch()
    averager.begin()
    model(inputs(0)).backward()
    averager.finish()
    assert ranks.sent == []
    assert model.idle.weight.grad is None
