"""Settings of devices and of the launch that cannot run; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.extra_args import extra_args
from jobs.spec.rules.strategy import shards, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys
    from jobs.spec.keys.hub import HubKeys

# Options of sbatch and srun that a key of the job says, or that would break what we rely on.
_SBATCH: Final = {
    "N": "num_machines",
    "nodes": "num_machines",
    "n": "num_processes",
    "ntasks": "num_processes",
    "ntasks-per-node": "num_processes",
    "p": "slurm_partition",
    "partition": "slurm_partition",
    "A": "slurm_account",
    "account": "slurm_account",
    "q": "slurm_qos",
    "qos": "slurm_qos",
    "t": "slurm_time",
    "time": "slurm_time",
    "signal": "slurm_signal_seconds",
    "requeue": "slurm_requeue",
    "no-requeue": "slurm_requeue",
    **dict.fromkeys(("J", "job-name", "o", "output", "e", "error", "open-mode", "D", "chdir"), ""),
    **dict.fromkeys(("a", "array", "W", "wait", "wrap", "parsable", "test-only", "export"), ""),
}
_SRUN: Final = {
    **{name: key for name, key in _SBATCH.items() if name not in ("export", "W", "wait", "wrap")},
    **dict.fromkeys(("gpu-bind", "distribution", "m", "kill-on-bad-exit", "K", "wait", "W"), ""),
}


def _gpus(spec: JobSpec) -> Conflict | None:
    if spec.launcher != "slurm" or spec.gpus is None:
        return None
    return Conflict(
        "gpus", "Slurm chooses the GPUs; set num_processes, one rank per GPU", named=True
    )


def _accelerate(spec: JobSpec) -> Conflict | None:
    if spec.launcher != "slurm" or not spec.accelerate_extra_args:
        return None
    key = "accelerate_extra_args"
    return Conflict(
        key,
        "Slurm starts each rank without accelerate's launcher; use slurm_srun_args",
        named=True,
    )


def _even(spec: JobSpec) -> Conflict | None:
    ranks, machines = world_size(spec), spec.num_machines
    if spec.launcher != "slurm" or ranks % machines == 0:
        return None
    return Conflict(
        "num_processes",
        f"{ranks} ranks cannot be divided evenly among {machines} machines; "
        "num_processes is the total",
        named=True,
    )


def _options(spec: JobSpec) -> Conflict | None:
    if spec.launcher != "slurm":
        return None
    for key, ours in (("slurm_extra_args", _SBATCH), ("slurm_srun_args", _SRUN)):
        if problem := _refused(getattr(spec, key) or [], ours):
            return Conflict(key, problem, named=True)
    return None


def _refused(words: list[str], ours: Mapping[str, str]) -> str:
    """Describe what is wrong with options as the user wrote them; "" if nothing is."""
    for word in words:
        if "\n" in word or "\0" in word:
            return f"{shlex.quote(word)} has a line break"
        name = word.lstrip("-").partition("=")[0]
        short = word[1:2] if word.startswith("-") and not word.startswith("--") else ""
        for option in (name, short):
            if word.startswith("-") and option in ours:
                dashes = "-" if len(option) == 1 else "--"
                return f"{dashes}{option} is set by {ours[option] or 'the launcher'}"
    return ""


SLURM_RULES: Final = (_gpus, _accelerate, _even, _options)


_REPO: Final = re.compile(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


def gpu_count(spec: DeviceKeys) -> Conflict | None:
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
    """Refuse several machines for a local job: its supervisor knows ranks by their process ids."""
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


def deepspeed(spec: RecipeKeys) -> Conflict | None:
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


def hub_model_id(spec: HubKeys) -> Conflict | None:
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
