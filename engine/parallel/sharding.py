"""Shard a model as the job asks.

Accelerate's `FullyShardedDataParallelPlugin` is the vocabulary (its fields, its wrap policies);
torch's `fully_shard` does the work, alike on CPU and CUDA. Accelerate's own `prepare` is not
used: on CPU it drops the plugin without a word, and the model would run unsharded.
`engine.parallel.sharding_check` proves afterwards that it does not.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import get_module_children_bottom_up
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from engine.model.precision import compute_dtype
from engine.parallel.block_swap import place_in_forward
from engine.parallel.wrap_policy import choose_modules, load_policy
from engine.ranks.mesh import sharding_mesh
from jobs.errors import UserError
from jobs.spec.families import wrapped_classes
from jobs.spec.rules.strategy import own_policy

# Torch warns when a wrapped block returns a view, since an in-place operation on it would be wrong;
# diffusers' blocks return slices of the joint sequence and nothing writes into them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from engine.ranks.world import World
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.devices import FsdpKeys


def build_plugin(spec: RecipeKeys, device: torch.device) -> FullyShardedDataParallelPlugin:
    """Return the job's FSDP options in accelerate's terms, with torch's own policies in them."""
    # Pinned memory, for fast copies to and from the GPU, cannot be had where there is no driver.
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,  # a job that says 1 was warned that it runs as 2
        # A number of shards is beyond the plugin's words; `shard` reads it from the spec.
        reshard_after_forward=bool(spec.fsdp_reshard_after_forward),
        auto_wrap_policy="NO_WRAP" if own_policy(spec) else spec.fsdp_auto_wrap_policy,
        transformer_cls_names_to_wrap=wrapped_classes(spec),
        min_num_params=spec.fsdp_min_num_params,
        state_dict_type=spec.fsdp_state_dict_type,
        mixed_precision_policy=precision_policy(spec),
        cpu_offload=offload if spec.fsdp_cpu_offload else OffloadPolicy(),
        # The models' own, block by block: `engine.model.activation_checkpointing`.
        activation_checkpointing=False,
        # Weights are streamed, see `engine.model.files.weights`.
        cpu_ram_efficient_loading=False,
    )


def shard(
    model: torch.nn.Module,
    spec: RecipeKeys,
    world: World,
    *,
    replicated: Iterable[torch.nn.Parameter] = (),
    learns: bool = True,
) -> list[str]:
    """Apply FSDP2 to a model whose parameters are still on the meta device.

    Args:
        model: The whole model; its parameters become `DTensor`s sharded along dim 0.
        spec: The job.
        world: The ranks.
        replicated: Parameters that stay whole on every rank (LoRA placed `replicated`).
        learns: Whether forwards are followed by backward; a model that only samples has none.

    Returns:
        The class name of each FSDP unit, the root last.

    Raises:
        UserError: A class to wrap is not in the model, or nothing would be wrapped.
    """
    assert world.mesh is not None, "only strategies that shard have a mesh"
    plugin = build_plugin(spec, world.device)
    options: dict[str, Any] = {
        "mesh": sharding_mesh(world.mesh),
        "mp_policy": plugin.mixed_precision_policy,
        "offload_policy": plugin.cpu_offload,
        "ignored_params": set(replicated),
    }
    units = []
    chosen = modules_to_wrap(model, spec, plugin, options["ignored_params"])
    if own_policy(spec) is not None:
        _check_agreement(model, chosen, world)
    for module in chosen:
        fully_shard(module, reshard_after_forward=spec.fsdp_reshard_after_forward, **options)
        units.append(_class_name(module))
    if not units and spec.fsdp_auto_wrap_policy != "NO_WRAP":
        raise UserError(
            f"fsdp_auto_wrap_policy {spec.fsdp_auto_wrap_policy} wraps nothing in this model",
            "name block classes in fsdp_transformer_layer_cls_to_wrap"
            if spec.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
            else "lower fsdp_min_num_params"
            if spec.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP"
            else "it must return True for some module with recurse=False",
        )
    # The root is gathered until backward ends in any case; keeping it saves one all-gather.
    fully_shard(model, reshard_after_forward=False, **options)
    in_order = _units_in_order(model)
    if learns and spec.fsdp_reshard_after_forward is True:
        # Backward begins with the last unit: freed, it would be gathered again at once.
        for unit in in_order[-1:]:
            unit.set_reshard_after_forward(False, recurse=False)
    _prefetch(in_order, spec)
    return [*units, _class_name(model)]


def reshard(model: torch.nn.Module) -> None:
    """Free whatever weights a forward without backward has left gathered.

    The root and the last unit keep their weights gathered after forward. Without a backward they
    would stay so, and the next forward would not see what was changed in the shards meanwhile.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def modules_to_wrap(
    model: torch.nn.Module,
    spec: FsdpKeys,
    plugin: FullyShardedDataParallelPlugin,
    ignored: Collection[torch.nn.Parameter] = (),
) -> list[torch.nn.Module]:
    """Return the modules that become separate FSDP units, inner ones first; never the root."""
    if path := own_policy(spec):
        return choose_modules(model, load_policy(path), ignored)
    below_root = get_module_children_bottom_up(model)[:-1]
    if spec.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        return _large_modules(below_root, spec.fsdp_min_num_params)
    try:
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    except ValueError as error:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {error}", f"the model has {', '.join(classes)}"
        ) from None
    # A shared module is listed once for each of its places.
    unique = dict.fromkeys(module for module in below_root if policy is not None and policy(module))
    return list(unique)


def _check_agreement(
    model: torch.nn.Module, chosen: Sequence[torch.nn.Module], world: World
) -> None:
    """Whether a person's own policy chose alike on all ranks; a collective.

    Ranks with other units would wait for each other in their first all-gather.

    Raises:
        UserError: It did not, on all ranks.
    """
    names = {module: name for name, module in model.named_modules()}
    answers = world.gather([names[module] for module in chosen])
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            other = set(answer) ^ set(answers[0])
            raise UserError(
                f"fsdp_auto_wrap_policy: it chose different modules on rank {rank} than on rank 0: "
                f"{', '.join(sorted(other)[:3]) or 'in another order'}",
                "it must depend only on the module",
            )


def _large_modules(bottom_up: Sequence[torch.nn.Module], least: int) -> list[torch.nn.Module]:
    """Modules that hold at least a number of parameters outside of units below them.

    As torch's `size_based_auto_wrap_policy` counts. Accelerate's FSDP2 version of it counts what
    is in a unit again for every module around it, and tries containers that are never called.
    """
    chosen: list[torch.nn.Module] = []
    taken: set[torch.nn.Parameter] = set()
    for module in bottom_up:
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            continue
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        if sum(parameter.numel() for parameter in own) >= least:
            chosen.append(module)
            taken.update(own)
    return chosen


def _units_in_order(model: torch.nn.Module) -> list[FSDPModule]:
    """Return the units below the root in the order of forward."""
    units = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule) and n]
    return [unit for _, unit in sorted(units, key=lambda unit: place_in_forward(unit[0]))]


def _prefetch(units: Sequence[FSDPModule], spec: FsdpKeys) -> None:
    """Gather units ahead of time, so that communication hides behind more computation."""
    for place, unit in enumerate(units):
        if ahead := spec.fsdp_forward_prefetch:
            unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + ahead]))
        if ahead := spec.fsdp_backward_prefetch:
            before = units[max(0, place - ahead) : place]
            unit.set_modules_to_backward_prefetch(list(reversed(before)))


def precision_policy(spec: RecipeKeys) -> MixedPrecisionPolicy:
    """Gather in the compute precision, reduce in fp32.

    `cast_forward_inputs` stays off: it would cast rotary position ids to bf16. Autocast casts
    what is safe to cast (`engine.model.precision`).
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
    """Return the class's original name; `fully_shard` swaps in a class with an FSDP prefix."""
    return type(module).__name__.removeprefix("FSDP")
