"""Swapped blocks: which are on the device when, and what they compute."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine.model.files.weights import materialise
from engine.parallel import block_swap
from engine.parallel.block_swap import SwappedBlocks, swap_blocks
from engine.ranks.world import World
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from tests.support.engine.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, "single", "t")
FAMILY: Any = SimpleNamespace(facts=SimpleNamespace(blocks=("Block",)))


class Block(torch.nn.Module):
    """A frozen layer, and a trained vector beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor, embedding: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(hidden * self.scale).tanh() + embedding[0]


class Model(torch.nn.Module):
    """Blocks, of which all read what is computed before them."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.before = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedding = [self.before(x)]
        for block in self.blocks:
            again = self.recomputes and torch.is_grad_enabled()
            x = (
                checkpoint(block, x, embedding, use_reentrant=False)
                if again
                else block(x, embedding)
            )
        return x


def built(swapped: int, *, recomputes: bool = False, trains_before: bool = True) -> Model:
    """A model of the same numbers, whatever is swapped."""
    with torch.device("meta"):
        model = Model(recomputes)
    model.before.requires_grad_(trains_before)
    spec = JobSpec(swap_blocks=swapped)
    swap = swap_blocks(model, spec, FAMILY, ALONE)
    materialise(model, CPU, hosts=swap.hosts if swap else None)
    drawn = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=drawn)
    if swap:
        swap.start()
    return model


def trained(model: Model) -> list[torch.Tensor]:
    """Loss and gradients of a step, after a forward that nobody goes back through."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(x)
    loss = model(x).square().mean()
    loss.backward()
    return [before, loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("trains_before", [False, True])
@pytest.mark.parametrize("swapped", [1, 2, 3, 6])
def test_swapped_blocks_compute_the_same_and_two_are_there_at_most(
    swapped: int, trains_before: bool, recomputes: bool
) -> None:
    """Also where a block's input needs no gradient, and its backward ends with its adapter's."""
    options = {"recomputes": recomputes, "trains_before": trains_before}
    expected = trained(built(0, **options))
    model = built(swapped, **options)
    frozen = [block.layer.weight for block in model.blocks]
    there: list[int] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: there.append(resident()))

    def resident() -> int:
        return sum(weight.untyped_storage().nbytes() > 0 for weight in frozen) - (6 - swapped)

    assert resident() == 0
    for one, other in zip(trained(model), expected, strict=True):
        assert torch.equal(one, other)
    assert max(there) == min(2, swapped)
    assert resident() == 0, "between steps"


def test_the_next_block_is_copied_while_one_computes() -> None:
    """In forward and in backward; the last one stays in between."""
    copied: list[int] = []
    model = built(3)
    fetch = SwappedBlocks._fetch

    def fetched(swap: Any, block: Any) -> None:
        if not block.here:
            copied.append(swap._blocks.index(block))
        fetch(swap, block)

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: copied.append(10 + number))
    with patch.object(SwappedBlocks, "_fetch", fetched):
        loss = model(torch.zeros(1, 4)).sum()
        loss.backward()
    # Swapped are the blocks 1, 3 and 5.
    assert copied == [0, 10, 1, 11, 12, 2, 13, 14, 15, 1, 0]


def test_more_blocks_than_there_are_is_one_sentence() -> None:
    with pytest.raises(UserError, match="swap_blocks: 7, but the model has 6 blocks"):
        built(7)


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_of_a_machine_share_memory_that_one_fills(shared: bool, tmp_path: Path) -> None:
    """A rank that cannot open it has its own."""

    def pages(rank: int) -> list[Any]:
        os.environ["LOCAL_RANK"] = str(rank)
        world = World(rank, 2, CPU, "ddp", "t")
        with patch.object(block_swap, "_MEMORY", f"{block_swap._MEMORY}{'' if shared else rank}"):
            mine, fills = block_swap._shared_pages(8192, world)
        if mine is not None and fills:
            mine[:5] = b"bytes"
        world.barrier()
        return [fills, mine is not None and mine[:5] == b"bytes"]

    answers = on_ranks(pages, 2, tmp_path)
    assert answers == [[True, True], [False, True] if shared else [True, False]]
