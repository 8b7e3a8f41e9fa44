"""Which devices, how many ranks, and how they share the work."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

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
    field,
    read_gpus,
)


class DeviceKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    device: Annotated[Device, choice(Device)] = field(
        "auto", "devices", "auto: GPUs if there are any, else CPU ranks over gloo."
    )
    gpus: Annotated[int | list[int | str] | None, BeforeValidator(read_gpus)] = field(
        None, "devices", "GPUs by index or UUID, or the number of free GPUs to use."
    )
    share_gpus: Bool = field(
        False, "devices", "Also use GPUs on which other processes hold memory."
    )
    priority: int = field(
        0, "running", "Queued jobs with higher priority start first.", ge=-1_000_000, le=1_000_000
    )
    num_processes: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices", "Number of ranks (default: the number of GPUs).", ge=1, le=4096
    )
    strategy: Annotated[Strategy, choice(Strategy)] = field(
        "auto", "devices", "How ranks share the work; auto logs its choice and the reason."
    )
    dp_replicate_size: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "devices",
        "hsdp: number of replicas of the sharded model; each is sharded over num_processes / "
        "dp_replicate_size ranks (default: one replica per machine).",
        ge=1,
        le=4096,
    )
    context_parallel_size: int = field(
        1, "devices", "Ranks that split one sample's tokens; needs FSDP2 and GPUs.", ge=1, le=4096
    )
    context_parallel_comm_strategy: Annotated[
        ContextParallelStrategy, choice(ContextParallelStrategy)
    ] = field("allgather", "devices", "allgather: ring attention; alltoall: Ulysses, by heads.")
    deepspeed_config: OptionalSettings = field(
        None, "devices", "Not supported; accepted so that other tools' configs can be read."
    )

    # -- accelerate launch -----------------------------------------------------------------
    accelerate_config: OptionalSettings = field(
        None,
        "devices",
        "A file from `accelerate config`: supplies settings that the job does not set; settings "
        "without a job key are stored here and passed to the launch.",
    )
    accelerate_extra_args: OptionalWords = field(
        None, "devices", "Extra flags for `accelerate launch`, such as --debug."
    )
    num_machines: int = field(
        1, "devices", "Number of machines; more than 1 needs launcher: slurm.", ge=1, le=4096
    )
    machine_rank: int = field(0, "devices", "Index of this machine.", ge=0, le=4095)
    main_process_ip: OptionalText = field(
        None,
        "devices",
        "Address of the machine with rank 0 (default: its host name); unused on one machine.",
    )
    main_process_port: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices", "Rendezvous port (default: any free port).", ge=0, le=65535
    )
