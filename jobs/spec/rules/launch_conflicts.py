"""Device and launch settings that cannot run; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

from jobs.spec.families import FAMILIES
from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.strategy import shards, world_size
from jobs.spec.values.spellings import as_bool, did_you_mean, normal_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.spec.families import Family
    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys
    from jobs.spec.keys.output import HubKeys


# -- extra args -----------------------------------------------------------------------------
# Flags for `accelerate launch` without a key of their own: `accelerate_extra_args`.


KEY: Final = "accelerate_extra_args"
SWITCHES: Final = ("debug", "enable_cpu_affinity", "quiet", "same_network")
WITH_VALUE: Final = (
    "num_cpu_threads_per_process",
    "log_dir",
    "monitor_interval",
    "rdzv_backend",
    "rdzv_conf",
    "role",
    "tee",
)
_KNOWN: Final = (*SWITCHES, *WITH_VALUE)
# Flags that the launcher sets from keys of the job with other names.
_OURS: Final = {
    "config_file": "accelerate_config",
    "gpu_ids": "gpus",
    "multi_gpu": "strategy",
    "use_fsdp": "strategy",
    "cpu": "device",
    "deepspeed_config_file": "deepspeed_config",
    "use_deepspeed": "deepspeed_config",
    "fsdp_offload_params": "fsdp_cpu_offload",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
}
_FOREIGN: Final = {
    "dynamo_": "the engine compiles blocks itself; set torch_compile: true",
    "megatron_": "Megatron-LM is not supported",
    "use_megatron_lm": "Megatron-LM is not supported",
    "module": "the job always starts the engine",
    "no_python": "the job always starts the engine",
    "tpu": "jobs run on NVIDIA GPUs or on CPU ranks",
    "fsdp_": "FSDP is set by the job's fsdp_* keys",
}


def words_of(spec: DeviceKeys) -> list[str]:
    """Return the flags for accelerate: `--key=value`, and enabled switches without a value."""
    words = []
    for name, value in _read(spec):
        if name not in SWITCHES:
            words.append(f"--{name}={value}")
        elif as_bool(value) is not False:
            words.append(f"--{name}")
    return words


def extra_args(spec: JobSpec) -> Conflict | None:
    """Reject flags that accelerate does not know, that duplicate a key, or that are unsupported."""
    for name, value in _read(spec):
        if name in WITH_VALUE and not value:
            return _conflict(f"--{name} needs a value")
        if name in SWITCHES and value and not isinstance(as_bool(value), bool):
            return _conflict(f"--{name} is a switch and takes no value ({value})")
        if name in _KNOWN:
            continue
        if name in type(spec).model_fields or name in _OURS:
            return _conflict(f"--{name} is set by the job key {_OURS.get(name, name)}")
        if why := next((why for start, why in _FOREIGN.items() if name.startswith(start)), ""):
            return _conflict(f"--{name} cannot be used: {why}")
        hint = did_you_mean(name, _KNOWN) or f"; known: {', '.join(_KNOWN)}"
        return _conflict(f'"{name}" is not a flag that can be passed on{hint}')
    return None


def _conflict(problem: str) -> Conflict:
    return Conflict(KEY, problem, named=True)


def _read(spec: DeviceKeys) -> list[tuple[str, str]]:
    """Return names and values; the value of a bare flag is empty."""
    flags: list[tuple[str, str]] = []
    rest = list(spec.accelerate_extra_args or [])
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        name = normal_key(key)
        alone = not word.startswith("--") or name in SWITCHES or equals
        if not alone and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        flags.append((name if word.startswith("--") else word, value))
    return flags


# -- kernels --------------------------------------------------------------------------------
# The attention kernels a job can use; a part of `jobs.spec.rules.conflicts`.


GPU_KERNELS: Final = ("flash", "flash3", "efficient", "cudnn")
_FLASH: Final = ("flash", "flash3")


def is_masked(family: Family) -> bool:
    """Return whether the family's attention may have a mask, which flash attention does not
    support.
    """
    return family.attention.startswith("masked")


def rings_masked(family: Family) -> bool:
    """Return whether ring attention would need a mask; it splits over ranks what may have one."""
    return is_masked(family) and family.splits_text


def kernel_conflict(
    family: Family | None, kernel: str, batch: int, *, samples: bool
) -> Conflict | None:
    """Return why a job cannot use an attention kernel with its model; None if it can.

    Args:
        family: The model's family; None if unknown.
        kernel: `attention_backend`.
        batch: Samples of a micro-batch.
        samples: Whether the job makes samples.
    """
    if family is None or kernel == "auto":
        return None
    if family.attention == "fixed":
        return Conflict(
            "attention_backend",
            f"{family.title} has no choice of kernel in diffusers; use auto",
            named=True,
        )
    if kernel not in _FLASH or not is_masked(family):
        return None
    if batch > 1:
        return Conflict(
            "attention_backend",
            f"{kernel} supports no masks, and {family.title} masks captions of different lengths; "
            "use auto, or train_batch_size: 1",
            named=True,
        )
    if samples and family.attention == "masked_samples":
        return Conflict(
            "attention_backend",
            f"{kernel} supports no masks, and samples of {family.title} have one; use auto",
            named=True,
        )
    return None


def _kernel(spec: JobSpec) -> Conflict | None:
    kernel = spec.attention_backend
    if spec.device == "cpu" and kernel in GPU_KERNELS:
        return Conflict("attention_backend", f"{kernel} needs a GPU; use auto or math", named=True)
    if kernel in (*_FLASH, "cudnn") and spec.mixed_precision == "no":
        return Conflict(
            "attention_backend",
            f"{kernel} does not support fp32; set mixed_precision: bf16",
            named=True,
        )
    family = FAMILIES.get(spec.model_family)
    samples = bool(spec.validation_prompts or spec.num_class_images)
    return kernel_conflict(family, kernel, spec.train_batch_size, samples=samples)


KERNEL_RULES: Final[tuple[Callable[[JobSpec], Conflict | None], ...]] = (_kernel,)


# -- launch conflicts -----------------------------------------------------------------------


# Options of sbatch and srun that a key of the job sets, or that would break our assumptions.
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


def _divisible_ranks(spec: JobSpec) -> Conflict | None:
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
    """Return what is wrong with options as the user wrote them; "" if nothing is."""
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


SLURM_RULES: Final = (_gpus, _accelerate, _divisible_ranks, _options)


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
    """Reject several machines for a local job, whose supervisor identifies ranks by their pids."""
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
