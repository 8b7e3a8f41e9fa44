"""Keys for devices, the number of ranks, and how they share the work."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import BeforeValidator

from jobs.spec.keys.groups import DEVICES, FSDP, LAUNCH, RUNNING
from jobs.spec.rules.no_effect import (
    always_on,
    no_accelerate_launch,
    no_context_parallelism,
    no_deepspeed,
    not_context_parallel,
    not_hsdp,
    not_sharded,
    on_cpu,
    one_machine,
    one_rank,
    other_policy_than,
    set_by_slurm,
    with_slurm,
)
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    Bool,
    ContextParallelStrategy,
    Device,
    OptionalBool,
    OptionalSettings,
    OptionalText,
    OptionalTextList,
    OptionalWords,
    StateDictType,
    Strategy,
    WrapPolicy,
    choice,
    read_gpus,
    read_prefetch,
    read_reshard,
    read_state_dict_type,
    read_version,
    read_wrap_policy,
)


class DeviceKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    device: Annotated[Device, choice(Device)] = field(
        "auto",
        DEVICES,
        "auto: GPUs if there are any, else CPU ranks over gloo.",
        resume="same",
        public=False,
    )
    gpus: Annotated[int | list[int | str] | None, BeforeValidator(read_gpus)] = field(
        None,
        DEVICES,
        "GPUs by index or UUID, or the number of free GPUs to use.",
        resume="ruled",
        no_effect=(on_cpu, with_slurm),
        memory=False,
    )
    share_gpus: Bool = field(
        False,
        DEVICES,
        "Also use GPUs on which other processes hold memory.",
        resume="same",
        no_effect=(on_cpu, with_slurm),
        memory=False,
        public=False,
    )
    priority: int = field(
        0,
        RUNNING,
        "Queued jobs with higher priority start first.",
        resume="same",
        no_effect=with_slurm,
        memory=False,
        ge=-1_000_000,
        le=1_000_000,
        public=False,
    )
    num_processes: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        DEVICES,
        "Number of ranks (default: the number of GPUs).",
        resume="ruled",
        blank="1",
        memory=False,
        label="ranks",
        ge=1,
        le=4096,
    )
    strategy: Annotated[Strategy, choice(Strategy)] = field(
        "auto",
        DEVICES,
        "How ranks share the work; auto logs its choice and the reason.",
        resume="same",
    )
    dp_replicate_size: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        DEVICES,
        "hsdp: number of replicas of the sharded model; each is sharded over num_processes / "
        "dp_replicate_size ranks (default: one replica per machine).",
        resume="same",
        no_effect=not_hsdp,
        ge=1,
        le=4096,
    )
    context_parallel_size: int = field(
        1,
        DEVICES,
        "Ranks that split one sample's tokens; needs FSDP2 and GPUs.",
        resume="ruled",
        no_effect=no_context_parallelism,
        ge=1,
        le=4096,
    )
    context_parallel_comm_strategy: Annotated[
        ContextParallelStrategy, choice(ContextParallelStrategy)
    ] = field(
        "allgather",
        DEVICES,
        "allgather: ring attention; alltoall: Ulysses, by heads.",
        resume="same",
        no_effect=not_context_parallel,
    )
    deepspeed_config: OptionalSettings = field(
        None,
        DEVICES,
        "Not supported; accepted so that other tools' configs can be read.",
        resume="same",
        no_effect=no_deepspeed,
    )

    # -- accelerate launch -----------------------------------------------------------------
    accelerate_config: OptionalSettings = field(
        None,
        LAUNCH,
        "A file from `accelerate config`: supplies settings that the job does not set; settings "
        "without a job key are stored here and passed to the launch.",
        resume="same",
        path=True,
    )
    accelerate_extra_args: OptionalWords = field(
        None,
        LAUNCH,
        "Extra flags for `accelerate launch`, such as --debug.",
        resume="same",
        no_effect=no_accelerate_launch,
    )
    num_machines: int = field(
        1,
        LAUNCH,
        "Number of machines; more than 1 needs launcher: slurm.",
        resume="same",
        no_effect=one_machine,
        ge=1,
        le=4096,
    )
    machine_rank: int = field(
        0,
        LAUNCH,
        "Index of this machine.",
        resume="same",
        no_effect=set_by_slurm,
        memory=False,
        ge=0,
        le=4095,
        public=False,
    )
    main_process_ip: OptionalText = field(
        None,
        LAUNCH,
        "Address of the machine with rank 0 (default: its host name); unused on one machine.",
        resume="same",
        no_effect=one_machine,
        memory=False,
    )
    main_process_port: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        LAUNCH,
        "Rendezvous port (default: any free port).",
        resume="same",
        blank="any free port",
        no_effect=one_rank,
        memory=False,
        ge=0,
        le=65535,
        public=False,
    )


# -- fsdp -----------------------------------------------------------------------------------
# How FSDP shards. The names are those of SimpleTuner, so that its users recognize them.


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
