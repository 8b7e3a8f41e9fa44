"""The job's own model on fake tensors: config, adapters, units, checkpointing.

Built as a rank builds it (`engine.run_job.build_model`), but for the weights: parameters are as
they are when their unit is gathered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from engine import families
from engine.memory.tracing.inputs import references, sampled, training_frames, training_size
from engine.memory.tracing.live import rounded
from engine.model.adapters import lora
from engine.model.adapters.training_adapter import add_training_adapter
from engine.model.base_matmul import set_scaled
from engine.model.files.published_packing import join_packed
from engine.model.files.weights import stored_tensors, trained_in_fp32
from engine.model.kernels import choose_attention
from engine.model.meta_device import parameters_on_meta
from engine.model.precision import compute_dtype, computes_alone, narrow_inputs, storage_dtype
from engine.model.quantized_linear import base_precision, quantize_layers, weights_per_element
from engine.parallel.sharding import build_plugin, modules_to_wrap
from engine.run_job import kept_whole
from jobs.errors import UserError
from jobs.models.find_model import find_model
from jobs.models.model_config import find_target
from jobs.spec.families import denoiser_config
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.launch_conflicts import GPU_KERNELS
from jobs.spec.rules.strategy import (
    POLICIES_VARIABLE,
    checkpoints_activations,
    may_import,
    own_policy,
)

if TYPE_CHECKING:
    from engine.families import Family
    from engine.model.files.weights import StoredTensor
    from jobs.spec.job_spec import JobSpec, RecipeKeys


# -- shape ----------------------------------------------------------------------------------
# What of a job decides its trace: everything else is arithmetic.


# Keys whose values change what a forward or backward of a rank does; some of them only sometimes.
_ALWAYS: Final = (
    "pretrained_model_name_or_path",
    "model_family",
    "model_flavour",
    "model_type",
    "mixed_precision",
    "max_sequence_length",
    "attention_backend",
    "fsdp_auto_wrap_policy",
    "torch_compile",
)
_OF_TRAINING: Final = ("train_batch_size", "loss_type", "snr_gamma")
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
    """A trace's name.

    Attributes:
        key: All that decides it, as a text.
        spec: A job that has it.
        config: The denoiser's config.
        sharded: Whether units gather their weights, in the compute precision.
        size: Width and height of an image in pixels.
        frames: Frames of a video.
        training: Whether it is a step of training; else a forward for a sample.
    """

    key: str
    spec: JobSpec
    config: dict[str, Any]
    sharded: bool
    size: tuple[int, int]
    frames: int
    training: bool = True

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and other.key == self.key


def shape_of(spec: JobSpec, *, sharded: bool, training: bool = True) -> Shape | None:
    """Return the shape of a job's steps or samples; None for samples if it makes none.

    Raises:
        UserError: The model's config is not known, or no image size fits the job.
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
        "guided": not training and any(request.guided for request in requests_of(spec)),
        "references": references(spec, training=training)
        and [
            references(spec, training=training),
            spec.conditioning_resolution,
        ],
        "config": config,
    }
    key = json.dumps(facts, sort_keys=True)
    return Shape(key, spec, config, sharded, size, frames, training)


def _keys(spec: RecipeKeys, *, training: bool) -> set[str]:
    """Return the keys that matter to this job."""
    keys = {*_ALWAYS, *_OF_POLICIES.get(spec.fsdp_auto_wrap_policy, ())}
    if training:
        keys.update(_OF_TRAINING)
        if checkpoints_activations(spec):
            keys |= {"gradient_checkpointing_policy", "gradient_checkpointing_interval"}
            keys |= {"gradient_checkpointing", "fsdp_activation_checkpointing"}
    if spec.model_type == "lora":
        keys.update(_OF_LORA)
        if own_policy(spec):  # it is asked without what is not sharded
            keys.add("lora_placement")
    return keys


# -- model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name: Its name in the adapted model.
        shape: Its shape.
        stored: Bytes of one number as a rank holds it.
        gathered: Bytes of one number while its unit computes.
        trained: Whether it is trained.
        lora: Whether it is the adapter's.
        fp32: Whether full training computes with it in fp32, so that it stays whole on every rank.
        unused: Whether it gets no gradient although it is trained.
        per_element: Weights of the model that one of its numbers stands for, where it is packed.
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

    @cached_property
    def numel(self) -> int:
        """Numbers in it."""
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True)
class Unit:
    """What is gathered together.

    Attributes:
        name: Of the module; the root's is empty.
        weights: Its parameters, but for those of units inside of it.
    """

    name: str
    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class Built:
    """A model, and what it is made of.

    Attributes:
        model: On the meta device, with adapters; buffers are real.
        family: Its family.
        units: In the order of registration, the root last.
        blocks: Names of the modules that are repeated, none inside of another.
        buffers: Bytes of all buffers, a training adapter's among them.
    """

    model: torch.nn.Module
    family: Family
    units: tuple[Unit, ...]
    blocks: tuple[str, ...]
    buffers: int


def build(shape: Shape) -> Built:
    """Build the model of a job without weights.

    Raises:
        UserError: The config describes no model, or the job's settings do not fit it.
    """
    spec = shape.spec
    family = families.load(spec.model_family, spec.model_flavour, _root(shape), spec.fps)
    model_class = family.transformer_class()
    try:
        with parameters_on_meta():
            model = model_class.from_config(shape.config)
    except Exception as error:  # whatever a constructor makes of numbers that do not fit
        words = " ".join(str(error).split())[:300]
        raise UserError(
            f"{model_class.__name__} cannot be built from its config "
            f"({type(error).__name__}: {words})",
            "check the model's config.json",
        ) from error
    in_fp32 = {id(parameter) for parameter in trained_in_fp32(model)}
    fp32 = {name for name, p in model.named_parameters() if id(p) in in_fp32}
    _set_precision(model, shape, fp32)
    quantize_layers(model, spec, family, _published(shape, family))
    # `auto` is settled by the GPUs, which need not be here: it is counted as what all of them can.
    set_scaled(model, scaled=spec.base_matmul == "scaled")
    # No CPU has a GPU's kernels; they keep what the kernel keeps that torch chooses here.
    if spec.attention_backend not in GPU_KERNELS:
        choose_attention(model, spec)
    if spec.model_type == "lora":
        lora.add_lora(model, spec, family.lora_targets(spec))
        fp32 = {name.replace(".base_layer.", ".") for name in fp32}
    if shape.training:
        add_training_adapter(model, spec, family, torch.device("meta"))
    if shape.training and computes_alone(spec, sharded=shape.sharded):
        narrow_inputs(model, compute_dtype(spec))
    units, blocks = _units(model, shape, fp32)
    buffers = sum(rounded(buffer.numel() * buffer.element_size()) for buffer in model.buffers())
    return Built(model, family, units, blocks, buffers)


def on_fake(built: Built, shape: Shape) -> None:
    """Replace parameters and buffers by fake ones, as gathered; under a `FakeTensorMode`."""
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
    """Return the model's directory; None where only its published config is known."""
    try:
        return find_model(shape.spec.pretrained_model_name_or_path)
    except UserError:
        return None


def _published(shape: Shape, family: Family) -> dict[str, StoredTensor] | None:
    """Where the model's tensors are, some of them packed; None where that is not known."""
    root = _root(shape)
    if root is None or base_precision(shape.spec) == "none":
        return None
    try:
        return join_packed(stored_tensors(root / family.component))
    except UserError:  # which a rank says
        return None


def _set_precision(model: torch.nn.Module, shape: Shape, fp32: set[str]) -> None:
    """As `engine.model.files.weights.build_on_meta` does."""
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
    of_parameter = {
        parameter: _weight(name, parameter, shape, fp32, packed.get(id(parameter), 1))
        for name, parameter in model.named_parameters()
    }
    taken: set[torch.nn.Parameter] = set()
    unit_of = {}
    for module in [*chosen, model]:  # inner ones first
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

    classes = {block for family in FAMILIES.values() for block in family.blocks}
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
