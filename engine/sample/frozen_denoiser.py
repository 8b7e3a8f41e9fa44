"""Load denoisers that a job does not train, to sample with them.

A model with two denoisers, each for some of the noise levels, samples with both. The other one is
in memory only meanwhile: read again each time, sharded over the ranks, or with blocks in host
memory, as the trained one is. If another job trains it, its newest checkpoint is read.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.exports.source import open_checkpoint
from engine.model.adapters import lora
from engine.model.base_matmul import set_scaled
from engine.model.files import weights
from engine.model.kernels import choose_attention
from engine.model.quantized_linear import quantize_layers
from engine.model.release import Watch, give_back
from engine.parallel.block_swap import swap_blocks
from engine.parallel.sharding import shard
from jobs.errors import UserError
from jobs.run.checkpoint_files import newest_whole, read_state
from jobs.run.rundir import RunDir
from jobs.spec.families import experts_of
from jobs.spec.job_spec import JobSpec, field_names
from jobs.spec.keys.lora import LoraKeys
from jobs.spec.rules.lora_conflicts import may_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.run_context import RunContext
    from jobs.run.checkpoint_files import Checkpoint


@dataclass(frozen=True)
class OtherExpert:
    """The newest checkpoint of the job that trains the model's other expert.

    Attributes:
        run: The name of its run directory.
        checkpoint: The checkpoint.
        spec: That job.
        ema: Whether to take the moving average.
    """

    run: str
    checkpoint: Checkpoint
    spec: JobSpec
    ema: bool


def find_other_expert(run: RunContext) -> OtherExpert | None:
    """Find the checkpoint that `other_expert` stands for now, the same on all ranks; a collective.

    Rank 0's log says which one it is, or that samples use the base model's expert.
    """
    if run.spec.other_expert is None or experts_of(run.spec) is None:
        return None
    place = RunDir(Path(run.spec.other_expert))
    expert: OtherExpert | None = None
    if run.world.main:
        try:
            checkpoint = newest_whole(place)
            state = read_state(checkpoint.path) if checkpoint is not None else {}
            values = {k: v for k, v in (state.get("spec") or {}).items() if k in field_names()}
            if checkpoint is not None and values:
                spec = JobSpec.model_validate(values)
                expert = OtherExpert(place.root.name, checkpoint, spec, bool(state.get("ema")))
        except (OSError, ValueError, UserError) as error:
            run.telemetry.warn(f"other_expert: {place.root} cannot be read ({error})")
        run.telemetry.say(
            f"samples use step {expert.checkpoint.step} of {expert.run} for the other noise levels"
            if expert is not None
            else f"{place.root.name} has no checkpoint; samples use the base model's other expert"
        )
    return run.world.from_main(expert)


@contextmanager
def second_denoisers(
    run: RunContext, other: OtherExpert | None = None
) -> Iterator[tuple[dict[str, Any], OtherExpert | None]]:
    """Load the pipeline's other denoisers to sample with, by their names in it; a collective.

    Args:
        run: The job and its ranks.
        other: The checkpoint to read; the same on all ranks.

    Yields:
        The denoisers, and `other`, or None if its checkpoint could not be read.
    """
    name = run.family.second_denoiser
    if name is None:
        yield {}, None
        return
    model = _load(run, name, other) if other is not None else None
    if model is None:
        other = None
    with frozen_denoiser(run, name, model) as model:
        others = {name: model}
        del model
        yield others, other
        others.clear()


@contextmanager
def frozen_denoiser(run: RunContext, name: str, model: Any = None) -> Iterator[Any]:
    """Keep a denoiser to sample with: `model`, or one unchanged from the base; a collective."""
    if model is None:
        model = _load(run, name)
    watch = Watch({name: model})
    yield model
    del model
    if left := watch.still_held():
        run.telemetry.warn(left)
    give_back(run.world.device)


def _load(run: RunContext, name: str, other: OtherExpert | None = None) -> torch.nn.Module | None:
    """Load a denoiser; None if the checkpoint of `other` cannot be read on some rank."""
    spec, family, world = run.spec, run.family, run.world
    trained = name == family.component
    directory = family.denoiser_of(run.model_root) if trained else run.model_root / name
    # Kept in the compute precision, as the base of a LoRA is.
    frozen = spec.model_copy(update={"model_type": "lora"})
    model, stored = weights.build_on_meta(family.transformer_class(), directory, frozen)
    quantize_layers(model, spec, family, stored)
    set_scaled(model, scaled=may_scale(spec) and spec.base_matmul == "scaled")
    choose_attention(model, spec)
    if other is not None and other.spec.model_type == "lora":
        keys = {key: getattr(other.spec, key) for key in LoraKeys.model_fields}
        lora.add_lora(
            model,
            frozen.model_copy(update=keys),
            family.lora_targets(other.spec),
            family.without_gradient(model, other.spec),
        )
    adapter = lora.lora_parameters(model)
    swapped = swap_blocks(model, spec, family, world)
    model.requires_grad_(False)
    if world.shards:
        shard(model, frozen, world, replicated=adapter.values(), learns=False)
    offload = torch.device("cpu") if world.shards and spec.fsdp_cpu_offload else None
    hosts = swapped.hosts if swapped else None
    weights.materialise(model, world.device, parameters_on=offload, hosts=hosts)
    read = weights.stream(
        model,
        stored,
        names=lora.adapted_name(model).__getitem__,
        progress=lambda done: run.telemetry.moved(),
    )
    if other is not None and not _fill(run, model, other):
        return None
    if swapped:
        swapped.start()
    run.telemetry.say(f"read {read / 2**20:.1f} MiB of {directory.name} to sample with")
    return model.eval()


def _fill(run: RunContext, model: torch.nn.Module, other: OtherExpert) -> bool:
    """Fill a denoiser with the other job's weights; return whether all ranks could.

    That job may delete the checkpoint meanwhile, so the ranks vote, and none waits for another one
    within the reading.
    """
    failed = ""
    try:
        source = open_checkpoint(other.checkpoint, ema=other.ema)
        source.fill(model, run.telemetry.moved)
    except Exception as error:  # torch raises anything where a file is gone
        failed = str(error) or type(error).__name__
    if not any(run.world.any([bool(failed)])):
        return True
    run.telemetry.warn(
        f"step {other.checkpoint.step} of {other.run} cannot be read "
        f"({failed or 'on another rank'}); samples use the base model's other expert"
    )
    return False
