"""How FSDP shards; the names are SimpleTuner's, so that its users feel at home."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.value_types import (
    Bool,
    OptionalBool,
    OptionalTextList,
    StateDictType,
    WrapPolicy,
    field,
    read_prefetch,
    read_reshard,
    read_state_dict_type,
    read_version,
    read_wrap_policy,
)


class FsdpKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    fsdp_enable: OptionalBool = field(
        None, "fsdp", "Shard the model over the ranks (same as strategy: fsdp2)."
    )
    fsdp_version: Annotated[int, BeforeValidator(read_version)] = field(
        2, "fsdp", "FSDP version; 1 is deprecated and runs as 2.", ge=1, le=2
    )
    fsdp_reshard_after_forward: Annotated[bool | int, BeforeValidator(read_reshard)] = field(
        True,
        "fsdp",
        "Free gathered weights after forward: least memory, one more all-gather. A number "
        "reshards them to that many ranks, a divisor of the sharding ranks.",
    )
    fsdp_cpu_offload: Bool = field(
        False, "fsdp", "Keep shards, gradients and optimizer state in host memory; slow."
    )
    fsdp_activation_checkpointing: Bool = field(False, "fsdp", "Same as gradient_checkpointing.")
    fsdp_forward_prefetch: Annotated[int, BeforeValidator(read_prefetch)] = field(
        0, "fsdp", "Units to prefetch in forward, beyond the implicit one.", ge=0, le=16
    )
    fsdp_backward_prefetch: Annotated[int, BeforeValidator(read_prefetch)] = field(
        0, "fsdp", "Units to prefetch in backward; 0: the implicit one.", ge=0, le=16
    )
    fsdp_state_dict_type: Annotated[StateDictType, BeforeValidator(read_state_dict_type)] = field(
        "SHARDED_STATE_DICT", "fsdp", "Checkpoint layout."
    )
    fsdp_cpu_ram_efficient_loading: Bool = field(
        True, "fsdp", "Always on: every rank reads only its own shard from disk."
    )
    fsdp_limit_all_gathers: Bool = field(
        True, "fsdp", "Always on with FSDP2: limit how many units are gathered ahead."
    )
    fsdp_auto_wrap_policy: Annotated[str, BeforeValidator(read_wrap_policy)] = field(
        "TRANSFORMER_BASED_WRAP",
        "fsdp",
        "Which modules become their own FSDP unit: given classes, large ones, or none; or an "
        "installed callable pkg.mod.name of (module, recurse, nonwrapped_numel), imported by the "
        "ranks, and by submit too if FSDP_TUI_WRAP_POLICIES names its module.",
        words=get_args(WrapPolicy),
    )
    fsdp_min_num_params: int = field(
        10_000_000, "fsdp", "Smallest unit of SIZE_BASED_WRAP, in parameters.", ge=1
    )
    fsdp_transformer_layer_cls_to_wrap: OptionalTextList = field(
        None, "fsdp", "Block classes to wrap (default: the model's repeated blocks)."
    )
