"""Load text encoders to fill the embedding cache, and free them before the transformer is placed.

Large ones are sharded over the ranks. All ranks call a sharded encoder together and must run the
same number of forwards, so a rank with fewer captions encodes some twice. Only forwards of the full
encoder work, which is what pipelines use to encode. The `generate` of a prompt rewriter does not:
its number of forwards depends on the text, so ranks would diverge.
"""

from __future__ import annotations

import gc
import json
import os
import re
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engine.model.files.weights import stored_tensors
from engine.model.release import STILL_HELD, Released, Watch, give_back, memory_in_use
from engine.model.sharded_encoder import UNPACKED, is_quantised, load_encoder, load_encoder_whole
from engine.ranks.world import available_memory
from jobs.errors import UserError
from jobs.models.find_model import index_of, plain_index
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.values.hub_names import INDEXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.families import Family
    from engine.model.files.weight_files import StoredTensor
    from engine.model.packing import Packing
    from engine.ranks.team import FileBarrier
    from engine.ranks.world import World
    from jobs.run.rundir import RunDir


# -- non-finite -----------------------------------------------------------------------------
# Find the encoder of a pipeline that returned non-finite values.


_SHARD: Final = "FSDP"  # prefix that `fully_shard` adds to a class name


@contextmanager
def track_nonfinite(pipeline: Any) -> Iterator[Callable[[], str]]:
    """Record the extremes of each encoder's outputs, on the device, without synchronizing.

    Args:
        pipeline: From `engine.model.text_encoders`.

    Yields:
        A function that names the encoders that made a non-finite output, with their classes; or all
        of them, if every recorded output was finite. One that only passes on another's NaN made
        nothing.
    """
    encoders = models_of(pipeline)
    extremes: dict[str, list[torch.Tensor]] = {}
    received: dict[str, list[torch.Tensor]] = {}

    def note(name: str, module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        # The first output is from the last layer, which propagates the NaNs of earlier layers. The
        # outputs themselves are not kept: hidden states of all layers are hundreds of MB.
        first = output if isinstance(output, torch.Tensor) else output[0]
        extremes.setdefault(name, []).append(torch.stack(first.detach().aminmax()))
        tensors = [part for part in (*inputs, *named.values()) if isinstance(part, torch.Tensor)]
        received.setdefault(name, []).extend(
            tensor.detach().max() for tensor in tensors if tensor.is_floating_point()
        )

    def broken() -> str:
        names = [
            name
            for name, each in extremes.items()
            if not torch.stack(each).isfinite().all()
            and not any(most.isnan() for most in received[name])
        ]
        return " and ".join(
            f"{name} ({type(encoders[name]).__name__.removeprefix(_SHARD)})"
            for name in names or encoders
        )

    hooks = [
        model.register_forward_hook(partial(note, name), with_kwargs=True)
        for name, model in encoders.items()
    ]
    try:
        yield broken
    finally:
        for hook in hooks:
            hook.remove()


# -- encoder files --------------------------------------------------------------------------
# List a model's text encoders and their sizes, from its files alone.


_POSITIONS: Final = "relative_attention_bias"
_NAME: Final = re.compile(r"text_encoder(_\d+)?")


def encoder_names(root: Path) -> list[str]:
    """Return a model's text encoders, by their names in the pipeline.

    Raises:
        UserError: There is no model_index.json, or it cannot be read.
    """
    return list(read_entries(root))


def encoder_bytes(root: Path, dtype: torch.dtype, packing: Packing | None = None) -> int:
    """Return the bytes of all text encoders in a precision, from their files' headers.

    Layers that an encoder always keeps in fp32 (a third of T5, under fp16) cannot be seen there.
    """
    return sum(
        kept_bytes(place, dtype, packing)
        for name in encoder_names(root)
        for place in stored_tensors(root / name).values()
    )


def kept_bytes(place: StoredTensor, dtype: torch.dtype, packing: Packing | None) -> int:
    """Return the bytes of an encoder's tensor, by its name and shape.

    Linear layers of blocks are recognized by a number in their names, except for T5's `wo` and its
    table of relative positions.
    """
    *parts, layer, leaf = ["", *place.name.split(".")]
    linear = leaf == "weight" and len(place.shape) == 2 and any(part.isdigit() for part in parts)
    if packing and linear and layer not in (UNPACKED, _POSITIONS) and packing.fits(place.shape[1]):
        return packing.bytes_of(*place.shape)
    width = (dtype if place.dtype.is_floating_point else place.dtype).itemsize
    return place.elements * width


def read_entries(root: Path) -> dict[str, tuple[str, str]]:
    """Return library and class of each text encoder that model_index.json lists.

    An encoder that it does not list was added by the user (HiDream is published without Llama).

    Raises:
        UserError: There is no model_index.json, or it cannot be read.
    """
    path = index_of(root) or root / INDEXES[0]
    try:
        index = plain_index(json.loads(path.read_text()))
        supplied = {
            config.parent.name: ("transformers", json.loads(config.read_text())["architectures"][0])
            for config in root.glob("text_encoder*/config.json")
            if config.parent.name not in index
        }
        return {
            name: (str(entry[0]), str(entry[1]))
            for name, entry in sorted((supplied | index).items())
            if _NAME.fullmatch(name) and entry and entry[0] and entry[1]
        }
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})", "download the model again") from None


# -- text encoders --------------------------------------------------------------------------


_CROWDED: Final = 0.6  # of a GPU's free memory; above it, activations may not fit
_PATIENCE: Final = timedelta(days=14)  # longer than any rank may have to wait
_SLACK: Final = 64 * 2**20  # bytes that others may allocate while encoders are freed


def shards_encoders(
    requested: bool | None,
    root: Path,
    dtype: torch.dtype,
    world: World,
    packing: Packing | None = None,
) -> tuple[bool, str]:
    """Return whether this rank would shard the text encoders, and why. Not a collective.

    Ranks may disagree, since their GPUs may have different amounts of free memory.
    `agree_on_sharding` makes the decision the same everywhere.

    Args:
        requested: The job's setting; None to decide here.
        root: The model.
        dtype: The precision the encoders are loaded in.
        world: The ranks.
        packing: How their linear layers are packed, if at all.
    """
    if world.size == 1:
        return False, "there is only one rank"
    if requested is not None:
        return requested, "set in job"
    try:
        needed = encoder_bytes(root, dtype, packing)
    except UserError as error:
        return False, f"their size is unknown ({error})"
    if quantised := [name for name in encoder_names(root) if is_quantised(root / name)]:
        return False, f"{quantised[0]} is quantized"
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        where = "free on a GPU"
    else:
        # All ranks of this machine share its memory.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        free, where = (
            available_memory() // ranks,
            f"of host memory free for each of {ranks} ranks",
        )
    return (
        needed > _CROWDED * free,
        f"they need {needed / 2**30:.1f} GiB, {needed / free:.0%} of the {free / 2**30:.1f} GiB "
        f"{where}; sharded from {_CROWDED:.0%}",
    )


def agree_on_sharding(
    requested: bool | None,
    root: Path,
    dtype: torch.dtype,
    world: World,
    run_dir: RunDir,
    barrier: FileBarrier,
    packing: Packing | None = None,
) -> tuple[bool, str]:
    """Return rank 0's result of `shards_encoders` on every rank, through a file, not a collective.

    It returns only once all ranks have called it, which `encoder_group` relies on.
    """
    place = "text-encoders"
    path = run_dir.root / "text_encoders.json"
    if world.main:
        sharded, reason = shards_encoders(requested, root, dtype, world, packing)
        write_atomic(path, json.dumps({"sharded": sharded, "reason": reason}) + "\n")
    barrier.arrive(place)
    barrier.wait(place)
    decided = read_json(path)
    if decided is None:
        raise RuntimeError(f"{path} is missing or damaged")
    return decided["sharded"], decided["reason"]


@contextmanager
def encoder_group(world: World) -> Iterator[DeviceMesh]:
    """Return all ranks as a one-dimensional mesh, in a separate group with a very long timeout.

    Ranks wait for each other whenever weights are gathered, and the slowest may be slow for a
    reason that does not concern the others, so the default group's timeout would end the job. The
    ranks should enter together, since the group is created through the default group's store,
    within its timeout.
    """
    cuda = world.device.type == "cuda"
    group = dist.new_group(backend="nccl" if cuda else "gloo", timeout=_PATIENCE)
    assert group is not None, "every rank is in it"
    devices = [world.device.index] if cuda else None
    dist.barrier(group, device_ids=devices)  # connect now: NCCL connects at the first collective
    yield DeviceMesh.from_group(group, world.device.type)
    # Do not use `finally`: a failed rank must not wait for others, and the job ends anyway.
    dist.barrier(group, device_ids=devices)  # until no rank is still receiving
    dist.destroy_process_group(group)


def load_sharded(
    root: Path,
    dtype: torch.dtype,
    world: World,
    mesh: DeviceMesh,
    *,
    packing: Packing | None = None,
    say: Callable[[str], None] = lambda note: None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, torch.nn.Module]:
    """Return the text encoders as FSDP2 shards, by their names in the pipeline. All ranks call it.

    Args:
        root: The model.
        dtype: The dtype argument of `from_pretrained`.
        world: The ranks.
        mesh: From `encoder_group`.
        packing: How to pack their linear layers, if at all.
        say: Called with a log line or two about each encoder.
        progress: Called with the number of tensors that this rank has filled so far.

    Raises:
        UserError: An encoder's files are damaged, quantized, or do not fit its config.
    """
    encoders: dict[str, torch.nn.Module] = {}
    read = count(1)
    for name, model_class in _classes(root).items():
        if model_class is None:
            say(f"{name} is not a transformers model, so each rank loads all of it")
            continue
        encoders[name] = load_encoder(
            model_class,
            root / name,
            dtype,
            world.device,
            mesh,
            say=say,
            moved=lambda: progress(next(read)),
            packing=packing,
        )
    return encoders


def load_whole(
    root: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packing: Packing | None = None,
    say: Callable[[str], None] = lambda note: None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, torch.nn.Module]:
    """Load the text encoders that can be read directly onto a device.

    They are returned by their names in the pipeline.

    Args:
        root: The model.
        dtype: The dtype argument of `from_pretrained`.
        device: The target device.
        packing: How to pack their linear layers, if at all.
        say: Called with a log line about each packed encoder.
        progress: Called with the number of tensors filled so far.

    Raises:
        UserError: An encoder's files are damaged, or do not fit its config.
    """
    read = count(1)
    return {
        name: encoder
        for name, model_class in _classes(root).items()
        if model_class is not None
        and not is_quantised(root / name)
        and (
            encoder := load_encoder_whole(
                model_class,
                root / name,
                dtype,
                device,
                moved=lambda: progress(next(read)),
                packing=packing,
                say=say,
            )
        )
    }


@contextmanager
def text_pipeline(
    family: Family,
    root: Path,
    dtype: torch.dtype,
    world: World,
    *,
    sharded: bool,
    packing: Packing | None = None,
    say: Callable[[str], None] = lambda note: None,
    progress: Callable[[int], None] = lambda done: None,
    freed: Callable[[Released], None] = lambda memory: None,
) -> Iterator[Any]:
    """Load the stock pipeline with only its prompt encoders, on this rank's device.

    At the end, its models are freed even if other code still holds the pipeline itself.

    Args:
        family: The model's family.
        root: The model.
        dtype: The precision of the encoders.
        world: The ranks.
        sharded: From `agree_on_sharding`. If set, all ranks enter together and call the encoders
            equally often.
        packing: How to pack the encoders' linear layers, if at all.
        say: Called with log lines.
        progress: Called with the number of tensors filled so far, except on CPU ranks that do not
            shard.
        freed: Called at the end with the memory before, during and after; not called after an
            exception, whose traceback still holds the models.

    Raises:
        UserError: The encoders cannot be loaded.
    """
    gc.collect()
    give_back(world.device)
    before = memory_in_use(world.device)
    with encoder_group(world) if sharded else nullcontext() as mesh:
        pipeline = _load(family, root, dtype, world, mesh, packing, say, progress)
        yield pipeline
        freed(_free(pipeline, world, before))


def load_resident(
    family: Family,
    root: Path,
    dtype: torch.dtype,
    world: World,
    *,
    say: Callable[[str], None] = lambda note: None,
    progress: Callable[[int], None] = lambda done: None,
) -> Any:
    """Load a pipeline with unsharded encoders that stay in memory until this rank exits."""
    gc.collect()
    give_back(world.device)
    return _load(family, root, dtype, world, None, None, say, progress)


def agree_to_stop(pipeline: Any, seen: bool) -> bool:
    """Return whether any rank has seen a stop request, the same on all of them. A collective.

    It uses the group of the sharded encoders, since any rank may be very late.

    Args:
        pipeline: From `text_pipeline`, sharded.
        seen: Whether this rank has seen a stop request.
    """
    for model in models_of(pipeline).values():
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                vote = torch.tensor(int(seen), device=parameter.device)
                dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=mesh.get_group())
                return bool(vote)
    return False  # nothing is sharded, so ranks continue to the next barrier


def _load(
    family: Family,
    root: Path,
    dtype: torch.dtype,
    world: World,
    mesh: DeviceMesh | None,
    packing: Packing | None,
    say: Callable[[str], None],
    progress: Callable[[int], None],
) -> Any:
    if mesh is not None:
        encoders = load_sharded(
            root, dtype, world, mesh, packing=packing, say=say, progress=progress
        )
    elif world.device.type == "cuda" or packing:
        # Do not load through host memory, where all ranks of a machine would hold a copy at once.
        encoders = load_whole(
            root, dtype, world.device, packing=packing, say=say, progress=progress
        )
    else:
        return family.load_text_pipeline(root, dtype).to(world.device)
    pipeline = family.load_text_pipeline(
        root, dtype, **encoders, **_image_encoder(family, root, world, progress)
    )
    # `pipeline.to` would also walk through the shards, which are already in place.
    for name, model in models_of(pipeline).items():
        if name not in encoders:  # loaded encoders are already on the device
            model.to(world.device)
    return pipeline


def _image_encoder(
    family: Family, root: Path, world: World, progress: Callable[[int], None]
) -> dict[str, torch.nn.Module]:
    """Load the encoder of first frames directly onto the device; {} for most models."""
    if family.image_encoder_class is None:
        return {}
    read = count(1)
    encoder = load_encoder_whole(
        family.image_encoder_class,
        root / "image_encoder",
        torch.float32,
        world.device,
        moved=lambda: progress(next(read)),
    )
    return {"image_encoder": encoder} if encoder is not None else {}


def _free(pipeline: Any, world: World, before: int) -> Released:
    """Remove the models from a pipeline, and check that they are freed."""
    loaded = memory_in_use(world.device)
    models = models_of(pipeline)
    watch = Watch(models)
    pipeline.register_modules(**dict.fromkeys(models))
    del models
    left = watch.still_held()
    give_back(world.device)
    cuda = world.device.type == "cuda"
    after = memory_in_use(world.device)
    # Do not compare with `before`: if the encoders stayed during training, other memory was
    # allocated since. Skip the CPU, where the resident set includes memory that the C library
    # keeps.
    if cuda and not left and loaded - after < watch.held - _SLACK:
        mib = f"{(loaded - after) / 2**20:.0f} of {watch.held / 2**20:.0f} MiB"
        left = f"{STILL_HELD}: only {mib} of the text encoders were freed"
    return Released("allocated" if cuda else "rss", before, loaded, after, watch.held, left)


def models_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return the models of a pipeline, by their names in it."""
    parts = pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}


def _classes(root: Path) -> dict[str, type[PreTrainedModel] | None]:
    """Return each text encoder's class; None if it is not from transformers."""
    classes = {name: _class(*entry) for name, entry in read_entries(root).items()}
    return {
        name: kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None
        for name, kind in classes.items()
    }


def _class(library: str, name: str) -> Any:
    """Return a class that a model_index.json names; None if it is from another library."""
    if library in ("transformers", "diffusers"):
        return getattr(import_module(library), name, None)
    return None
