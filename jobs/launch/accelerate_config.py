"""The accelerate config file of a run, complete: ranks can be launched with it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.spec.families import wrapped_classes
from jobs.spec.rules.strategy import SHARDING, own_policy, world_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import JobSpec


def accelerate_config(spec: JobSpec, strategy: str, *, gpus: Sequence[str]) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads.

    Without a file, it would merge whatever the person's own default config says into the flags it
    was not given.

    Args:
        spec: The job; what it keeps of an accelerate config of the person's is in the file too.
        strategy: What will run.
        gpus: One per rank, by UUID or number; empty for CPU ranks.
    """
    kept = dict(spec.accelerate_config) if isinstance(spec.accelerate_config, dict) else {}
    dynamo = dict(kept.pop("dynamo_config", None) or {})
    ours: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(spec, strategy),
        "num_machines": spec.num_machines,
        "machine_rank": spec.machine_rank,
        "num_processes": world_size(spec),
        "main_process_port": spec.main_process_port or 0,
        "mixed_precision": spec.mixed_precision,
        "use_cpu": not gpus,
    }
    if spec.main_process_ip:
        ours["main_process_ip"] = spec.main_process_ip
    if gpus:
        ours["gpu_ids"] = ",".join(gpus)
    if strategy in SHARDING:
        ours["fsdp_config"] = fsdp_options(spec)
    if dynamo and spec.torch_compile:
        ours["dynamo_config"] = dynamo
    return {"debug": False} | kept | ours


def fsdp_options(spec: JobSpec) -> dict[str, Any]:
    """The job's FSDP options as accelerate calls them, in its files and as flags."""
    options: dict[str, Any] = {
        "fsdp_version": 2,
        # Accelerate knows yes and no; the number of shards is the engine's to see to.
        "fsdp_reshard_after_forward": bool(spec.fsdp_reshard_after_forward),
        "fsdp_state_dict_type": spec.fsdp_state_dict_type,
        # A callable, of which accelerate's launcher does not know, is called by the engine.
        "fsdp_auto_wrap_policy": "NO_WRAP" if own_policy(spec) else spec.fsdp_auto_wrap_policy,
        "fsdp_offload_params": spec.fsdp_cpu_offload,
        "fsdp_activation_checkpointing": spec.fsdp_activation_checkpointing,
        # The engine always reads only each rank's own shard. Accelerate's switch of this name
        # would make transformers leave text encoders empty on every rank but the first.
        "fsdp_cpu_ram_efficient_loading": False,
    }
    if spec.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        options["fsdp_transformer_layer_cls_to_wrap"] = ",".join(wrapped_classes(spec))
    if spec.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        options["fsdp_min_num_params"] = spec.fsdp_min_num_params
    return options


def _distributed_type(spec: JobSpec, strategy: str) -> str:
    if strategy in SHARDING:
        return "FSDP"
    return "MULTI_GPU" if world_size(spec) > 1 else "NO"
