"""Flags for `accelerate launch` that have no key of their own: `accelerate_extra_args`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.values.spellings import as_bool, did_you_mean, normal_key

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.devices import DeviceKeys

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
# What the launcher sets by keys of the job, where they are called otherwise.
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
    """Return the flags as accelerate takes them: `--key=value`, and bare switches that are on."""
    words = []
    for name, value in _read(spec):
        if name not in SWITCHES:
            words.append(f"--{name}={value}")
        elif as_bool(value) is not False:
            words.append(f"--{name}")
    return words


def extra_args(spec: JobSpec) -> Conflict | None:
    """Refuse a flag that accelerate does not know, that duplicates a key, or that is not for us."""
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
    """Names and values; the value of a bare flag is empty."""
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
