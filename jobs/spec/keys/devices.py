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
        "auto", "devices", "auto takes GPUs where there are any, else CPU ranks over gloo."
    )
    gpus: Annotated[int | list[int | str] | None, BeforeValidator(read_gpus)] = field(
        None, "devices", "GPUs by index or UUID, or a count for any so many free ones."
    )
    share_gpus: Bool = field(
        False, "devices", "Also take GPUs on which processes of others hold memory."
    )
    priority: int = field(
        0, "running", "Queued jobs of higher priority start first.", ge=-1_000_000, le=1_000_000
    )
    num_processes: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices", "Ranks; as many as there are gpus when left out.", ge=1, le=4096
    )
    strategy: Annotated[Strategy, choice(Strategy)] = field(
        "auto", "devices", "How ranks share the work; auto says in the log what it chose and why."
    )
    dp_replicate_size: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices",
        "hsdp: how many replicas of the sharded model there are; each is sharded over "
        "num_processes / dp_replicate_size ranks.", ge=1, le=4096,
    )  # fmt: skip
    context_parallel_size: int = field(
        1, "devices", "Ranks that share one sample's tokens; needs FSDP2 and GPUs.", ge=1, le=4096
    )
    context_parallel_comm_strategy: Annotated[
        ContextParallelStrategy, choice(ContextParallelStrategy)
    ] = field("allgather", "devices", "allgather: ring attention; alltoall: Ulysses, by heads.")
    deepspeed_config: OptionalSettings = field(
        None, "devices", "Not run; named here so that configurations of other tools are understood."
    )

    # -- accelerate launch -----------------------------------------------------------------
    accelerate_config: OptionalSettings = field(
        None, "devices",
        "A file that `accelerate config` wrote: what the job leaves out is as it says; what has no "
        "key of its own is kept here, and goes into the launch.",
    )  # fmt: skip
    accelerate_extra_args: OptionalWords = field(
        None, "devices", "More flags for `accelerate launch`, such as --debug."
    )
    num_machines: int = field(
        1, "devices", "Machines; a job runs on one, so that others are refused.", ge=1, le=4096
    )
    machine_rank: int = field(0, "devices", "Which of the machines this is.", ge=0, le=4095)
    main_process_ip: OptionalText = field(
        None, "devices", "Address of the machine with rank 0; of no use on one machine."
    )
    main_process_port: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices", "Port at which the ranks meet; any free one when left out.", ge=0, le=65535
    )
