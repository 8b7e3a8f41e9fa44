"""Settings of devices and of the launch that cannot run; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.extra_args import extra_args
from jobs.spec.rules.slurm_conflicts import SLURM_RULES
from jobs.spec.rules.strategy import shards

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec


_REPO: Final = re.compile(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


def gpu_count(spec: JobSpec) -> Conflict | None:
    if spec.gpus is None:
        return None
    asked = spec.gpus if isinstance(spec.gpus, int) else len(spec.gpus)
    if spec.device == "cpu":
        return Conflict("gpus", "gpus and device: cpu cannot be combined; remove one")
    if asked < 1:
        return Conflict("gpus", "gpus selects no GPU; remove it, or use [0] for GPU 0")
    if isinstance(spec.gpus, list) and len(set(spec.gpus)) != len(spec.gpus):
        return Conflict("gpus", "gpus names the same GPU twice; name each once")
    if spec.num_processes is not None and spec.num_processes != asked:
        return Conflict(
            "num_processes",
            f"num_processes is {spec.num_processes} but gpus names {asked}; set only one, or make "
            "them equal",
        )
    return None


def machines(spec: JobSpec) -> Conflict | None:
    """A job's supervisor knows ranks by their process ids, which are those of its own machine."""
    if spec.num_machines > 1 and spec.launcher == "local":
        return Conflict(
            "num_machines",
            f"{spec.num_machines} is not supported: a local job runs on one machine; "
            "set launcher: slurm, or num_machines: 1",
            named=True,
        )
    return None


def machine_rank(spec: JobSpec) -> Conflict | None:
    if spec.machine_rank and spec.launcher == "slurm":
        return Conflict("machine_rank", "machine_rank is set by Slurm; remove it")
    if spec.machine_rank:
        return Conflict(
            "machine_rank",
            f"{spec.machine_rank} is not valid with 1 machine; remove it",
            named=True,
        )
    return None


def deepspeed(spec: JobSpec) -> Conflict | None:
    if not spec.deepspeed_config:
        return None
    if shards(spec):
        return Conflict(
            "deepspeed_config",
            "FSDP and DeepSpeed cannot be enabled simultaneously. Remove deepspeed_config",
        )
    return Conflict(
        "deepspeed_config",
        "DeepSpeed is not supported; remove deepspeed_config and use strategy: fsdp2",
    )


def hub_model_id(spec: JobSpec) -> Conflict | None:
    if spec.hub_model_id is None or _REPO.fullmatch(spec.hub_model_id):
        return None
    return Conflict(
        "hub_model_id",
        f'"{spec.hub_model_id}" is not a repository; use ORG/NAME or NAME, of '
        "letters, digits, - _ and .",
        named=True,
    )


LAUNCH_RULES = (
    gpu_count,
    machines,
    machine_rank,
    *SLURM_RULES,
    extra_args,
    deepspeed,
    hub_model_id,
)
