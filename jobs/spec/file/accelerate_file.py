"""Use an accelerate config file as the base of a job.

Its settings that have a job key fill in what the job does not set. If both set something, the job
wins and a note says so. All other settings are stored in the job and passed to its launch, so
nothing is lost and the file itself is not needed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import SpecError
from jobs.spec.file.old_keys import RENAMED, agree, read_value, translate
from jobs.spec.file.value_errors import in_words, key_of
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.strategy import SHARDING, world_size
from jobs.spec.values.spellings import as_bool, as_none, did_you_mean, nearest, normal_key

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY: Final = "accelerate_config"
# Number and kind of ranks: set either all by the job or all by the file.
_RANKS: Final[tuple[str, ...]] = ("gpus", "num_processes", "device")
# Keys with the same name in a job and in accelerate's files.
SAME: Final = (
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
)
# Keys without a job key, which are passed on.
REST: Final = (
    "debug",
    "downcast_bf16",
    "enable_cpu_affinity",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_name",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_zone",
    "command_file",
    "commands",
    "dynamo_config",
)
READ: Final = (
    "compute_environment",
    "distributed_type",
    "use_cpu",
    "gpu_ids",
    "fsdp_config",
    "parallelism_config",
    "dynamo_backend",
)
FOREIGN: Final = {
    "deepspeed_config": "DeepSpeed is not supported; use strategy: fsdp2",
    "megatron_lm_config": "Megatron-LM is not supported; use strategy: fsdp2",
    "mpirun_config": "accelerate starts the ranks, not mpirun",
    "fp8_config": "fp8 is not supported; use mixed_precision: bf16",
}
_TYPO_SIMILARITY: Final = 0.8  # similarity above which an unknown key is taken for a typo
_ON: Final = "jobs run on NVIDIA GPUs or on CPU ranks"
_TYPES: Final = {
    "DEEPSPEED": "FSDP and DeepSpeed cannot be enabled simultaneously. The file is for DeepSpeed; "
    "use one for FSDP, or none",
    "MEGATRON_LM": FOREIGN["megatron_lm_config"],
    "XLA": f"the file is for TPUs, and {_ON}",
    "TPU": f"the file is for TPUs, and {_ON}",
}
_LOCAL_TYPES: Final = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
_PARALLEL: Final = {
    "cp_size": "context_parallel_size",
    "cp_comm_strategy": "context_parallel_comm_strategy",
    "dp_replicate_size": "dp_replicate_size",
}


def merge_config(
    values: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], list[str]]:
    """Apply a job on top of an accelerate config.

    Args:
        values: The job's values, by normalized key; they override the file.
        config: The contents of the file.
        name: The file's name in messages.

    Returns:
        The job's values, completed from the file, and notes about them, one sentence each.

    Raises:
        SpecError: The file is for something unsupported, or accelerate would reject it.
    """
    notes: list[str] = []
    theirs, rest = _split({normal_key(str(k)): v for k, v in config.items()}, name, notes)
    _check(theirs, name)
    merged = {key: value for key, value in values.items() if key != KEY}
    for key, value in _fitting(theirs, merged, name, notes).items():
        if as_none(merged.get(key)) is None:
            merged[key] = value
        elif not agree(key, merged[key], value):
            notes.append(f"{KEY}: {name} says {key}: {value}; the job's {merged[key]} is used")
    if rest:
        merged[KEY] = rest
    return merged, notes


def _split(
    config: dict[str, Any], name: str, notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the file into values for keys of a job, and the rest."""
    theirs: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in config.items():
        if value is None:
            continue
        if key in FOREIGN:
            if value:
                raise SpecError(f"{KEY}: {name} has a {key}: {FOREIGN[key]}")
        elif key in SAME:
            theirs[key] = value
        elif key in READ:
            theirs |= _read(key, value, name, notes)
        else:
            if key not in REST:
                _check_unknown(key, name, notes)
            rest[key] = value
    theirs |= _take_dynamo(rest)
    dynamo = rest.get("dynamo_config")
    for key, value in dynamo.items() if isinstance(dynamo, dict) else ():
        if str(value).lower() not in ("default", "false", "no"):
            notes.append(f"{KEY}: {name}: {key}: {value} has no effect; the engine compiles blocks")
    return theirs, rest


def _read(key: str, value: Any, name: str, notes: list[str]) -> dict[str, Any]:
    """Convert one setting of the file to keys of the job."""
    if key == "compute_environment":
        if str(value).upper() != "LOCAL_MACHINE":
            raise SpecError(f"{KEY}: {name} is for {value}; jobs run on this machine")
        return {}
    if key == "distributed_type":
        return _distributed_type(str(value).upper().rpartition(".")[2], name)
    if key == "use_cpu":
        on = as_bool(value)
        if not isinstance(on, bool):
            raise SpecError(f'{KEY}: {name}: use_cpu: "{value}" is not true or false')
        return {"device": "cpu"} if on else {}
    if key == "gpu_ids":
        everyone = str(value).strip().lower() == "all"
        return {} if everyone else {"gpus": f"{value}," if "," not in str(value) else value}
    if key == "dynamo_backend":
        return _dynamo(value)
    if not isinstance(value, dict):
        raise SpecError(f"{KEY}: {name}: {key} should be a mapping, not {value!r}")
    if key == "parallelism_config":
        return _parallelism(value, name)
    done = translate({_fsdp_key(str(word)): setting for word, setting in value.items()})
    if done.problems:
        raise SpecError(f"{KEY}: {name}: {'; '.join(map(str, done.problems))}")
    notes += [f"{KEY}: {name}: {note}" for note in done.notes]
    return done.values


def _distributed_type(word: str, name: str) -> dict[str, Any]:
    if word in _TYPES:
        raise SpecError(f"{KEY}: {name} has distributed_type: {word}: {_TYPES[word]}")
    if word not in _LOCAL_TYPES:
        raise SpecError(f"{KEY}: {name} has distributed_type: {word}, and {_ON}")
    if word == "FSDP":
        return {"fsdp_enable": True}
    return {"device": "cpu"} if word == "MULTI_CPU" else {}


def _parallelism(config: dict[str, Any], name: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for word, value in config.items():
        key = normal_key(str(word)).removeprefix("parallelism_config_")
        if key in _PARALLEL:
            keys[_PARALLEL[key]] = value
        elif key in ("tp_size", "sp_size") and str(value) != "1":
            raise SpecError(
                f"{KEY}: {name} has {word}: {value}; only context_parallel_size is supported"
            )
    if str(keys.get("dp_replicate_size", 1)) == "1":
        keys.pop("dp_replicate_size", None)
    else:
        keys["strategy"] = "hsdp"
    return keys


def _take_dynamo(rest: dict[str, Any]) -> dict[str, Any]:
    """Extract `dynamo_backend`, which has a job key; other dynamo options stay in the file."""
    config = rest.get("dynamo_config")
    if not isinstance(config, dict):
        return {}
    left = {key: value for key, value in config.items() if not str(key).endswith("backend")}
    backend = [value for key, value in config.items() if str(key).endswith("backend")]
    if left:
        rest["dynamo_config"] = left
    else:
        del rest["dynamo_config"]
    return _dynamo(backend[0]) if backend else {}


def _dynamo(backend: Any) -> dict[str, Any]:
    word = str(backend).strip().lower()
    if word in ("no", "false", "none", ""):
        return {}
    return {"torch_compile": True, "torch_compile_backend": word}


def _fitting(
    theirs: dict[str, Any], mine: Mapping[str, Any], name: str, notes: list[str]
) -> dict[str, Any]:
    """Return the file's values, without those that the job sets under other keys."""
    fits = {key: value for key, value in theirs.items() if key not in _RANKS}
    own = {key: mine[key] for key in _RANKS if as_none(mine.get(key)) not in (None, "auto")}
    rank_keys = {key: theirs[key] for key in _RANKS if key in theirs}
    if not own:
        fits |= _ranks(rank_keys)
    for key, value in rank_keys.items() if own else ():
        same = key in own and agree(key, own[key], value)
        if not same and not (key == "num_processes" and _count(own) == value):
            listed = ", ".join(f"{mine}: {shown}" for mine, shown in own.items())
            notes.append(f"{KEY}: {name} says {key}: {value}; the job's {listed} is used")
    strategy = as_none(mine.get("strategy")) or "auto"
    if strategy != "auto" and fits.pop("fsdp_enable", None) and strategy not in SHARDING:
        notes.append(f"{KEY}: {name} is for FSDP; the job's strategy: {strategy} is used")
    return fits


def _ranks(rank_keys: dict[str, Any]) -> dict[str, Any]:
    """Limit the GPUs to the number of processes, as accelerate does."""
    if "gpus" not in rank_keys:
        return rank_keys
    gpus = read_value("gpus", rank_keys["gpus"])
    ranks = rank_keys.get("num_processes")
    return {"gpus": gpus[:ranks] if isinstance(ranks, int) else gpus}


def _count(own: dict[str, Any]) -> int | None:
    try:
        return world_size(JobSpec.model_validate(own))
    except ValidationError:  # reported later
        return None


def _check(theirs: dict[str, Any], name: str) -> None:
    """Reject values that are invalid in a job, naming the file."""
    supported = {key: value for key, value in theirs.items() if key in JobSpec.model_fields}
    wrong = [key for key in theirs if key not in supported]
    if wrong:
        meant = did_you_mean(wrong[0], JobSpec.model_fields) or "; remove it"
        raise SpecError(f"{KEY}: {name}: {wrong[0]} is not supported{meant}")
    try:
        JobSpec.model_validate(supported)
    except ValidationError as error:
        reasons = "; ".join(f"{key_of(e)}: {in_words(e)}" for e in error.errors())
        raise SpecError(f"{KEY}: {name}: {reasons}") from None


def _check_unknown(key: str, name: str, notes: list[str]) -> None:
    """Reject an unknown key that looks like a typo; note others, which newer versions may know."""
    best = nearest(key, (*SAME, *REST, *READ, *FOREIGN), least=_TYPO_SIMILARITY)
    if best is not None:
        raise SpecError(f'{KEY}: {name} has an unknown key "{key}" (did you mean "{best}"?)')
    notes.append(f'{KEY}: {name}: "{key}" is passed to accelerate unchanged')


def _fsdp_key(word: str) -> str:
    key = normal_key(word)
    key = key if key.startswith("fsdp_") else f"fsdp_{key}"
    return RENAMED.get(key, key)
