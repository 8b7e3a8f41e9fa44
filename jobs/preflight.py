"""What can be known to be wrong with a job before any rank starts, without torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import devices
from jobs.conflicts import GPU_KERNELS
from jobs.datasets import datasets_of, find_layout
from jobs.errors import SpecError
from jobs.families import FAMILIES, component_of, get_family
from jobs.models import find_model
from jobs.paths import cache_home, ensure_private_dir, exists, expand
from jobs.pictures import CAPTION_SUFFIXES, PICTURE_SUFFIXES, VIDEO_SUFFIXES, list_files
from jobs.rundir import read_json
from jobs.strategy import world_size

if TYPE_CHECKING:
    from jobs.datasets import Dataset
    from jobs.families import Family
    from jobs.spec import JobSpec


def check(spec: JobSpec) -> int | list[str] | None:
    """Check model, data, caches and devices.

    Returns:
        What the job wants of the machine: GPU UUIDs, a count of any GPUs, or None for CPU ranks.

    Raises:
        UserError: The first thing that would make the job fail, in one line.
    """
    # Not imported with this module, which they need themselves.
    from jobs.block_names import check_block_names
    from jobs.wrap_policy import check_wrap_policy

    check_model(spec)
    check_block_names(spec)
    check_wrap_policy(spec)
    check_dataset(spec)
    ensure_private_dir(Path(spec.cache_dir) if spec.cache_dir else cache_home())
    return check_devices(spec)


def check_model(spec: JobSpec) -> Path:
    """The model directory, known to hold a pipeline of the job's family.

    Raises:
        SpecError: It is missing, is no diffusers model, or is of another family.
    """
    root = find_model(spec.pretrained_model_name_or_path)
    index = read_json(root / "model_index.json")
    if index is None:
        raise SpecError(
            f"{root} is not a diffusers model: it has no readable model_index.json",
            f"give the directory that holds model_index.json, {component_of(spec)}/ and vae/",
        )
    family = get_family(spec.model_family, spec.model_flavour)
    pipeline = str(index.get("_class_name", "?"))
    if pipeline not in family.pipelines:
        fits = [f.name for f in FAMILIES.values() if pipeline in f.pipelines]
        raise SpecError(
            f"{root} is a {pipeline}, not a {family.title} model",
            f"set model_family: {fits[0]}" if fits else None,
        )
    component = component_of(spec)
    for part in (component, "vae"):
        if read_json(root / part / "config.json") is None:
            raise SpecError(f"{root} is incomplete: {part}/config.json is missing or damaged")
        weights = list((root / part).glob("*.safetensors"))
        if not weights:
            pickled = list((root / part).glob("*.bin"))
            raise SpecError(
                f"{root / part} holds no .safetensors weights",
                "convert the .bin files to safetensors; pickled weights are not loaded"
                if pickled
                else None,
            )
    _check_supplied(root, family)
    _check_heads(spec, root / component / "config.json")
    return root


def _check_supplied(root: Path, family: Family) -> None:
    """What a family is published without has to be put there."""
    missing = [part for part in family.supplied if not any((root / part).glob("*.json"))]
    if missing:
        raise SpecError(
            f"{root} lacks {' and '.join(missing)}, which {family.title} is published without",
            "; ".join(f"put {family.supplied[part]} into {root / part}" for part in missing),
        )


def _check_heads(spec: JobSpec, config: Path) -> None:
    """Ulysses gives each rank some of the attention heads."""
    if spec.context_parallel_size == 1 or spec.context_parallel_comm_strategy != "alltoall":
        return
    heads = (read_json(config) or {}).get("num_attention_heads")
    if isinstance(heads, int) and heads % spec.context_parallel_size:
        raise SpecError(
            f"context_parallel_size {spec.context_parallel_size} does not divide the {heads} "
            "attention heads of the model",
            "choose a divisor, or context_parallel_comm_strategy: allgather",
        )


def check_dataset(spec: JobSpec) -> int:
    """The number of pictures and videos in the job's folders, before anything is looked into.

    Rows of tables are not counted.

    Raises:
        SpecError: There is no such folder, or no picture in it, or a caption for none of them.
    """
    return sum(_check_source(spec, dataset) for dataset in datasets_of(spec))


def _check_source(spec: JobSpec, dataset: Dataset) -> int:
    root = expand(dataset.path)
    if not exists(root):
        raise SpecError(f"no such dataset folder: {root}")
    if not root.is_dir():
        raise SpecError(f"the dataset {root} is a file, not a folder of pictures")
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
        what = "pictures or videos" if takes_videos else "pictures"
        kinds = PICTURE_SUFFIXES | VIDEO_SUFFIXES if takes_videos else PICTURE_SUFFIXES
        found = files.foreign + ([] if takes_videos else files.videos)
        raise SpecError(
            f"0 {what} in the dataset folder {root}",
            f"it has {found[0].name}, which cannot be used; looked for {' '.join(sorted(kinds))}"
            if found
            else f"looked for {' '.join(sorted(kinds))}",
        )
    captioned = files.metadata or any(
        file.with_suffix(suffix).is_file() for file in wanted for suffix in CAPTION_SUFFIXES
    )
    if not captioned and spec.missing_captions == "skip":
        raise SpecError(
            f"none of the {len(wanted)} pictures in {root} has a caption",
            "write one beside each, e.g. cat.txt for cat.png, or set missing_captions: empty",
        )
    return len(wanted)


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
                "Context parallelism runs on CUDA GPUs only, and this machine shows none",
                "set context_parallel_size: 1",
            )
        if spec.attention_backend in GPU_KERNELS:
            raise SpecError(
                f"attention_backend: {spec.attention_backend} needs a GPU, and this machine shows "
                "none",
                "use auto or math",
            )
        if spec.gpus is not None or spec.device == "cuda":
            raise SpecError(
                "the job asks for GPUs, and this machine shows none",
                "leave out gpus to run on CPU ranks",
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
        raise SpecError(f"there is no GPU {name} on this machine", f"it has {have}")
    gpu, instance = match
    if gpu.unusable is not None:
        what = f"{name} is a MIG instance: " if instance is not None else ""
        raise SpecError(f"{what}GPU {gpu.index} {gpu.unusable}")
    return gpu.uuid
