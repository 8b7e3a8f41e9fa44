"""The other denoiser of a model that has two, each for some of the noise levels.

It is not trained, and is in memory only while samples are made: read again each time, sharded over
the ranks, or with blocks in host memory, as the trained one is.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from engine.model.files import weights
from engine.model.kernels import choose_attention
from engine.model.quantized.base_matmul import set_scaled
from engine.model.quantized.quantized_linear import quantize_layers
from engine.model.release import Watch, give_back
from engine.parallel.block_swap import swap_blocks
from engine.parallel.sharding import shard
from jobs.spec.rules.lora_conflicts import may_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.run_context import RunContext


@contextmanager
def second_denoisers(run: RunContext) -> Iterator[dict[str, Any]]:
    """Load the pipeline's other denoisers to sample with, by their names in it; a collective."""
    name = run.family.second_denoiser
    if name is None:
        yield {}
        return
    with frozen_denoiser(run, name) as model:
        others = {name: model}
        del model
        yield others
        others.clear()


@contextmanager
def frozen_denoiser(run: RunContext, name: str) -> Iterator[Any]:
    """Load a denoiser to sample with, unchanged from the model; a collective."""
    model = _load(run, name)
    watch = Watch({name: model})
    yield model
    del model
    if left := watch.still_held():
        run.telemetry.warn(left)
    give_back(run.world.device)


def _load(run: RunContext, name: str) -> torch.nn.Module:
    spec, family, world = run.spec, run.family, run.world
    directory = run.model_root / name
    # Kept in the compute precision, as the base of a LoRA is.
    frozen = spec.model_copy(update={"model_type": "lora"})
    model, stored = weights.build_on_meta(family.transformer_class(), directory, frozen)
    quantize_layers(model, spec, family, stored)
    set_scaled(model, scaled=may_scale(spec) and spec.base_matmul == "scaled")
    choose_attention(model, spec)
    model.requires_grad_(False)
    swaps = spec.swap_blocks > 0 and spec.model_type == "lora"
    if swaps:
        swap_blocks(model, frozen, family, world)
    if world.shards:
        shard(model, frozen, world)
    offloads = swaps or (world.shards and spec.fsdp_cpu_offload)
    offload = torch.device("cpu") if offloads else None
    weights.materialise(model, world.device, parameters_on=offload)
    read = weights.stream(model, stored, progress=lambda done: run.telemetry.moved())
    run.telemetry.say(f"read {read / 2**20:.1f} MiB of {directory.name} to sample with")
    return model.eval()
