"""What can be known to be wrong with a job before any rank starts, without torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import SpecError
from jobs.launch.trackers import check_trackers
from jobs.machine import devices
from jobs.memory.host_memory import check_host_memory
from jobs.paths import cache_home, exists, expand, refuse_unwritable
from jobs.preflight.compiler import check_compiler
from jobs.preflight.model_files import check_model
from jobs.spec.families import get_family
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.conflicts import GPU_KERNELS
from jobs.spec.rules.strategy import world_size
from jobs.spec.values.dataset_files import (
    CAPTION_SUFFIXES,
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
    list_files,
)
from jobs.spec.values.datasets import datasets_of, find_layout

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.values.datasets import Dataset

__all__ = ["check", "check_dataset", "check_devices", "check_model"]


def check(spec: JobSpec) -> int | list[str] | None:
    """Check model, data, caches and devices.

    Returns:
        What the job wants of the machine: GPU UUIDs, a count of any GPUs, or None for CPU ranks.

    Raises:
        UserError: The first thing that would make the job fail, in one line.
    """
    # Not imported with this module, which they need themselves.
    from jobs.preflight.wrap_policy import check_wrap_policy
    from jobs.preflight.wrapped_classes import check_block_names

    check_model(spec, settings=True)
    check_block_names(spec)
    check_wrap_policy(spec)
    check_dataset(spec)
    refuse_unwritable(cache_of(spec))
    wanted = check_devices(spec)
    check_compiler(spec, on_gpus=wanted is not None)
    _check_kernel(spec)
    check_trackers(spec)
    check_host_memory(spec, on_gpus=wanted is not None)
    return wanted


def cache_of(spec: JobSpec) -> Path:
    """Where the job's caches are."""
    return Path(spec.cache_dir) if spec.cache_dir else cache_home()


def check_beginning(spec: JobSpec) -> None:
    """Refuse a new job whose `init_lora` is not there; one that resumes needs it no more.

    Raises:
        SpecError: There is no such file, or no LoRA in that directory.
    """
    if spec.model_type != "lora" or not spec.init_lora or spec.resume_from_checkpoint:
        return
    path = expand(spec.init_lora)
    if not exists(path):
        raise SpecError(f"init_lora: {path} does not exist")
    if path.is_file() and path.suffix != ".safetensors":
        raise SpecError(f"init_lora: {path} is not a .safetensors file")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise SpecError(f"init_lora: {path} has no .safetensors file")


def check_dataset(spec: JobSpec) -> int:
    """The number of pictures and videos in the job's folders, before anything is looked into.

    Rows of tables are not counted.

    Raises:
        SpecError: There is no such folder, or no picture in it, or a caption for none of them; or
            the job trains on or samples videos, and what reads and writes them is not installed.
    """
    if any(request.frames > 1 for request in requests_of(spec)):
        _check_videos("validation_prompts are sampled as videos")
    return sum(_check_source(spec, dataset) for dataset in datasets_of(spec))


def _check_source(spec: JobSpec, dataset: Dataset) -> int:
    root = expand(dataset.path)
    if not exists(root):
        raise SpecError(f"no such dataset folder: {root}")
    if not root.is_dir():
        raise SpecError(f"the dataset {root} is a file, not a folder of images")
    try:
        layout, files = find_layout(root), list_files(root)
    except OSError as error:
        raise SpecError(f"cannot read the dataset {root} ({error.strerror})") from None
    if layout != "folder":
        if find_spec("datasets") is None:
            raise SpecError(
                f"{root} is a directory of the datasets library, which is not installed",
                "pip install 'fsdp-tui[datasets]'",
            )
        return 0  # rows are counted when they are looked at
    takes_videos = get_family(spec.model_family).frame_step > 0
    wanted = files.videos + files.pictures if takes_videos else files.pictures
    if not wanted:
        what = "images or videos" if takes_videos else "images"
        kinds = PICTURE_SUFFIXES | VIDEO_SUFFIXES if takes_videos else PICTURE_SUFFIXES
        found = files.foreign + ([] if takes_videos else files.videos)
        raise SpecError(
            f"0 {what} in the dataset folder {root}",
            f"it has {found[0].name}, which is not supported; supported: {' '.join(sorted(kinds))}"
            if found
            else f"supported: {' '.join(sorted(kinds))}",
        )
    if takes_videos and files.videos:
        _check_videos(f"{root} holds videos")
    captioned = files.metadata or any(
        file.with_suffix(suffix).is_file() for file in wanted for suffix in CAPTION_SUFFIXES
    )
    if not captioned and spec.missing_captions == "skip":
        raise SpecError(
            f"none of the {len(wanted)} images in {root} has a caption",
            "add one for each, e.g. cat.txt for cat.png, or set missing_captions: empty",
        )
    return len(wanted)


def _check_videos(why: str) -> None:
    """Videos are read and written by a library that pictures do not need."""
    if find_spec("av") is None:
        raise SpecError(
            f"{why}, which need PyAV; it is not installed", "pip install 'fsdp-tui[video]'"
        )


def _check_kernel(spec: JobSpec) -> None:
    """FlashAttention 3 is a package of its own; which GPUs it runs on, the ranks say."""
    if spec.attention_backend == "flash3" and find_spec("flash_attn_interface") is None:
        raise SpecError(
            "attention_backend: flash3 needs the package flash_attn_3; it is not installed",
            "build it from the hopper folder of github.com/Dao-AILab/flash-attention, or use auto",
        )


def check_devices(spec: JobSpec) -> int | list[str] | None:
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
        found = [_uuid_of(name, present) for name in spec.gpus]
        if len(set(found)) != len(found):
            raise SpecError(f"gpus names the same GPU twice: {', '.join(map(str, spec.gpus))}")
        return found
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
