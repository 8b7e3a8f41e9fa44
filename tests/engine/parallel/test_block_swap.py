"""Swapped blocks: which are on the device when, and what they compute."""

from __future__ import annotations

import mmap
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from diffusers import UNet2DConditionModel, WanVACETransformer3DModel
from torch.utils.checkpoint import checkpoint

from engine.model.files.weights import materialise
from engine.model.meta_device import parameters_on_meta
from engine.parallel import block_swap
from engine.parallel.block_swap import SwappedBlocks, place_in_forward, swap_blocks
from engine.ranks.world import World
from jobs.machine.residence import Residence
from jobs.models.model_config import find_target
from jobs.spec.job_spec import JobSpec
from tests.support.engine.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, "single", "t")
FAMILY: Any = SimpleNamespace(blocks=("Block",))


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
@pytest.mark.parametrize("swapped", [1, 2, 3, 6, 7])
def test_swapped_blocks_compute_the_same_and_two_are_there_at_most(
    swapped: int, trains_before: bool, recomputes: bool
) -> None:
    """Also where a block's input needs no gradient, and its backward ends with its adapter's.

    Seven are more than there are.
    """
    options = {"recomputes": recomputes, "trains_before": trains_before}
    expected = trained(built(0, **options))
    model = built(swapped, **options)
    frozen = [block.layer.weight for block in model.blocks]
    there: list[int] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: there.append(resident()))

    def resident() -> int:
        return sum(weight.untyped_storage().nbytes() > 0 for weight in frozen) - max(0, 6 - swapped)

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


A, B = Residence(boot="a"), Residence(boot="b")
SHARING: dict[str, tuple[list[tuple[Residence, int]], str, list[list[bool]]]] = {
    "one machine": ([(A, 0), (A, 1)], "", [[True, True], [False, True]]),
    "cyclic": ([(A, 0), (B, 0), (A, 1)], "", [[True, True], [True, True], [False, True]]),
    "another file": ([(A, 0), (A, 1)], "title", [[True, True], [True, False]]),
    "the first cannot open it": ([(A, 0), (A, 1)], "first", [[True, False], [True, False]]),
    "the second cannot open it": ([(A, 0), (A, 1)], "second", [[True, True], [True, False]]),
}


@pytest.mark.parametrize("case", SHARING)
def test_ranks_of_a_machine_share_memory_that_one_fills(case: str, tmp_path: Path) -> None:
    """Each rank: whether it fills, and whether it reads what the first of its machine wrote."""
    places, fails, expected = SHARING[case]

    def pages(rank: int) -> list[Any]:
        here, local = places[rank]
        os.environ["LOCAL_RANK"] = str(local)
        world = World(rank, len(places), CPU, "ddp", "t")
        title = f"{block_swap._MEMORY}{rank if fails == 'title' else ''}"
        with (
            patch.object(block_swap, "residence", lambda: here),
            patch.object(block_swap, "_MEMORY", title),
            patch.object(block_swap.mmap, "mmap", mmap.mmap)
            if fails != ("first", "second")[min(rank, 1)]
            else patch.object(block_swap.mmap, "mmap", side_effect=OSError),
        ):
            mine, sharing = block_swap._shared_pages(8192, world)
        fills = sharing[0] == rank
        if mine is not None and fills:
            mine[:2] = here.boot.encode() * 2
        world.barrier()
        return [fills, mine is not None and mine[:2] == here.boot.encode() * 2]

    assert on_ranks(pages, len(places), tmp_path) == expected


def test_ranks_swap_as_many_blocks_as_their_own_gpu_needs(tmp_path: Path) -> None:
    """Of GPUs of 16, 24 and 48 GB and another machine's: each block is read by one rank a machine.

    A rank that swaps nothing still joins the collectives, and does nothing else.
    """
    cards = [48, 16, 24, 16, 16]
    spec = JobSpec(swap_blocks={16: 4, 24: 1})

    def swapped(rank: int) -> list[Any]:
        os.environ["LOCAL_RANK"] = str(rank % 4)
        world = World(rank, len(cards), CPU, "ddp", "t")
        with torch.device("meta"):
            model = Model(recomputes=False)
        with (
            patch.object(block_swap, "residence", lambda: (A, B)[rank // 4]),
            patch.object(World, "gpu", lambda _: ("pretended", cards[rank] << 30)),
        ):
            swap = swap_blocks(model, spec, FAMILY, world, share=True)
        if swap is None:
            world.barrier()
            return [[], [], True, ""]
        blocks = [number for number, block in enumerate(model.blocks) if is_in(swap, block)]
        materialise(model, CPU, hosts=swap.hosts)
        elsewhere = swap.read_elsewhere()
        for name, parameter in model.named_parameters():
            if name.endswith("layer.weight") and name not in elsewhere:
                torch.nn.init.constant_(parameter, int(name.split(".")[1]) + 1)
        world.barrier()
        right = all((model.blocks[n].layer.weight == n + 1).all() for n in blocks)
        read = [n for n in blocks if f"blocks.{n}.layer.weight" not in elsewhere]
        return [blocks, read, right, swap.note.partition(" and ")[0]]

    def is_in(swap: SwappedBlocks, block: Any) -> bool:
        return any(block is one.module for one in swap._blocks)

    large, first, middle, second, alone = on_ranks(swapped, len(cards), tmp_path)
    assert large[:3] == [[], [], True]
    assert first[:3] == [[0, 2, 3, 5], [0, 2, 3, 5], True]
    assert middle[:3] == [[3], [], True]
    assert second[:3] == [[0, 2, 3, 5], [], True]
    assert alone[:3] == [[0, 2, 3, 5], [0, 2, 3, 5], True]
    assert all("shared" in found[3] for found in (first, middle, second))
    assert "shared" not in alone[3]


# -- order and failures --------------------------------------------------------------------


UNITS = (
    "BasicTransformerBlock",
    "ResnetBlock2D",
    "Transformer2DModel",
    "Upsample2D",
    "Downsample2D",
)


@pytest.mark.parametrize("family", ["sdxl", "stable_diffusion"])
def test_names_are_sorted_into_the_order_of_forward(family: str) -> None:
    """Of a UNet as published, on the meta device, with one layer in each attention."""
    target = find_target(family)
    config = target.config | {"transformer_layers_per_block": 1}
    with parameters_on_meta():
        model = UNet2DConditionModel.from_config(config).to("meta")
    called: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__ in UNITS or (name and "." not in name):
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with torch.device("meta"):
        added = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
        texts = torch.empty(1, 8, config["cross_attention_dim"])
        model(torch.empty(1, 4, 8, 8), 1, texts, added_cond_kwargs=added)
    blocks = [name for name in called if name.partition(".")[0].endswith(("_blocks", "_block"))]
    registered = [name for name, _ in model.named_modules() if name in blocks]
    assert sorted(registered, key=place_in_forward) == blocks != registered
    assert called[-2:] == ["conv_act", "conv_out"]


def test_control_blocks_come_before_the_others() -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 32, "num_layers": 3}
    with parameters_on_meta():
        model = WanVACETransformer3DModel(**sizes, vace_layers=[0, 2]).to("meta")
    blocks = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Block")}
    called: list[str] = []
    for name, block in blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with torch.device("meta"):
        video, control = torch.empty(1, 16, 1, 4, 4), torch.empty(1, 96, 1, 4, 4)
        text = torch.empty(1, 8, 4096)
        model(video, torch.empty(1), text, control_hidden_states=control)
    assert sorted(blocks, key=place_in_forward) == called != [*blocks]


def test_memory_is_given_back_after_the_copies_wait_for_what_computes() -> None:
    """The allocator may unmap it as soon as the stream that it belongs to is done."""
    seen: list[int] = []
    with torch.device("meta"):
        model = Model(recomputes=False)
    swap = swap_blocks(model, JobSpec(swap_blocks=1), FAMILY, ALONE)
    assert swap is not None
    materialise(model, CPU, hosts=swap.hosts)
    swap.start()
    block = swap._blocks[0]
    swap._fetch(block)
    size = block.there.untyped_storage().nbytes()
    stream = SimpleNamespace(
        wait_stream=lambda _: seen.append(block.there.untyped_storage().nbytes())
    )
    with (
        patch.object(swap, "_stream", stream),
        patch.object(torch.cuda, "current_stream", lambda _: None),
    ):
        swap._release(block)
    assert seen == [size] != [0]
    assert block.there.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("fails", ["copy", "backward"])
def test_a_step_that_fails_leaves_the_next_one_right(fails: str) -> None:
    expected = trained(built(0))
    model = built(3)
    frozen = [model.blocks[number].layer.weight for number in (1, 3, 5)]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.blocks[3].scale.register_hook(fail)
    copies = (
        patch.object(torch.UntypedStorage, "resize_", fail) if fails == "copy" else nullcontext()
    )
    with pytest.raises(RuntimeError, match="out of memory"), copies:
        model(torch.ones(1, 4)).sum().backward()
    handle.remove()
    model.zero_grad()
    for one, other in zip(trained(model), expected, strict=True):
        assert torch.equal(one, other)
    assert not any(weight.untyped_storage().nbytes() for weight in frozen)
