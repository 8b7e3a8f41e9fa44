"""The `accelerate launch` command that starts a job's ranks on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from jobs import devices
from jobs.errors import UserError
from jobs.families import component_of, wrapped_classes
from jobs.models import count_parameters, find_model
from jobs.processes import RUN_ID_VARIABLE
from jobs.strategy import SHARDING, STRATEGY_VARIABLE, Room, chosen_strategy, world_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.rundir import RunDir
    from jobs.spec import JobSpec

_PACKAGES: Final = ("torch", "accelerate", "diffusers", "transformers", "peft", "fsdp-tui")


@dataclass(frozen=True)
class Launch:
    """A command line and the environment variables that are set for it."""

    command: list[str]
    environment: dict[str, str]


def accelerate_config(spec: JobSpec, *, on_gpus: bool) -> dict[str, Any]:
    """A minimal accelerate config file.

    Without one, `accelerate launch` would merge whatever the person's own default config says
    into the flags it was not given.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",  # the flags say which
        "num_machines": 1,
        "num_processes": world_size(spec),
        "use_cpu": not on_gpus,
        "debug": False,
    }


def build(spec: JobSpec, run_dir: RunDir, *, gpus: Sequence[str], run_id: str) -> Launch:
    """Build the launch of a job.

    Args:
        spec: The job.
        run_dir: Where its ranks write.
        gpus: GPU UUIDs, one per rank; empty for CPU ranks.
        run_id: Marks every process of the run in its environment.
    """
    ranks = world_size(spec)
    strategy, reason = chosen_strategy(spec, room_of(spec, gpus))
    cores = psutil.cpu_count() or 1
    threads = max(1, cores // ranks if not gpus else min(8, cores // ranks))
    command = [
        *_accelerate(),
        "launch",
        f"--config_file={run_dir.accelerate_file}",
        f"--num_processes={ranks}",
        "--num_machines=1",
        "--main_process_port=0",
        f"--mixed_precision={spec.mixed_precision}",
        "--dynamo_backend=no",
        f"--num_cpu_threads_per_process={threads}",
    ]
    if gpus:
        command.append(f"--gpu_ids={','.join(gpus)}")
    if strategy in SHARDING:
        command += _fsdp_flags(spec)
    elif ranks > 1:
        command.append("--multi_gpu")
    command += ["-m", "engine", str(run_dir.root)]

    environment = {
        RUN_ID_VARIABLE: run_id,
        # What `strategy: auto` came to, so that all ranks run what this command line says.
        STRATEGY_VARIABLE: f"{strategy}: {reason}",
        # A folder called engine/ or jobs/ in some working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TOKENIZERS_PARALLELISM": "false",
        # A rank's log is for the run: no advice about optional packages, no library progress bars.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        # Not SIGHUP: its launcher would end the ranks, which a new session is there to prevent.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT",
        # Elastic kills ranks 30 s after SIGTERM by default, in the middle of a large save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(spec.stop_grace_seconds)),
    }
    if gpus:
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the person's own choice stays
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return Launch(command, environment)


def room_of(spec: JobSpec, gpus: Sequence[str]) -> Room | None:
    """What `strategy: auto` decides by; None where there are no GPUs or nothing can be told."""
    if spec.strategy != "auto" or not gpus:
        return None
    memory = [gpu.memory_total for gpu in devices.gpus() if gpu.uuid in gpus]
    try:
        transformer = find_model(spec.pretrained_model_name_or_path) / component_of(spec)
    except UserError:
        return None
    parameters = count_parameters(transformer)
    if parameters is None or len(memory) < len(gpus) or not all(memory):
        return None
    return Room(parameters, min(total for total in memory if total))


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers, for `launch.json`."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def full_environment(launch: Launch) -> dict[str, str]:
    """The launch's variables over the inherited ones, less what would confuse a new run."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")) or key == "FSDP_TUI_HOME"
    }
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(key, None)
    return inherited | launch.environment


def _accelerate() -> list[str]:
    """The `accelerate` of this very environment, whatever PATH says."""
    beside = Path(sys.executable).parent / "accelerate"
    if shutil.which(str(beside)):
        return [str(beside)]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli"]


def _fsdp_flags(spec: JobSpec) -> list[str]:
    flags = [
        "--use_fsdp",
        "--fsdp_version=2",
        # Accelerate knows yes and no; the number of shards is the engine's to see to.
        f"--fsdp_reshard_after_forward={str(bool(spec.fsdp_reshard_after_forward)).lower()}",
        f"--fsdp_state_dict_type={spec.fsdp_state_dict_type}",
        f"--fsdp_auto_wrap_policy={spec.fsdp_auto_wrap_policy}",
        f"--fsdp_offload_params={str(spec.fsdp_cpu_offload).lower()}",
        f"--fsdp_activation_checkpointing={str(spec.fsdp_activation_checkpointing).lower()}",
        # The engine always reads only each rank's own shard. Accelerate's switch of this name
        # would make transformers leave text encoders empty on every rank but the first.
        "--fsdp_cpu_ram_efficient_loading=false",
    ]
    if spec.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        names = ",".join(wrapped_classes(spec))
        flags.append(f"--fsdp_transformer_layer_cls_to_wrap={names}")
    if spec.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        flags.append(f"--fsdp_min_num_params={spec.fsdp_min_num_params}")
    return flags
