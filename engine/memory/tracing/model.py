"""Build the job's model on fake tensors: config, adapters, units, checkpointing.

The model is built the way a rank builds it (`engine.run_job.build_model`), but without weights, and
with every parameter as it is when its unit is gathered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from engine import families
from engine.memory.tracing.inputs import (
    has_fill_mask,
    references,
    sampled,
    training_frames,
    training_size,
)
from engine.memory.tracing.live import rounded
from engine.model.adapters import lora
from engine.model.adapters.training_adapter import add_training_adapter
from engine.model.base_matmul import set_scaled
from engine.model.files.published_packing import join_packed
from engine.model.files.weights import computed_in_fp32, stored_tensors
from engine.model.kernels import choose_attention
from engine.model.meta_device import parameters_on_meta
from engine.model.precision import compute_dtype, computes_alone, narrow_inputs, storage_dtype
from engine.model.quantized_linear import (
    base_precision,
    quantize_layers,
    quantized_layers,
    weights_per_element,
)
from engine.parallel.sharding import build_plugin, modules_to_wrap
from engine.run_job import kept_whole
from engine.train.muon import hidden_matrices
from jobs.errors import UserError
from jobs.models.find_model import find_model
from jobs.models.model_config import find_target
from jobs.spec.families import denoiser_config, get_family
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.launch_conflicts import GPU_KERNELS
from jobs.spec.rules.steps import preserves, trains_to_base
from jobs.spec.rules.strategy import (
    POLICIES_VARIABLE,
    checkpoints_activations,
    may_import,
    own_policy,
)
from jobs.spec.values.quoted_text import most_quoted_tokens

if TYPE_CHECKING:
    from engine.families import Family
    from engine.model.files.weights import StoredTensor
    from jobs.spec.job_spec import JobSpec, RecipeKeys


# -- shape ----------------------------------------------------------------------------------
# Collect the settings that a trace depends on. All other settings only enter the arithmetic.


# Keys that affect a rank's forward or backward, some of them only in combination with others.
_ALWAYS: Final = (
    "pretrained_model_name_or_path",
    "model_family",
    "model_flavour",
    "model_type",
    "mixed_precision",
    "max_sequence_length",
    "train_audio",
    "attention_backend",
    "fsdp_auto_wrap_policy",
    "torch_compile",
)
_OF_TRAINING: Final = ("train_batch_size", "loss_type", "snr_gamma", "tread")
_OF_LORA: Final = (
    "lora_rank",
    "lora_variant",
    "lokr_factor",
    "lokr_full_matrix",
    "lora_rank_pattern",
    "lora_dropout",
    "lora_target_modules",
    "lora_exclude_modules",
    "lora_experts",
    "base_precision",
    "base_matmul",
    "keep_in_full_precision",
    "modulation_precision",
)
_OF_POLICIES: Final = {
    "SIZE_BASED_WRAP": ("fsdp_min_num_params",),
    "TRANSFORMER_BASED_WRAP": ("fsdp_transformer_layer_cls_to_wrap",),
}


@dataclass(frozen=True)
class Shape:
    """The identity of a trace.

    Attributes:
        key: JSON text of everything that the trace depends on.
        spec: A job with this shape.
        config: The denoiser's config.
        sharded: Whether units gather their weights, in the compute precision.
        size: Width and height of an image in pixels.
        frames: Frames of a video.
        training: Whether this is a training step rather than a sample's forward.
        trains: JSON text of what is trained of which model.
    """

    key: str
    spec: JobSpec
    config: dict[str, Any]
    sharded: bool
    size: tuple[int, int]
    frames: int
    training: bool = True
    trains: str = ""

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and other.key == self.key


def shape_of(spec: JobSpec, *, sharded: bool, training: bool = True) -> Shape | None:
    """Return the shape of a job's steps or samples; None for samples if it makes none.

    Raises:
        UserError: The model's config is unknown, or no image size fits the job.
    """
    target = find_target(spec.model_family, spec.model_flavour, spec.pretrained_model_name_or_path)
    asked = sampled(spec)
    if training:
        size, frames = training_size(spec), training_frames(spec)
    elif asked is not None:
        size, frames = asked
    else:
        return None
    config = denoiser_config(spec, target.config)
    facts = spec.model_dump(mode="json", include=_keys(spec, training=training)) | {
        "cpu": spec.device == "cpu",
        "sharded": sharded,
        "size": size,
        "frames": frames,
        "fps": get_family(spec.model_family).sound and spec.fps,  # so long is the sound
        "guided": not training and any(request.guided for request in requests_of(spec)),
        "base": training and (trains_to_base(spec) or preserves(spec)),
        "references": references(spec, training=training)
        and [
            references(spec, training=training),
            spec.conditioning_resolution,
            *(["fill_mask"] if has_fill_mask(spec, training=training) else []),
        ],
        "config": config,
    }
    if spec.model_family == "hunyuanvideo15":
        facts["quoted"] = most_quoted_tokens(spec, training=training)
    if spec.attention_backend in GPU_KERNELS:
        facts["attention_backend"] = "auto"  # `build` leaves the same kernel to torch
    key = json.dumps(facts, sort_keys=True)
    of_model = {
        name: facts.get(name) for name in ("config", "model_type", "train_audio", *_OF_LORA)
    }
    trains = json.dumps(of_model | {"training": training}, sort_keys=True)
    return Shape(key, spec, config, sharded, size, frames, training, trains)


def _keys(spec: RecipeKeys, *, training: bool) -> set[str]:
    """Return the keys that affect this job's trace."""
    keys = {*_ALWAYS, *_OF_POLICIES.get(spec.fsdp_auto_wrap_policy, ())}
    if training:
        keys.update(_OF_TRAINING)
        if checkpoints_activations(spec):
            keys |= {"gradient_checkpointing_policy", "gradient_checkpointing_interval"}
            keys |= {"gradient_checkpointing", "fsdp_activation_checkpointing"}
    if spec.model_type == "lora":
        keys.update(_OF_LORA)
        if own_policy(spec):  # the policy only sees sharded parameters
            keys.add("lora_placement")
    return keys


# -- model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name: Its name in the adapted model.
        shape: Its shape.
        stored: Bytes per element as stored on a rank.
        gathered: Bytes per element while its unit computes.
        trained: Whether it is trained.
        lora: Whether it belongs to the adapter.
        fp32: Whether full training computes with it in fp32, so that it is replicated on all ranks.
        unused: Whether it gets no gradient although it is trained.
        per_element: Model weights per element if packed, else 1.
        matrix: Whether muon orthogonalizes its momentum.
    """

    name: str
    shape: tuple[int, ...]
    stored: int
    gathered: int
    trained: bool
    lora: bool
    fp32: bool
    unused: bool = False
    per_element: int = 1
    matrix: bool = False

    @cached_property
    def numel(self) -> int:
        """Return the number of elements."""
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: Name of the module; "" for the root.
        weights: Its parameters, except those of nested units.
    """

    name: str
    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class Built:
    """A model and its structure.

    Attributes:
        model: On the meta device, with adapters; buffers are real.
        family: Its family.
        units: In the order of registration, the root last.
        blocks: Names of the repeated modules, none nested in another.
        buffers: Bytes of all buffers, including those of a training adapter.
    """

    model: torch.nn.Module
    family: Family
    units: tuple[Unit, ...]
    blocks: tuple[str, ...]
    buffers: int


def build(shape: Shape) -> Built:
    """Build the model of a job without weights.

    Raises:
        UserError: The config does not describe a model, or the job's settings do not fit it.
    """
    spec = shape.spec
    family = families.load(spec.model_family, spec.model_flavour, _root(shape), spec.fps)
    model_class = family.transformer_class()
    try:
        with parameters_on_meta():
            model = model_class.from_config(shape.config)
    except Exception as error:  # constructors raise many exceptions for invalid configs
        words = " ".join(str(error).split())[:300]
        raise UserError(
            f"{model_class.__name__} cannot be built from its config "
            f"({type(error).__name__}: {words})",
            "check the model's config.json",
        ) from error
    family.freeze(model, spec)
    in_fp32 = {id(parameter) for parameter in computed_in_fp32(model)}
    fp32 = {name for name, p in model.named_parameters() if id(p) in in_fp32}
    _set_precision(model, shape, fp32)
    quantize_layers(model, spec, family, _published(shape, family))
    # `auto` depends on the GPUs, which may be on another machine: count what every GPU supports.
    set_scaled(model, scaled=spec.base_matmul == "scaled")
    for layer in quantized_layers(model).values():  # a CPU unpacks by torch's operations
        layer.packing = replace(layer.packing, traced=spec.device != "cpu")
    # GPU kernels do not exist on a CPU. They keep the same tensors as the kernel that torch chooses
    # here.
    if spec.attention_backend not in GPU_KERNELS:
        choose_attention(model, spec)
    if spec.model_type == "lora":
        unused = family.without_gradient(model, spec)
        lora.add_lora(model, spec, family.lora_targets(spec), unused)
        fp32 = {name.replace(".base_layer.", ".") for name in fp32}
    if shape.training:
        add_training_adapter(model, spec, family, torch.device("meta"))
    if shape.training and computes_alone(spec, sharded=shape.sharded):
        narrow_inputs(model, compute_dtype(spec))
    units, blocks = _units(model, shape, fp32)
    buffers = sum(rounded(buffer.numel() * buffer.element_size()) for buffer in model.buffers())
    return Built(model, family, units, blocks, buffers)


def on_fake(built: Built, shape: Shape) -> None:
    """Replace parameters and buffers by fake tensors, as gathered, within a `FakeTensorMode`."""
    spec = shape.spec
    widths = {w.name: w.gathered for unit in built.units for w in unit.weights}
    narrow = compute_dtype(spec)
    made: dict[int, torch.Tensor] = {}
    names = dict(built.model.named_parameters(remove_duplicate=False))
    for name, parameter in names.items():
        replacement = made.get(id(parameter))
        if replacement is None:
            narrowed = parameter.dtype is torch.float32 and widths.get(name) == narrow.itemsize
            dtype = narrow if narrowed and shape.sharded else parameter.dtype
            fake = torch.empty(parameter.shape, dtype=dtype, device="cpu")
            replacement = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
            made[id(parameter)] = replacement
        _set(built.model, name, replacement)
    for name, buffer in dict(built.model.named_buffers(remove_duplicate=False)).items():
        fake = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu")
        _set(built.model, name, fake)


def _root(shape: Shape) -> Any:
    """Return the model's directory; None if only its published config is known."""
    try:
        return find_model(shape.spec.pretrained_model_name_or_path)
    except UserError:
        return None


def _published(shape: Shape, family: Family) -> dict[str, StoredTensor] | None:
    """Return the model's stored tensors, some of them packed; None if they are unknown."""
    root = _root(shape)
    if root is None or base_precision(shape.spec) == "none":
        return None
    try:
        return join_packed(stored_tensors(family.denoiser_of(root)))
    except UserError:  # the ranks report this error
        return None


def _set_precision(model: torch.nn.Module, shape: Shape, fp32: set[str]) -> None:
    """Convert parameters to their storage precision, as `build_on_meta` does."""
    spec = shape.spec
    made: dict[int, torch.nn.Parameter] = {}
    for name, parameter in dict(model.named_parameters(remove_duplicate=False)).items():
        if id(parameter) not in made:
            dtype = storage_dtype(spec, keep_fp32=name in fp32)
            trained = spec.model_type == "full" and parameter.requires_grad
            made[id(parameter)] = torch.nn.Parameter(parameter.to(dtype), requires_grad=trained)
        _set(model, name, made[id(parameter)])


def _set(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def _units(
    model: torch.nn.Module, shape: Shape, fp32: set[str]
) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    spec = shape.spec
    if (policy := own_policy(spec)) and not may_import(policy):
        raise UserError(
            f"fsdp_auto_wrap_policy: {policy} is imported by ranks only, so memory cannot be "
            "predicted",
            f"if you trust it, set {POLICIES_VARIABLE}={policy.rpartition('.')[0]}",
        )
    whole = set(kept_whole(model, spec))
    plugin = build_plugin(spec, torch.device("cpu"))
    chosen = modules_to_wrap(model, spec, plugin, whole)
    names = {module: name for name, module in model.named_modules()}
    packed = weights_per_element(model)
    matrices = hidden_matrices(model, spec)
    of_parameter = {
        parameter: replace(
            _weight(name, parameter, shape, fp32, packed.get(id(parameter), 1)),
            matrix=name in matrices,
        )
        for name, parameter in model.named_parameters()
    }
    taken: set[torch.nn.Parameter] = set()
    unit_of = {}
    for module in [*chosen, model]:  # nested ones first
        own = [p for p in module.parameters() if p not in taken]
        taken.update(own)
        unit_of[module] = Unit(names[module], tuple(of_parameter[p] for p in own))
    units = [unit_of[module] for module in names if module in unit_of and module is not model]
    return (*units, unit_of[model]), _repeated(model, {names[module] for module in chosen}, names)


def _repeated(
    model: torch.nn.Module, units: set[str], names: dict[torch.nn.Module, str]
) -> tuple[str, ...]:
    """Return the outermost list items that are units, or of a class that a family repeats."""
    from jobs.spec.families import FAMILIES

    classes = {
        block
        for family in FAMILIES.values()
        for flavour in (None, *family.flavours)
        for block in family.blocks_of(flavour)
    }
    outermost: list[str] = []
    for module, name in names.items():
        block = type(module).__name__ in classes or (name in units and name[-1:].isdigit())
        if name and block and not any(name.startswith(outer + ".") for outer in outermost):
            outermost.append(name)
    return tuple(outermost)


def _weight(
    name: str, parameter: torch.nn.Parameter, shape: Shape, fp32: set[str], per_element: int
) -> Weight:
    spec = shape.spec
    kept = name.replace(".base_layer.", ".") in fp32
    stored = parameter.element_size()
    full = spec.model_type == "full"
    narrow = shape.sharded and full and not kept
    gathered = compute_dtype(spec).itemsize if narrow else stored
    adapter = spec.model_type == "lora" and lora.is_lora(name)
    return Weight(
        name,
        tuple(parameter.shape),
        stored,
        gathered,
        parameter.requires_grad,
        adapter,
        kept and full,
        per_element=per_element,
    )
