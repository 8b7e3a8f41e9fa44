"""How many processes on which GPUs: flags and files of `accelerate launch`, and FSDP's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    flatten,
    is_off,
    named,
    needless,
    same,
    without,
)
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import read_beside
from jobs.spec.values.spellings import as_list, normal_key

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs.imports.common.draft import Rule

_ONE_MACHINE: Final = "jobs run on one machine"
_NO_DEEPSPEED: Final = "DeepSpeed is not supported; strategy: fsdp2 shards the same state as ZeRO 3"
_BY_ITSELF: Final = "FSDP2 always does this"


def gpus(draft: Draft, key: str, value: Any) -> None:
    """GPUs by number, before it is asked for a number of processes."""
    if str(value).strip().lower() == "all":
        draft.unneeded(key, "gpus: N uses any N free GPUs")
        return
    numbers = as_list(value) if isinstance(value, str) else value
    draft.take(key, "gpus", numbers if isinstance(numbers, list) else [numbers])


def processes(draft: Draft, key: str, value: Any) -> None:
    """Ranks; where GPUs are named, as many."""
    named_ones, number = draft.values.get("gpus"), as_number(value)
    if not named_ones:
        draft.take(key, "num_processes", value)
    elif number is not None and 1 <= number < len(named_ones):
        draft.take(key, "gpus", named_ones[: int(number)], "the first")
    else:
        draft.unneeded(key, "defaults to the number of gpus")


def _sharding(draft: Draft, key: str, value: Any) -> None:
    """FSDP v1's strategies, by name or number."""
    word = str(value).strip().upper()
    if word in ("FULL_SHARD", "1", "TRUE", "FULL"):
        draft.take(key, "fsdp_reshard_after_forward", True, "FULL_SHARD of FSDP v1")
    elif word in ("SHARD_GRAD_OP", "2", "FALSE"):
        draft.take(key, "fsdp_reshard_after_forward", False, "SHARD_GRAD_OP of FSDP v1")
    elif word in ("NO_SHARD", "3"):
        draft.values.pop("fsdp_enable", None)
        draft.take(key, "strategy", "ddp", "NO_SHARD of FSDP v1")
    else:
        draft.unsupported(key, "set strategy: hsdp and dp_replicate_size, the number of replicas")


def _reshard(draft: Draft, key: str, value: Any) -> None:
    """Also FSDP v1's strategies, which accelerate's files may have here."""
    if str(value).strip().upper() in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        _sharding(draft, key, value)
    else:
        same(draft, key, value)


def _distributed_type(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().upper().rpartition(".")[2]
    if word == "FSDP":
        draft.take(key, "fsdp_enable", True, "FSDP2")
    elif word == "DEEPSPEED":
        draft.unsupported(key, _NO_DEEPSPEED)
    elif word in ("NO", "MULTI_GPU", "MULTI_CPU"):
        draft.unneeded(key, "strategy: auto chooses and logs why")
    else:
        draft.unsupported(key, "jobs run on NVIDIA GPUs or on CPU ranks")


def _use_cpu(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "off is the default")
    else:
        draft.take(key, "device", "cpu", "the equivalent value")


def _dynamo(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "off is the default")
    elif draft.take(
        key, "torch_compile_backend", str(value).strip().lower(), "torch_compile: true"
    ):
        draft.values["torch_compile"] = True


# Also keys of tools that start accelerate themselves.
RULES: Final[dict[str, Rule]] = {
    "gpu_ids": gpus,
    "num_processes": processes,
    "num_machines": without(_ONE_MACHINE, "1"),
    "dynamo_backend": _dynamo,
    "training_dynamo_backend": _dynamo,
    "deepspeed_config": without(_NO_DEEPSPEED),
    "deepspeed_config_file": without(_NO_DEEPSPEED),
    "use_deepspeed": without(_NO_DEEPSPEED),
    **dict.fromkeys(("fsdp_enable", "use_fsdp"), named("fsdp_enable")),
    **all_of(
        "fsdp_version fsdp_state_dict_type fsdp_cpu_ram_efficient_loading "
        "fsdp_auto_wrap_policy fsdp_min_num_params fsdp_limit_all_gathers "
        "fsdp_transformer_layer_cls_to_wrap fsdp_activation_checkpointing "
        "fsdp_forward_prefetch fsdp_backward_prefetch context_parallel_size "
        "context_parallel_comm_strategy",
        same,
    ),
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_sharding_strategy": _sharding,
    "fsdp_backward_prefetch_policy": named("fsdp_backward_prefetch"),
    **dict.fromkeys(("fsdp_cpu_offload", "fsdp_offload_params"), named("fsdp_cpu_offload")),
    **all_of(
        "fsdp_use_orig_params fsdp_sync_module_states",
        needless(_BY_ITSELF),
    ),
    **all_of(
        "machine_rank main_process_ip same_network rdzv_backend",
        needless(_ONE_MACHINE),
    ),
    "main_process_port": needless("a free port is chosen"),
}

_LAUNCH: Final[dict[str, Rule]] = {
    **RULES,
    "mixed_precision": training_keys.precision,
    "distributed_type": _distributed_type,
    "use_cpu": _use_cpu,
    "cpu": _use_cpu,
    **all_of(
        "multi_gpu num_cpu_threads_per_process main_training_function debug "
        "compute_environment downcast_bf16 enable_cpu_affinity num_cpu_threads quiet module "
        "no_python tpu_env tpu_use_cluster tpu_use_sudo tee log_dir max_restarts "
        "monitor_interval standalone fsdp_config dynamo_mode dynamo_use_dynamic "
        "dynamo_use_fullgraph",
        needless("the launch follows the job's keys"),
    ),
    "nproc_per_node": processes,
    "nnodes": without(_ONE_MACHINE, "1"),
}


def read_flags(draft: Draft, prefix: str, flags: dict[str, Any]) -> None:
    """Read the flags in front of the script's name, and the config file that they may name."""
    rest = {key: value for key, value in flags.items() if key != "config_file"}
    _apply(draft, prefix, rest)
    if "config_file" in flags:
        read_file(draft, f"{prefix}config_file", str(flags["config_file"]), over=rest)


def read_file(draft: Draft, key: str, name: str, over: Collection[str] = ()) -> None:
    """Read a file that `accelerate config` wrote.

    Args:
        draft: The job.
        key: What names it.
        name: Its path.
        over: Keys that are also flags, which win.
    """
    part = Draft({key: name}, draft.folder, above=draft)
    file = read_beside(part, key, name, dict, "set num_processes or gpus, and the fsdp_* keys")
    if file is None:
        return
    path, values = file
    part.record(Kind.TAKEN, key, why="its keys follow")
    # The levels of these files say nothing that the keys do not; DeepSpeed's are one.
    flat = flatten(values, keep=("deepspeed_config",))
    flat = {normal_key(name.rpartition(".")[2]): value for name, value in flat.items()}
    for name in over:
        if flat.pop(name, None) is not None:
            draft.unneeded(f"{path.name}: {name}", "the flag wins")
    _apply(draft, f"{path.name}: ", flat)


def read_environment(draft: Draft, variables: dict[str, str]) -> None:
    """Variables that are set in front of a command."""
    rules = {"CUDA_VISIBLE_DEVICES": gpus}
    part = Draft(variables, draft.folder, above=draft)
    part.values = draft.values
    part.apply(rules, {"": needless("set it in the shell that submits the job, if needed")}, ())


def _apply(draft: Draft, prefix: str, flags: dict[str, Any]) -> None:
    """Apply launch settings to a draft, reported under their own names."""
    part = Draft(flags, draft.folder, prefix=prefix, above=draft)
    part.values = draft.values
    part.apply(_LAUNCH, {}, ("gpu_ids", "distributed_type"))
