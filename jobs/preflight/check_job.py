"""Find problems of a job before any rank starts, without torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.machine import devices
from jobs.machine.engine_tools import Cancelled, ToolError, ask
from jobs.memory.host_memory import check_host_memory
from jobs.models.blocks import detect_blocks
from jobs.models.find_model import find_lora
from jobs.models.model_files import check_model
from jobs.models.scorers import check_scorers
from jobs.paths import cache_home, exists, expand, refuse_unwritable
from jobs.preflight.data import check_dataset
from jobs.spec.families import get_family
from jobs.spec.rules.launch_conflicts import GPU_KERNELS
from jobs.spec.rules.strategy import depends_on_memory, may_import, own_policy, shards, world_size
from jobs.spec.values.hub_names import HubName, is_offline
from jobs.spec.values.spellings import nearest
from jobs.trackers import check_trackers

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs.models.blocks import Detection
    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.output import HubKeys
    from jobs.spec.keys.training import TrainingKeys


# -- compiler -------------------------------------------------------------------------------
# The C compiler with which torch compiles kernels while a job runs.


# Backends of torch.compile that compile no kernels.
_WITHOUT: Final = ("eager", "aot_eager", "cudagraphs")


def check_compiler(spec: RecipeKeys, *, on_gpus: bool) -> None:
    """Check that the compiler which the job needs is installed.

    Args:
        spec: The job.
        on_gpus: Whether its ranks compute on GPUs; kernels for CPUs are in C++.

    Raises:
        SpecError: The job compiles kernels, and there is no compiler.
    """
    compiles = spec.torch_compile and spec.torch_compile_backend not in _WITHOUT
    # On the CPU this optimizer is not compiled: see `engine.train.optimizer`.
    eight_bit = spec.optimizer == "adamw_8bit" and on_gpus and not spec.fsdp_cpu_offload
    if not (compiles or eight_bit):
        return
    if lack := what_lacks(on_gpus=on_gpus):
        key = "torch_compile" if compiles else "optimizer: adamw_8bit"
        raise SpecError(f"{key} compiles kernels at run time, but {lack}", hint(on_gpus=on_gpus))


def what_lacks(*, on_gpus: bool) -> str | None:
    """Return what is missing for compiling; None if nothing is.

    Triton (3.7) and torch's Inductor (2.13) use CC or CXX, or else search for these names.
    """
    variable, names = ("CC", ("gcc", "clang")) if on_gpus else ("CXX", ("g++",))
    if chosen := os.environ.get(variable):
        names = (chosen.split()[0],)
    if not any(shutil.which(name) for name in names):
        where = f"{variable}={chosen}" if chosen else "PATH"
        return f"there is no {' or '.join(names)} ({where})"
    headers = Path(sysconfig.get_paths()["include"])
    if on_gpus and not (headers / "Python.h").is_file():
        return f"there is no Python.h in {headers}"
    return None


def hint(*, on_gpus: bool) -> str:
    """Say how to install a compiler."""
    packages = "gcc python3-dev" if on_gpus else "g++"
    return f"apt install {packages}, or the equivalent"


# -- wrapped classes ------------------------------------------------------------------------
# Check the block classes that a job names against its model.


_MOST_NAMED = 6  # classes listed in an error


def check_block_names(spec: RecipeKeys) -> None:
    """Check `fsdp_transformer_layer_cls_to_wrap` if it differs from the family's default.

    Takes some seconds for a model whose blocks are not cached.

    Raises:
        SpecError: The model has no such class, or it cannot be wrapped; the message names the
            closest class.
    """
    names = spec.fsdp_transformer_layer_cls_to_wrap or []
    if set(names) <= set(get_family(spec.model_family).blocks_of(spec.model_flavour)):
        return
    if spec.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP" or not (
        shards(spec) or depends_on_memory(spec)
    ):
        return
    try:
        detection = detect_blocks(
            model_family=spec.model_family,
            model_flavour=spec.model_flavour,
            pretrained_model=spec.pretrained_model_name_or_path,
        )
    except ToolError:  # the ranks check it as well
        return
    check_names(names, detection)


def check_names(names: list[str], detection: Detection) -> None:
    """Check that each of these classes is in the model and can be wrapped.

    Raises:
        SpecError: See `check_block_names`.
    """
    present = {part.class_name for part in detection.parts.parts[:-1]}  # the root is the last
    for name in names:
        if name in present and name not in detection.parts.containers:
            continue
        spelled = {block.class_name.lower(): block.class_name for block in detection.classes}
        best = nearest(name, spelled)
        meant = f' (did you mean "{spelled[best]}"?)' if best else ""
        why = "has no forward and cannot be wrapped" if name in present else "is not in the model"
        likely = ", ".join([block.class_name for block in detection.classes][:_MOST_NAMED])
        raise SpecError(
            f'fsdp_transformer_layer_cls_to_wrap: "{name}" {why}{meant}',
            f"{detection.model_class} has {likely}; `fsdp-tui detect` shows them",
        )


KEY: Final = "fsdp_auto_wrap_policy"
LONGEST: Final = 60.0  # seconds for the import; torch alone may take ten from a cold disk


def check_wrap_policy(spec: RecipeKeys, *, longest: float = LONGEST) -> None:
    """Import the job's own wrap policy the way its ranks will, if it may be imported here.

    Otherwise only the ranks import it, see `may_import`.

    Raises:
        SpecError: It cannot be imported or called, or the import does not finish.
    """
    path, deadline = own_policy(spec), time.monotonic() + longest
    if path is None or not may_import(path) or not (shards(spec) or depends_on_memory(spec)):
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as name:
        try:
            ask(
                "engine.parallel.wrap_policy",
                [path],
                Path(name, "answer"),
                lambda line: None,
                lambda: time.monotonic() > deadline,
            )
        except Cancelled:
            raise SpecError(f"{KEY}: importing {path} did not finish in {longest:.0f} s") from None
        except ToolError as error:
            raise SpecError(f"{KEY}: importing {path} failed ({error})") from None


# -- check job ------------------------------------------------------------------------------


__all__ = ["check", "check_dataset", "check_devices", "check_model"]


def check(spec: JobSpec, absent: Collection[HubName] = ()) -> None:
    """Check what does not depend on where the job runs: model, data, caches, trackers and pushes.

    Args:
        spec: The job.
        absent: Names that will be downloaded before it starts, and are checked then.

    Raises:
        UserError: The first problem that would make the job fail, in one line.
    """
    # imported here to avoid an import cycle

    if HubName.read("model", spec.pretrained_model_name_or_path) not in absent:
        check_model(spec, settings=True)
        check_block_names(spec)
        check_wrap_policy(spec)
    check_scorers(spec, absent)
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
        SpecError: The machine does not have it.
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
    """Check that the job's initial LoRAs exist; a resumed job does not need `init_lora`.

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
    """Fail now if the results could not be pushed after days of training. No network access."""
    if not spec.push_to_hub:
        return
    if is_offline():
        raise SpecError(
            "push_to_hub: HF_HUB_OFFLINE turns the hub off", "unset it, or remove push_to_hub"
        )
    from huggingface_hub import get_token  # takes 0.3 s

    if not get_token():
        raise SpecError(
            "push_to_hub: no token of the hub on this machine", "log in with `hf auth login`"
        )


def _check_kernel(spec: TrainingKeys) -> None:
    """Check that FlashAttention 3, a separate package, is installed. The ranks check the GPUs."""
    if spec.attention_backend == "flash3" and find_spec("flash_attn_interface") is None:
        raise SpecError(
            "attention_backend: flash3 needs the package flash_attn_3; it is not installed",
            "build it from the hopper folder of github.com/Dao-AILab/flash-attention, or use auto",
        )


def check_devices(spec: RecipeKeys) -> int | list[str] | None:
    """Match the requested devices to this machine's.

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
