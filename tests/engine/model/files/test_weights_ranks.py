"""Weights on several ranks: each reads its own rows, and the forward is that of one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

from engine.families import load
from engine.model.files import weights
from tests.support.engine.toy_jobs import start_ranks
from tests.support.engine.weights import (
    CPU,
    FILE,
    Tiny,
    full,
    lora,
    several_files,
    tiny_tensors,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

flux = load("flux")


def inputs(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    draw = torch.Generator().manual_seed(1)
    return {
        "noisy": torch.randn(1, config["in_channels"] // 4, 8, 12, generator=draw),
        "level": torch.tensor([0.25]),
        "condition": {
            "prompt_embeds": torch.randn(1, 7, config["joint_attention_dim"], generator=draw),
            "pooled_prompt_embeds": torch.randn(1, config["pooled_projection_dim"], generator=draw),
        },
        "guidance": 3.5,
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_reads_its_rows_and_the_forward_is_that_of_from_pretrained(
    ranks: int, toy: Path, tmp_path: Path
) -> None:
    several_files(toy, tmp_path)
    tensors = tiny_tensors()
    del tensors["embed.weight"]
    write(tmp_path / "tiny", tensors)
    start_ranks(on_rank, ranks, toy, tmp_path).join()
    files = [toy / "model" / "transformer" / FILE, *(tmp_path / "several").glob("*.safetensors")]
    held = [sum(t.numel() * t.element_size() for t in load_file(f).values()) for f in files]
    read = [json.loads((tmp_path / f"read{rank}").read_text()) for rank in range(ranks)]
    for way, held_by_all in (("one", held[0]), ("several", sum(held[1:]))):
        assert sum(one[way] for one in read) == held_by_all
    if ranks == 4:
        assert sum(one["hybrid"] for one in read) == 2 * held[0]  # each half of the ranks


def on_rank(rank: int, ranks: int, toy: Path, shared: Path) -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    init_process_group("gloo", f"file://{shared}/meet", rank=rank, world_size=ranks)
    row = init_device_mesh("cpu", (ranks,))
    one = toy / "model" / "transformer"
    read = {"one": check_flux(one, one, toy, row)}
    read["several"] = check_flux(shared / "several", one, toy, row)
    check_tiny(shared / "tiny", toy, row)
    if ranks == 4:
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        read["hybrid"] = check_flux(one, one, toy, hybrid)
        check_tiny(shared / "tiny", toy, hybrid)
    (shared / f"read{rank}").write_text(json.dumps(read))
    destroy_process_group()


def own_rows(whole: torch.Tensor, mesh: Any) -> torch.Tensor:
    """What this rank should hold, by torch's own rule of cutting."""
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    chunks = whole.chunk(size)
    return chunks[rank] if rank < len(chunks) else whole[:0]


@torch.no_grad()
def check_flux(directory: Path, original: Path, toy: Path, mesh: Any) -> int:
    """Sharded by block, resharded after forward; returns the bytes read."""
    from torch.distributed.fsdp import fully_shard

    stock = FluxTransformer2DModel.from_pretrained(original)
    model: Any
    model, stored = weights.build_on_meta(FluxTransformer2DModel, directory, full(toy))
    for unit in [*model.transformer_blocks, *model.single_transformer_blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    weights.materialise(model, CPU)
    progress: list[int] = []
    read = weights.stream(model, stored, progress=progress.append)
    assert progress == list(range(1, len(stored) + 1))
    expected = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        here = weights.local_part(parameter)
        assert here.numel() < parameter.numel(), name
        assert torch.equal(here, own_rows(expected[name], mesh)), name
    out = flux.predict(model, **inputs(original))
    assert torch.allclose(out, flux.predict(stock, **inputs(original)), rtol=0, atol=1e-6)
    return read


@torch.no_grad()
def check_tiny(directory: Path, toy: Path, mesh: Any) -> None:
    """Odd rows, ranks without rows, shared tensors, buffers, mixed precisions in one unit."""
    from torch.distributed.fsdp import fully_shard

    expected = load_file(directory / FILE)
    expected["embed.weight"] = expected["head.weight"]
    for spec in (full(toy), lora(toy)):
        model: Any
        model, stored = weights.build_on_meta(Tiny, directory, spec)
        fully_shard(model, mesh=mesh)
        # As for the CPU offload: what is sharded here, the rest elsewhere.
        weights.materialise(model, torch.device("meta"), parameters_on=CPU)
        assert model.mean.is_meta
        assert {parameter.device for parameter in model.parameters()} == {CPU}
        model, stored = weights.build_on_meta(Tiny, directory, spec)
        fully_shard(model, mesh=mesh)
        weights.materialise(model, CPU)
        weights.stream(model, stored)
        weights.check_precision(model, spec)
        assert model.head.weight is model.embed.weight
        assert set(model.state_dict()) == set(expected)
        for name, parameter in model.named_parameters():
            wanted = own_rows(expected[name].to(parameter.dtype), mesh)
            assert torch.equal(weights.local_part(parameter), wanted), name
        assert torch.equal(model.mean, expected["mean"])
        if spec.model_type == "full":
            stock, tokens = Tiny(), torch.tensor([[0, 3, 6]])
            stock.load_state_dict(expected)
            assert torch.allclose(model(tokens), stock(tokens), rtol=0, atol=1e-6)
