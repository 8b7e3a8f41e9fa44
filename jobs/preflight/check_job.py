"""What can be known to be wrong with a job before any rank starts, without torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import SpecError
from jobs.machine import devices
from jobs.memory.host_memory import check_host_memory
from jobs.models.find_lora import find_lora
from jobs.models.model_files import check_model
from jobs.paths import cache_home, exists, expand, refuse_unwritable
from jobs.preflight.compiler import check_compiler
from jobs.preflight.dataset import check_dataset
from jobs.spec.rules.kernels import GPU_KERNELS
from jobs.spec.rules.strategy import world_size
from jobs.spec.values.hub_names import HubName, is_offline
from jobs.trackers import check_trackers

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.hub import HubKeys
    from jobs.spec.keys.training import TrainingKeys

__all__ = ["check", "check_dataset", "check_devices", "check_model"]


def check(spec: JobSpec, absent: Collection[HubName] = ()) -> None:
    """Check what is the same wherever the job runs: model, data, caches, trackers and pushes.

    Args:
        spec: The job.
        absent: What will be fetched before it starts, and is checked then.

    Raises:
        UserError: The first thing that would make the job fail, in one line.
    """
    # Not imported with this module, which they need themselves.
    from jobs.preflight.wrapped_classes import check_block_names, check_wrap_policy

    if not any(name.kind == "model" for name in absent):
        check_model(spec, settings=True)
        check_block_names(spec)
        check_wrap_policy(spec)
    if not any(name.kind == "dataset" for name in absent):
        check_dataset(spec)
    refuse_unwritable(cache_of(spec))
    check_trackers(spec)
    _check_push(spec)


def check_here(spec: RecipeKeys) -> int | list[str] | None:
    """Check what a job needs of this machine: devices, a compiler, kernels and memory.

    Returns:
        GPU UUIDs, a count of any GPUs, or None for CPU ranks.

    Raises:
        SpecError: It has not what the job needs.
    """
    requested = check_devices(spec)
    check_compiler(spec, on_gpus=requested is not None)
    _check_kernel(spec)
    check_host_memory(spec, on_gpus=requested is not None)
    return requested


def cache_of(spec: DataKeys) -> Path:
    """Return the directory of the job's caches."""
    return Path(spec.cache_dir) if spec.cache_dir else cache_home()


def check_beginning(spec: JobSpec) -> None:
    """Refuse a job whose LoRAs are not there; one that resumes does not need `init_lora`.

    Raises:
        SpecError: There is no such file, or no LoRA in that directory.
    """
    if spec.model_type != "lora":
        return
    if spec.init_lora and not spec.resume_from_checkpoint:
        _check_lora("init_lora", spec.init_lora)
    if spec.training_adapter:
        _check_lora("training_adapter", spec.training_adapter)


def _check_lora(key: str, text: str) -> None:
    path = expand(text)
    if not exists(path):
        of_hub = HubName.read("model", text) is not None
        hint = f"if it is on the hub, download it (`hf download`) and set {key} to the file"
        raise SpecError(f"{key}: {path} does not exist", hint if of_hub else None)
    if path.is_file() and path.suffix != ".safetensors":
        raise SpecError(f"{key}: {path} is not a .safetensors file")
    if path.is_dir() and find_lora(text) is None:
        if any(path.glob("*.safetensors")):
            raise SpecError(
                f"{key}: {path} has several .safetensors files", f"set {key} to one of them"
            )
        raise SpecError(f"{key}: {path} has no .safetensors file")


def _check_push(spec: HubKeys) -> None:
    """Refuse to train for days what cannot be pushed then. Nothing is asked of the network."""
    if not spec.push_to_hub:
        return
    if is_offline():
        raise SpecError(
            "push_to_hub: HF_HUB_OFFLINE turns the hub off", "unset it, or remove push_to_hub"
        )
    from huggingface_hub import get_token  # 0.3 s, for those who push

    if not get_token():
        raise SpecError(
            "push_to_hub: no token of the hub on this machine", "log in with `hf auth login`"
        )


def _check_kernel(spec: TrainingKeys) -> None:
    """FlashAttention 3 is a package of its own; which GPUs it runs on, the ranks say."""
    if spec.attention_backend == "flash3" and find_spec("flash_attn_interface") is None:
        raise SpecError(
            "attention_backend: flash3 needs the package flash_attn_3; it is not installed",
            "build it from the hopper folder of github.com/Dao-AILab/flash-attention, or use auto",
        )


def check_devices(spec: RecipeKeys) -> int | list[str] | None:
    """Match what the job asks for to what this machine has.

    Returns:
        GPU UUIDs, a count of any GPUs, or None for CPU ranks.

    Raises:
        SpecError: The machine can never satisfy the request.
    """
    present = [] if spec.device == "cpu" else devices.gpus()
    ranks = world_size(spec)
    if not present:
        if spec.context_parallel_size > 1:
            raise SpecError(
                "Context parallelism runs on CUDA GPUs only, and this machine has none",
                "set context_parallel_size: 1",
            )
        if spec.attention_backend in GPU_KERNELS:
            raise SpecError(
                f"attention_backend: {spec.attention_backend} needs a GPU, and this machine has "
                "none",
                "use auto or math",
            )
        if spec.gpus is not None or spec.device == "cuda":
            raise SpecError(
                "the job asks for GPUs, and this machine has none",
                "remove gpus and set device: auto or cpu to run on CPU ranks",
            )
        return None
    if isinstance(spec.gpus, list):
        uuids = [_uuid_of(name, present) for name in spec.gpus]
        if len(set(uuids)) != len(uuids):
            raise SpecError(f"gpus names the same GPU twice: {', '.join(map(str, spec.gpus))}")
        return uuids
    usable = [gpu for gpu in present if gpu.unusable is None]
    if ranks > len(usable):
        barred = [f"GPU {gpu.index} {gpu.unusable}" for gpu in present if gpu.unusable]
        raise SpecError(
            f"the job asks for {ranks} GPUs, and this machine has {len(usable)}"
            + (f" that jobs may use ({barred[0]})" if barred else ""),
            "lower num_processes, or set device: cpu for CPU ranks",
        )
    return ranks


def _uuid_of(name: int | str, present: list[devices.Gpu]) -> str:
    match = devices.find(str(name), present)
    if match is None:
        have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in present)
        raise SpecError(f"no GPU {name} on this machine", f"it has {have}")
    gpu, instance = match
    if gpu.unusable is not None:
        what = f"{name} is a MIG instance: " if instance is not None else ""
        raise SpecError(f"{what}GPU {gpu.index} {gpu.unusable}")
    return gpu.uuid
