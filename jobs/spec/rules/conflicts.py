"""Find combinations of settings that cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.spec.families import FAMILIES
from jobs.spec.noise_levels import SHIFTED, SHIFTED_IN_WORDS
from jobs.spec.rules.averages import AVERAGE_RULES
from jobs.spec.rules.data_conflicts import CONDITIONING_RULES, DATA_RULES, Conflict
from jobs.spec.rules.launch_conflicts import KERNEL_RULES, LAUNCH_RULES, rings_masked
from jobs.spec.rules.lora_conflicts import LORA_RULES, trains_text
from jobs.spec.rules.no_effect import no_recomputation, one_denoiser
from jobs.spec.rules.steps import STEP_RULES
from jobs.spec.rules.strategy import (
    SHARDING,
    chosen_strategy,
    replicas_of,
    shards,
    world_size,
)
from jobs.spec.rules.token_routes import ROUTE_RULES
from jobs.spec.rules.validation_conflicts import VALIDATION_RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys, FsdpKeys
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.noise import NoiseKeys
    from jobs.spec.keys.training import TrainingKeys

__all__ = ["Conflict", "find_conflicts"]


def find_conflicts(spec: JobSpec) -> list[Conflict]:
    """Return every conflict in the job, at most one per rule, in table order."""
    conflicts = (rule(spec) for rule in _RULES)
    return [conflict for conflict in conflicts if conflict is not None]


def _suggest(numbers: Sequence[int]) -> str:
    """Suggest valid numbers, as the last part of a message."""
    words = list(map(str, numbers))
    return f"use {' or '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


def _no_model(spec: JobKeys) -> Conflict | None:
    key = "pretrained_model_name_or_path"
    return None if spec.pretrained_model_name_or_path else Conflict(key, f"{key} is missing")


def _both_experts(spec: JobKeys) -> Conflict | None:
    why = one_denoiser(spec) if spec.both_experts else ""
    return Conflict("both_experts", why, named=True) if why else None


def _strategy(spec: RecipeKeys) -> Conflict | None:
    strategy, _ = chosen_strategy(spec)
    ranks = world_size(spec)
    if spec.fsdp_enable and spec.strategy not in ("auto", *SHARDING):
        return Conflict(
            "strategy", f"fsdp_enable: true and strategy: {spec.strategy} contradict; remove one"
        )
    if spec.fsdp_enable is False and spec.strategy in SHARDING:
        return Conflict(
            "strategy", f"fsdp_enable: false and strategy: {spec.strategy} contradict; remove one"
        )
    if strategy == "single" and ranks > 1:
        return Conflict(
            "strategy", f"single runs one rank, not {ranks}; use strategy: auto", named=True
        )
    if strategy != "single" and ranks < 2:
        return Conflict(
            "strategy",
            f"{strategy} needs two or more ranks; raise num_processes, or use strategy: single",
        )
    return None


def _hsdp(spec: DeviceKeys) -> Conflict | None:
    replicas, key = spec.dp_replicate_size, "dp_replicate_size"
    if spec.strategy != "hsdp":
        if replicas in (None, 1):
            return None
        return Conflict(key, f"{key} needs strategy: hsdp")
    ranks = world_size(spec)
    if ranks < 2 or ranks % spec.context_parallel_size:
        return None  # another rule reports it
    if replicas is None and spec.num_machines > 1:
        replicas = spec.num_machines
    if replicas is None:
        return Conflict(
            key, f"strategy: hsdp needs {key}, the number of replicas, such as one per machine"
        )
    if replicas == 1:
        return Conflict(key, "1 has no replicas; use strategy: fsdp2", named=True)
    if ranks % (replicas * spec.context_parallel_size):
        times = f" x context_parallel_size {spec.context_parallel_size}"
        product = f"{key} {replicas}{times if spec.context_parallel_size > 1 else ''}"
        rest = ranks // spec.context_parallel_size
        fitting = [number for number in range(2, rest + 1) if rest % number == 0 and number < ranks]
        instead = _suggest(fitting) if fitting else "use strategy: fsdp2"
        return Conflict(key, f"{product} does not divide the {ranks} ranks; {instead}")
    if ranks == replicas:
        return Conflict(key, f"{key} {replicas} leaves nothing to shard; use strategy: ddp")
    return None


def _context_parallel(spec: JobSpec) -> Conflict | None:
    size, key, ranks = spec.context_parallel_size, "context_parallel_size", world_size(spec)
    if size == 1:
        return None
    if not shards(spec) or spec.fsdp_version == 1:
        return Conflict(
            key, "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2"
        )
    if spec.deepspeed_config:
        return Conflict(key, "Context parallelism requires FSDP2. Remove deepspeed_config")
    if ranks % size:
        instead = _suggest([number for number in range(1, ranks + 1) if ranks % number == 0])
        return Conflict(key, f"{key} {size} does not divide the {ranks} ranks; {instead}")
    if spec.device == "cpu":
        return Conflict(
            key, "context parallelism runs on CUDA GPUs only; set context_parallel_size: 1"
        )
    family = FAMILIES.get(spec.model_family)
    if family is not None and not family.context_parallel:
        able = ", ".join(f.name for f in FAMILIES.values() if f.context_parallel)
        return Conflict(
            key, f"{family.title} has no context-parallel plan in diffusers; those with one: {able}"
        )
    if spec.torch_compile:
        return Conflict(
            "torch_compile",
            "torch_compile with context parallelism is not tested; set torch_compile: false",
        )
    if spec.attention_backend != "auto":
        return Conflict(
            "attention_backend", "context parallelism chooses its own attention_backend; use auto"
        )
    if spec.context_parallel_comm_strategy == "allgather" and spec.mixed_precision == "no":
        return Conflict(
            "context_parallel_comm_strategy",
            "allgather needs flash attention, which does not support fp32; set mixed_precision: "
            "bf16, or "
            "context_parallel_comm_strategy: alltoall",
        )
    if spec.context_parallel_comm_strategy == "allgather" and family and rings_masked(family):
        return Conflict(
            "context_parallel_comm_strategy",
            f"allgather needs flash attention, which supports no masks, and {family.title} masks "
            "padded captions; use alltoall",
        )
    if (family is None or family.splits_text) and spec.max_sequence_length % size:
        return Conflict(
            "max_sequence_length",
            f"{key} {size} does not divide max_sequence_length {spec.max_sequence_length}; use a "
            f"multiple of {size}",
        )
    return None


def _reshard(spec: RecipeKeys) -> Conflict | None:
    number, key = spec.fsdp_reshard_after_forward, "fsdp_reshard_after_forward"
    if isinstance(number, bool) or not shards(spec):
        return None
    ranks = world_size(spec) // replicas_of(spec)
    if not 1 < number < ranks or ranks % number:
        return Conflict(
            key,
            f"{number} must be true, false, or a divisor of the {ranks} ranks that shard, "
            "between 1 and all of them",
            named=True,
        )
    if spec.fsdp_cpu_offload:
        return Conflict(
            key,
            f"{number} keeps weights on the GPU but fsdp_cpu_offload moves them off; use "
            "true or false",
            named=True,
        )
    return None


def _offload(spec: RecipeKeys) -> Conflict | None:
    if spec.fsdp_cpu_offload and not shards(spec):
        return Conflict("fsdp_cpu_offload", "fsdp_cpu_offload needs strategy: fsdp2 or hsdp")
    return None


def _fp16(spec: RecipeKeys) -> Conflict | None:
    if spec.mixed_precision == "fp16" and spec.fsdp_cpu_offload:
        return Conflict(
            "mixed_precision",
            "fp16's loss scale with fsdp_cpu_offload is not tested; use mixed_precision: bf16",
        )
    family = FAMILIES.get(spec.model_family)
    if (
        spec.mixed_precision == "fp16"
        and spec.model_type == "full"
        and family is not None
        and family.keeps_fp32
        and shards(spec)
    ):
        return Conflict(
            "mixed_precision",
            f"some weights of {family.title} are not sharded, which fp16's loss scale cannot "
            "handle; use mixed_precision: bf16",
        )
    sharded_lora = spec.lora_placement == "sharded" and shards(spec)
    if spec.mixed_precision == "fp16" and trains_text(spec) and sharded_lora:
        return Conflict(
            "mixed_precision",
            "the LoRA of text encoders is not sharded, which fp16's loss scale cannot handle "
            "beside a sharded one; use mixed_precision: bf16, or lora_placement: replicated",
        )
    return None


def _state_dict(spec: JobSpec) -> Conflict | None:
    eight_bit = spec.optimizer == "adamw_8bit"
    if eight_bit and spec.checkpointing_async:
        return Conflict(
            "checkpointing_async",
            "the 8-bit state of optimizer: adamw_8bit cannot be written in "
            "the background; remove checkpointing_async",
            named=True,
        )
    if spec.fsdp_state_dict_type != "FULL_STATE_DICT":
        return None
    if eight_bit:
        return Conflict(
            "fsdp_state_dict_type",
            "FULL_STATE_DICT cannot hold the 8-bit state of optimizer: adamw_8bit; use "
            "SHARDED_STATE_DICT (the export is complete either way)",
        )
    if spec.checkpointing_async:
        return Conflict(
            "checkpointing_async",
            "FULL_STATE_DICT cannot be written in the background; use "
            "SHARDED_STATE_DICT, or remove checkpointing_async",
            named=True,
        )
    return None


def _wrap(spec: FsdpKeys) -> Conflict | None:
    if spec.fsdp_transformer_layer_cls_to_wrap and (
        spec.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP"
    ):
        return Conflict(
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_transformer_layer_cls_to_wrap needs fsdp_auto_wrap_policy: "
            "TRANSFORMER_BASED_WRAP",
        )
    return None


def _activation_checkpointing(spec: RecipeKeys) -> Conflict | None:
    if spec.fsdp_activation_checkpointing and not shards(spec):
        return Conflict(
            "fsdp_activation_checkpointing",
            "fsdp_activation_checkpointing needs FSDP; without it, use gradient_checkpointing",
        )
    return None


def _checkpointing_policy(spec: RecipeKeys) -> Conflict | None:
    if spec.gradient_checkpointing_policy != "full" and no_recomputation(spec):
        return Conflict(
            "gradient_checkpointing_policy",
            "gradient_checkpointing_policy needs gradient_checkpointing: true",
        )
    return None


def _checkpointing_interval(spec: RecipeKeys) -> Conflict | None:
    if spec.gradient_checkpointing_interval > 1 and no_recomputation(spec):
        return Conflict(
            "gradient_checkpointing_interval",
            "gradient_checkpointing_interval needs gradient_checkpointing: true",
        )
    return None


def _snr_gamma(spec: RecipeKeys) -> Conflict | None:
    family = FAMILIES.get(spec.model_family)
    if spec.snr_gamma is not None and family is not None and family.objective == "flow":
        return Conflict(
            "snr_gamma",
            f"snr_gamma weights epsilon and v-prediction; {family.title} is a flow-matching model",
        )
    return None


def _flow_shift(spec: NoiseKeys) -> Conflict | None:
    if spec.flow_shift is not None and spec.timestep_sampling not in SHIFTED:
        return Conflict("flow_shift", f"flow_shift needs {SHIFTED_IN_WORDS}")
    return None


def _sigmas(spec: NoiseKeys) -> Conflict | None:
    if spec.sigma_min >= spec.sigma_max:
        return Conflict(
            "sigma_min",
            f"sigma_min ({spec.sigma_min:g}) is not below sigma_max ({spec.sigma_max:g})",
        )
    return None


def _lr_end(spec: TrainingKeys) -> Conflict | None:
    if spec.lr_end >= spec.learning_rate:
        return Conflict(
            "lr_end",
            f"lr_end ({spec.lr_end:g}) is not below learning_rate ({spec.learning_rate:g})",
        )
    return None


def _warmup(spec: TrainingKeys) -> Conflict | None:
    if spec.lr_warmup_steps and spec.lr_scheduler == "constant":
        return Conflict(
            "lr_warmup_steps",
            "lr_scheduler: constant has no warm-up; use constant_with_warmup",
        )
    return None


_RULES: tuple[Callable[[JobSpec], Conflict | None], ...] = (
    _no_model,
    _both_experts,
    *DATA_RULES,
    *CONDITIONING_RULES,
    *VALIDATION_RULES,
    *LAUNCH_RULES,
    _strategy,
    _hsdp,
    _context_parallel,
    *STEP_RULES,
    *ROUTE_RULES,
    _reshard,
    _offload,
    *LORA_RULES,
    _fp16,
    _state_dict,
    _wrap,
    _activation_checkpointing,
    _checkpointing_policy,
    _checkpointing_interval,
    *KERNEL_RULES,
    *AVERAGE_RULES,
    _snr_gamma,
    _flow_shift,
    _sigmas,
    _lr_end,
    _warmup,
)
