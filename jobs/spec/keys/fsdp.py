"""How FSDP shards; the names are SimpleTuner's, so that its users feel at home."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import BeforeValidator

from jobs.spec.keys.groups import FSDP
from jobs.spec.rules.no_effect import always_on, not_sharded, one_rank, other_policy_than
from jobs.spec.values.field import Keys, field
from jobs.spec.values.value_types import (
    Bool,
    OptionalBool,
    OptionalTextList,
    StateDictType,
    WrapPolicy,
    read_prefetch,
    read_reshard,
    read_state_dict_type,
    read_version,
    read_wrap_policy,
)


class FsdpKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    fsdp_enable: OptionalBool = field(
        None,
        FSDP,
        "Shard the model over the ranks (same as strategy: fsdp2).",
        resume="same",
        no_effect=one_rank,
        memory=False,
    )
    fsdp_version: Annotated[int, BeforeValidator(read_version)] = field(
        2,
        FSDP,
        "FSDP version; 1 is deprecated and runs as 2.",
        resume="same",
        no_effect=one_rank,
        memory=False,
        ge=1,
        le=2,
    )
    fsdp_reshard_after_forward: Annotated[bool | int, BeforeValidator(read_reshard)] = field(
        True,
        FSDP,
        "Free gathered weights after forward: least memory, one more all-gather. A number "
        "reshards them to that many ranks, a divisor of the sharding ranks.",
        resume="same",
        no_effect=not_sharded,
        label="reshard",
    )
    fsdp_cpu_offload: Bool = field(
        False,
        FSDP,
        "Keep shards, gradients and optimizer state in host memory; slow.",
        resume="same",
        no_effect=not_sharded,
    )
    fsdp_activation_checkpointing: Bool = field(
        False, FSDP, "Same as gradient_checkpointing.", resume="same", no_effect=not_sharded
    )
    fsdp_forward_prefetch: Annotated[int, BeforeValidator(read_prefetch)] = field(
        0,
        FSDP,
        "Units to prefetch in forward, beyond the implicit one.",
        resume="same",
        no_effect=not_sharded,
        ge=0,
        le=16,
    )
    fsdp_backward_prefetch: Annotated[int, BeforeValidator(read_prefetch)] = field(
        0,
        FSDP,
        "Units to prefetch in backward; 0: the implicit one.",
        resume="same",
        no_effect=not_sharded,
        ge=0,
        le=16,
    )
    fsdp_state_dict_type: Annotated[StateDictType, BeforeValidator(read_state_dict_type)] = field(
        "SHARDED_STATE_DICT", FSDP, "Checkpoint layout.", resume="same", no_effect=not_sharded
    )
    fsdp_cpu_ram_efficient_loading: Bool = field(
        True,
        FSDP,
        "Always on: every rank reads only its own shard from disk.",
        resume="same",
        no_effect=(not_sharded, always_on),
    )
    fsdp_limit_all_gathers: Bool = field(
        True,
        FSDP,
        "Always on with FSDP2: limit how many units are gathered ahead.",
        resume="same",
        no_effect=(not_sharded, always_on),
    )
    fsdp_auto_wrap_policy: Annotated[str, BeforeValidator(read_wrap_policy)] = field(
        "TRANSFORMER_BASED_WRAP",
        FSDP,
        "Which modules become their own FSDP unit: given classes, large ones, or none; or an "
        "installed callable pkg.mod.name of (module, recurse, nonwrapped_numel), imported by the "
        "ranks, and by submit too if FSDP_TUI_WRAP_POLICIES names its module.",
        resume="same",
        no_effect=not_sharded,
        words=get_args(WrapPolicy),
    )
    fsdp_min_num_params: int = field(
        10_000_000,
        FSDP,
        "Smallest unit of SIZE_BASED_WRAP, in parameters.",
        resume="same",
        no_effect=(not_sharded, other_policy_than("SIZE_BASED_WRAP")),
        ge=1,
    )
    fsdp_transformer_layer_cls_to_wrap: OptionalTextList = field(
        None,
        FSDP,
        "Block classes to wrap (default: the model's repeated blocks).",
        resume="same",
        blank="the family's blocks; F2 to choose",
        no_effect=(not_sharded, other_policy_than("TRANSFORMER_BASED_WRAP")),
        label="blocks",
        public=True,
    )
