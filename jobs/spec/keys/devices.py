"""Which devices, how many ranks, and how they share the work."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import DEVICES, LAUNCH, RUNNING
from jobs.spec.rules.no_effect import (
    no_accelerate_launch,
    no_context_parallelism,
    no_deepspeed,
    not_context_parallel,
    not_hsdp,
    on_cpu,
    one_machine,
    one_rank,
    set_by_slurm,
    with_slurm,
)
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    Bool,
    ContextParallelStrategy,
    Device,
    OptionalSettings,
    OptionalText,
    OptionalWords,
    Strategy,
    choice,
    read_gpus,
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
