"""Build the `accelerate launch` command that starts a job's ranks on this machine."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import psutil

from jobs.errors import UserError
from jobs.machine import devices
from jobs.machine.bytecode import bytecode_variables
from jobs.machine.processes import RUN_ID_VARIABLE
from jobs.memory.calibration import read_calibration
from jobs.memory.fit import Verdict, fit_of, room_of, worst
from jobs.memory.question import recall
from jobs.models.find_model import count_parameters, find_denoiser
from jobs.run import why_failed
from jobs.run.rundir import read_json
from jobs.spec.families import wrapped_classes
from jobs.spec.rules.launch_conflicts import words_of
from jobs.spec.rules.no_effect import counts
from jobs.spec.rules.strategy import (
    AS_ASKED,
    REASON_VARIABLE,
    SHARDING,
    STRATEGY_VARIABLE,
    Room,
    Whole,
    chosen_strategy,
    depends_on_memory,
    launched_strategy,
    own_policy,
    world_size,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.gpu import Gpu
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys


# -- local ----------------------------------------------------------------------------------
# The command line and environment of `accelerate launch`.


_LOOPBACK: Final = "127.0.0.1"
_PACKAGES: Final = ("torch", "accelerate", "diffusers", "transformers", "peft", "fsdp-tui")
# The allocator's options, by their current and their former name; torch accepts both until 3.0.
ALLOCATOR_VARIABLES: Final = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
# Settings of glibc for ranks with weights in host memory. Blocks of 1 MiB and more are mapped
# individually and therefore returned to the system when freed. By default glibc soon keeps blocks
# up to 32 MiB in a fragmented heap, which takes a third more memory on a real model. With huge
# pages (glibc 2.35, if the kernel has them) mapping is faster than the heap (`tests/bench/memory.py
# --real`).
HOST_ALLOCATOR: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Launch:
    """A command line, the environment variables that are set for it, and its accelerate config.

    `strategy` is the resolved strategy.
    """

    command: list[str]
    environment: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    strategy: str = ""


def build_launch(spec: JobSpec, run_dir: RunDir, *, gpus: Sequence[str], run_id: str) -> Launch:
    """Build the launch of a job.

    Args:
        spec: The job.
        run_dir: Its run directory.
        gpus: GPU UUIDs, one per rank; empty for CPU ranks.
        run_id: Identifies every process of the run through its environment.
    """
    ranks = world_size(spec)
    strategy, reason = chosen_before(spec, run_dir) or chosen_strategy(spec, auto_room(spec, gpus))
    cores = psutil.cpu_count() or 1
    threads = max(1, cores // ranks if not gpus else min(8, cores // ranks))
    flags = {
        "config_file": run_dir.accelerate_file,
        "num_processes": ranks,
        "num_machines": spec.num_machines,
        "machine_rank": spec.machine_rank,
        "main_process_ip": spec.main_process_ip,
        "main_process_port": spec.main_process_port or 0,
        "mixed_precision": spec.mixed_precision,
        "dynamo_backend": "no",  # the engine compiles each block itself
        "num_cpu_threads_per_process": threads,
        "gpu_ids": ",".join(gpus) or None,
    }
    more = words_of(spec)
    named = {word[2:].partition("=")[0] for word in more}
    command = [sys.executable, "-m", "engine.start.accelerate", "launch"]
    command += [
        f"--{name}={value}"
        for name, value in flags.items()
        if value is not None and name not in named
    ]
    if strategy in SHARDING:
        options = fsdp_options(spec)
        command += ["--use_fsdp", *(f"--{name}={_word(value)}" for name, value in options.items())]
    elif ranks > 1:
        command.append("--multi_gpu")
    command += [*more, "-m", "engine", str(run_dir.root)]

    environment = {
        **rank_variables(spec, run_dir, run_id, strategy, reason, on_gpus=bool(gpus)),
        # Not SIGHUP, on which the launcher would end the ranks; their new session is meant to
        # survive it.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT",
        **loopback_variables(os.environ),
        # By default, elastic kills ranks 30 s after SIGTERM, in the middle of a large save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(spec.stop_grace_seconds)),
    }
    return Launch(command, environment, accelerate_config(spec, strategy, gpus=gpus), strategy)


def rank_variables(
    spec: JobSpec, run_dir: RunDir, run_id: str, strategy: str, reason: str, *, on_gpus: bool
) -> dict[str, str]:
    """Return the environment variables of every rank, for any launcher.

    Args:
        spec: The job.
        run_dir: Its run directory.
        run_id: Identifies every process of the run.
        strategy: The resolved strategy.
        reason: Why it was chosen.
        on_gpus: Whether the ranks have GPUs.
    """
    environment = {
        RUN_ID_VARIABLE: run_id,
        # The choice of `strategy: auto`, so that all ranks run what this command line says.
        STRATEGY_VARIABLE: strategy,
        REASON_VARIABLE: reason,
        # A folder named engine/ or jobs/ in the working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        **bytecode_variables(),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TOKENIZERS_PARALLELISM": "false",
        # Keep logs relevant: no advice about optional packages, no progress bars of libraries.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        **why_failed.environment(run_dir),
    }
    if on_gpus:
        if not ALLOCATOR_VARIABLES & os.environ.keys():  # the user's own choice takes precedence
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    offloads = spec.fsdp_cpu_offload and strategy in SHARDING
    swaps = bool(spec.swap_blocks) and counts("swap_blocks", spec)
    if not on_gpus or offloads or swaps:
        environment |= {k: v for k, v in HOST_ALLOCATOR.items() if k not in os.environ}
    return environment


def loopback_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep communication between ranks of one machine on the loopback interface.

    Otherwise it depends on what the machine's name resolves to.

    Args:
        environment: The user's environment, whose choice of an interface takes precedence.
    """
    name = next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(address.address == _LOOPBACK for address in addresses)
        ),
        None,
    )
    if name is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {key: value for key, value in variables.items() if key not in environment}


def auto_room(spec: JobSpec, gpus: Sequence[str]) -> Room | None:
    """Return the memory by which `strategy: auto` decides.

    None if there are no GPUs or nothing is known about them.
    """
    if spec.strategy != "auto" or not gpus:
        return None
    present = [gpu for gpu in devices.gpus() if gpu.uuid in gpus]
    memory = [gpu.memory_total for gpu in present]
    try:
        transformer = find_denoiser(spec)
    except UserError:
        return None
    parameters = count_parameters(transformer)
    if parameters is None or len(memory) < len(gpus) or not all(memory):
        return None
    return Room(parameters, min(memory), predicted_ddp(spec, present))


def versions() -> dict[str, str]:
    """Return the versions that affect a run's results, for `launch.json`."""
    by_package = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def full_environment(launch: Launch) -> dict[str, str]:
    """Merge the launch's variables into our environment, dropping those that confuse a new run."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")) or key == "FSDP_TUI_HOME"
    }
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(key, None)
    return inherited | launch.environment


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- accelerate config ------------------------------------------------------------------


def accelerate_config(spec: RecipeKeys, strategy: str, *, gpus: Sequence[str]) -> dict[str, Any]:
    """Return the contents of the file for `accelerate launch --config_file`.

    Without a file, accelerate would use the user's default config for all flags that are not given.

    Args:
        spec: The job; includes the rest of an accelerate config that the user gave.
        strategy: The resolved strategy.
        gpus: One per rank, by UUID or number; empty for CPU ranks.
    """
    kept = dict(spec.accelerate_config) if isinstance(spec.accelerate_config, dict) else {}
    dynamo = dict(kept.pop("dynamo_config", None) or {})
    ours: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(spec, strategy),
        "num_machines": spec.num_machines,
        "machine_rank": spec.machine_rank,
        "num_processes": world_size(spec),
        "main_process_port": spec.main_process_port or 0,
        "mixed_precision": spec.mixed_precision,
        "use_cpu": not gpus,
    }
    if spec.main_process_ip:
        ours["main_process_ip"] = spec.main_process_ip
    if gpus:
        ours["gpu_ids"] = ",".join(gpus)
    if strategy in SHARDING:
        ours["fsdp_config"] = fsdp_options(spec)
    if dynamo and spec.torch_compile:
        ours["dynamo_config"] = dynamo
    return {"debug": False} | kept | ours


def fsdp_options(spec: RecipeKeys) -> dict[str, Any]:
    """Return the job's FSDP options under accelerate's names, in its files and as flags."""
    options: dict[str, Any] = {
        "fsdp_version": 2,
        # Accelerate supports only yes and no; the engine handles the number of shards.
        "fsdp_reshard_after_forward": bool(spec.fsdp_reshard_after_forward),
        "fsdp_state_dict_type": spec.fsdp_state_dict_type,
        # Accelerate's launcher does not support callables; the engine calls them.
        "fsdp_auto_wrap_policy": "NO_WRAP" if own_policy(spec) else spec.fsdp_auto_wrap_policy,
        "fsdp_offload_params": spec.fsdp_cpu_offload,
        "fsdp_activation_checkpointing": spec.fsdp_activation_checkpointing,
        # The engine always reads only each rank's own shard. With accelerate's option of this name,
        # transformers would leave text encoders empty on every rank but the first.
        "fsdp_cpu_ram_efficient_loading": False,
    }
    if spec.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        options["fsdp_transformer_layer_cls_to_wrap"] = ",".join(wrapped_classes(spec))
    if spec.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        options["fsdp_min_num_params"] = spec.fsdp_min_num_params
    return options


def _distributed_type(spec: DeviceKeys, strategy: str) -> str:
    if strategy in SHARDING:
        return "FSDP"
    return "MULTI_GPU" if world_size(spec) > 1 else "NO"


_KEPT: Final = ", as on its first launch"


def chosen_before(spec: RecipeKeys, run_dir: RunDir) -> tuple[str, str] | None:
    """Read what `auto` chose at the job's last launch, and why.

    A restarted or resumed job keeps the choice: other users of the GPUs, or a newer prediction, are
    no reason to train differently.

    Returns:
        Strategy and reason; None if it was not launched yet, had another number of ranks, or its
            settings leave no choice.
    """
    if not depends_on_memory(spec):
        return None
    record = read_json(run_dir.launch_file) or {}
    environment, gpus = record.get("environment"), record.get("gpus")
    if not (isinstance(environment, dict) and isinstance(gpus, list)):
        return None
    strategy, reason = launched_strategy(environment)
    # earlier, the job did not say auto
    chosen = strategy in ("ddp", "fsdp2") and reason != AS_ASKED
    if len(gpus) != world_size(spec) or not chosen:
        return None
    return strategy, reason.removesuffix(_KEPT) + _KEPT


def predicted_ddp(spec: JobSpec, gpus: Sequence[Gpu]) -> Whole | None:
    """Predict the memory of a full copy of the model on each rank.

    Args:
        spec: The job.
        gpus: Its GPUs at the time of the launch.

    Returns:
        The prediction for the tightest GPU; None if the job was never estimated, in the form or
            with `fsdp-tui estimate`.
    """
    with suppress(Exception):  # the job must start even if our files are damaged
        predicted = recall(spec, "ddp", world_size(spec), on_gpus=True)
        if predicted is None or not gpus:
            return None
        here = read_calibration()
        needed, factor = here.corrected(predicted), here.factor
        fit = worst(
            fit_of(needed, room_of(gpu, (), {}, shares=True), on_gpus=True, factor=factor)
            for gpu in gpus
        )
        return Whole(fit.high, fit.room.free, fit.verdict is Verdict.FITS)
    return None
