"""Shard a model as the job asks, and prove that what runs is what was asked.

Accelerate's `FullyShardedDataParallelPlugin` is the vocabulary (its fields, its wrap policies);
torch's `fully_shard` does the work. Accelerate's own `prepare` is not used: on CPU it drops the
plugin without a word, and the model would run unsharded.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import get_module_children_bottom_up
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.precision import compute_dtype
from jobs.errors import UserError
from jobs.families import wrapped_classes

# Torch warns when a wrapped block returns a view, since an in-place operation on it would be wrong;
# diffusers' blocks return slices of the joint sequence and nothing writes into them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.world import World
    from jobs.spec import JobSpec


def build_plugin(spec: JobSpec) -> FullyShardedDataParallelPlugin:
    """The job's FSDP options in accelerate's terms."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=spec.fsdp_reshard_after_forward,
        auto_wrap_policy=spec.fsdp_auto_wrap_policy,
        transformer_cls_names_to_wrap=wrapped_classes(spec),
        min_num_params=spec.fsdp_min_num_params,
        state_dict_type=spec.fsdp_state_dict_type,
        mixed_precision_policy=_precision_policy(spec),
        cpu_offload=False,
        activation_checkpointing=False,  # the models' own, block by block
        cpu_ram_efficient_loading=False,  # weights are streamed, see engine/weights.py
    )


def shard(
    model: torch.nn.Module,
    spec: JobSpec,
    world: World,
    *,
    replicated: Iterable[torch.nn.Parameter] = (),
) -> list[str]:
    """Apply FSDP2 to a model whose parameters are still on the meta device.

    Args:
        model: The whole model; its parameters become `DTensor`s sharded along dim 0.
        spec: The job.
        world: The ranks.
        replicated: Parameters that stay whole on every rank (LoRA placed `replicated`).

    Returns:
        The class name of each FSDP unit, the root last.

    Raises:
        UserError: A class to wrap is not in the model, or nothing would be wrapped.
    """
    plugin = build_plugin(spec)
    try:
        wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    except ValueError as error:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {error}", f"the model has {', '.join(classes)}"
        ) from None
    options = {
        "mesh": init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",)),
        "mp_policy": plugin.mixed_precision_policy,
        "ignored_params": set(replicated),
    }
    units = []
    for module in get_module_children_bottom_up(model)[:-1]:
        if wraps is not None and wraps(module) and not isinstance(module, FSDPModule):
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **options)
            units.append(_class_name(module))
    if wraps is not None and not units:
        raise UserError(
            f"fsdp_auto_wrap_policy {spec.fsdp_auto_wrap_policy} wraps nothing in this model",
            "name block classes in fsdp_transformer_layer_cls_to_wrap",
        )
    # The root is gathered until backward ends in any case; keeping it saves one all-gather.
    fully_shard(model, reshard_after_forward=False, **options)
    return [*units, _class_name(model)]


@dataclass(frozen=True)
class ShardingSummary:
    """What sharding did on this rank. Counts of parameters (elements), sizes in bytes."""

    ranks: int
    units: dict[str, int]
    tensors: int
    parameters: int
    local_parameters: int
    wrapped_parameters: int
    local_bytes: int
    replicated_parameters: int

    def __str__(self) -> str:
        units = ", ".join(f"{count} {name}" for name, count in self.units.items())
        share = self.local_parameters / self.parameters
        wrapped = self.wrapped_parameters / self.parameters
        text = (
            f"sharded: {self.tensors} base tensors are DTensors over {self.ranks} ranks; "
            f"{self.local_parameters:,} of {self.parameters:,} parameters here "
            f"({share:.4f}, {self.local_bytes / 2**20:.1f} MiB); units: {units}; "
            f"{wrapped:.1%} wrapped, {1 - wrapped:.1%} in the root"
        )
        if self.replicated_parameters:
            text += f"; {self.replicated_parameters:,} LoRA parameters whole on every rank"
        return text


def check_sharding(
    model: torch.nn.Module,
    world: World,
    units: list[str],
    *,
    replicated: Iterable[torch.nn.Parameter] = (),
) -> ShardingSummary:
    """Prove that every base parameter is a `DTensor` that holds just this rank's share.

    Raises:
        RuntimeError: A parameter is whole, or its local shape is not that of a dim-0 shard. This
            ends the job: it would otherwise run, unsharded, at twice the memory.
    """
    whole = {id(parameter) for parameter in replicated}
    tensors = parameters = local = local_bytes = replicated_count = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in whole:
            replicated_count += parameter.numel()
            continue
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is not sharded, though {world.strategy} was asked for")
        rows = parameter.shape[0] if parameter.dim() else 1
        expected = _rows_of_rank(rows, world.rank, world.size)
        shard_here = parameter.to_local()
        if shard_here.shape != (expected, *parameter.shape[1:]):
            raise RuntimeError(
                f"{name}: the local shard is {tuple(shard_here.shape)}, expected {expected} of "
                f"{rows} rows"
            )
        tensors += 1
        parameters += parameter.numel()
        local += shard_here.numel()
        local_bytes += shard_here.numel() * shard_here.element_size()
    if tensors == 0:
        raise RuntimeError("the model has no sharded parameter at all")
    in_root = sum(
        parameter.numel() for parameter in _own_parameters(model) if id(parameter) not in whole
    )
    counts: dict[str, int] = {}
    for unit in units:
        counts[unit] = counts.get(unit, 0) + 1
    return ShardingSummary(
        world.size, counts, tensors, parameters, local, parameters - in_root, local_bytes,
        replicated_count,
    )  # fmt: skip


def _own_parameters(root: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that no unit below the root holds."""
    below = {
        id(parameter)
        for module in root.modules()
        if module is not root and isinstance(module, FSDPModule)
        for parameter in module.parameters()
    }
    return [parameter for parameter in root.parameters() if id(parameter) not in below]


def _rows_of_rank(rows: int, rank: int, size: int) -> int:
    """How many of `rows` a rank holds: chunks of ceil(rows / size), the last ones shorter."""
    chunk = -(-rows // size)
    return max(0, min(chunk, rows - chunk * rank))


def _precision_policy(spec: JobSpec) -> MixedPrecisionPolicy:
    """Gather in the compute precision, reduce in fp32.

    `cast_forward_inputs` stays off: it would cast rotary position ids to bf16. Autocast casts
    what is safe to cast (`engine.precision`).
    """
    # The frozen base of a LoRA is already stored in the compute precision, and the adapter's
    # fp32 must not be cast; full training keeps fp32 masters and gathers them in bf16.
    gather = compute_dtype(spec) if spec.model_type == "full" else None
    return MixedPrecisionPolicy(
        param_dtype=gather if gather is not torch.float32 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def _class_name(module: torch.nn.Module) -> str:
    """The class's own name; `fully_shard` swaps the class for one with an FSDP prefix."""
    return type(module).__name__.removeprefix("FSDP")
