"""Add LoRA and LoKr through peft, inside the blocks, so that FSDP and saving see them."""

from __future__ import annotations

import hashlib
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine.model.adapters.lokr_layer import LokrModel
from engine.model.adapters.lora_layer import LoraConv2d, LoraLinear, narrow_together
from engine.model.files.weights import local_part, rows_of
from engine.model.precision import compute_dtype
from jobs.errors import UserError
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.lora import LoraKeys
    from jobs.spec.keys.training import TrainingKeys
    from jobs.spec.values.value_types import LoraInit

ADAPTER = "default"
WHOLE: Final = 1_000_000
"""A rank above which LoKr never factorizes a factor into two."""
_MAGNITUDE: Final = ".lora_magnitude_vector."
_PARTS: Final = (".lora_A.", ".lora_B.", _MAGNITUDE, ".lokr_w")
_ZERO: Final = re.compile(r"\.(lora_B|lokr_w2|lokr_w2_b)(\.|$)")
_PATTERN: Final = re.compile(r"[*+?|(\[\\]")  # module names contain none of these characters


def add_lora(model: torch.nn.Module, spec: RecipeKeys, targets: str, without: str = "") -> None:
    """Add an adapter to a model, on the device of its base weights (which may be meta).

    Layers that the loss does not depend on get none: it would train nothing, and take optimizer
    state, weight decay and a place in the export. A loader takes a layer without an adapter as the
    base's, which is what one of zeros is.

    Args:
        model: A diffusers model.
        spec: The job.
        targets: Regular expression of module names, unless the job sets its own.
        without: `Family.without_gradient` of the model and the job.

    Raises:
        UserError: No module matches the targets.
    """
    model.requires_grad_(False)
    lokr = spec.lora_variant == "lokr"
    config = _lokr_config(spec, targets) if lokr else _config(spec, targets)
    _exclude(config, unused_layers(model, without))
    try:
        if isinstance(config, LoKrConfig):
            with torch.device(next(model.parameters()).device):
                LokrModel(model, config, ADAPTER)
        else:
            _add(model, config, spec)
    except (ValueError, TypeError) as error:  # for LoKr, an unsupported type of layer
        raise UserError(f"lora_target_modules: {error}") from None
    _make_masters(model)
    selective = checkpoints_activations(spec) and spec.gradient_checkpointing_policy == "selective"
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.keeps = selective
    if compute_dtype(spec) is not torch.float32 and spec.lora_variant != "lokr":
        narrow_together(model, compute_dtype(spec))


def add_text_lora(encoder: torch.nn.Module, spec: RecipeKeys, targets: Sequence[str]) -> None:
    """Add an adapter to a text encoder that is already frozen.

    Args:
        encoder: A transformers model.
        spec: The job.
        targets: Suffixes of module names.
    """
    _add(encoder, text_config(spec, targets), spec, inject=True)
    _make_masters(encoder)
    if compute_dtype(spec) is not torch.float32:
        narrow_together(encoder, compute_dtype(spec))


def text_config(spec: LoraKeys, targets: Sequence[str]) -> LoraConfig:
    """Return peft's config of the text encoders' adapter, with the same scale as the denoiser's."""
    rank = spec.text_encoder_lora_rank
    scale = (spec.lora_alpha or spec.lora_rank) / spec.lora_rank
    return LoraConfig(
        r=rank,
        lora_alpha=rank * scale,  # peft only divides it
        lora_dropout=spec.lora_dropout,
        target_modules=list(targets),
        init_lora_weights=False,
    )


def _make_masters(model: torch.nn.Module) -> None:
    """Convert adapters to fp32, since peft creates them in the base's precision."""
    for name, parameter in list(lora_parameters(model).items()):
        owner, _, leaf = name.rpartition(".")
        master = torch.nn.Parameter(parameter.detach().float(), requires_grad=True)
        setattr(model.get_submodule(owner), leaf, master)


def _add(
    model: torch.nn.Module, config: LoraConfig, spec: TrainingKeys, *, inject: bool = False
) -> None:
    """Add peft's layers to the model, or our replacements of them.

    Args:
        model: The model.
        config: The adapter.
        spec: The job.
        inject: Whether to bypass the model's `add_adapter`, which means something else in
            transformers.
    """
    # Keep peft's layers for Inductor, which fuses them together with autocast's casts.
    if not spec.torch_compile:
        config._register_custom_module(
            {
                torch.nn.Linear: LoraLinear,
                torch.nn.Conv2d: LoraConv2d,
            }
        )
    if hasattr(model, "add_adapter") and not inject:
        model.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    else:  # a model without diffusers' mixin (PixArt's); the modules are the same
        inject_adapter_in_model(config, model, ADAPTER)


def _config(spec: LoraKeys, targets: str) -> LoraConfig:
    """Build peft's config of the job's adapter.

    A layer's alpha defaults to its rank.
    """
    ranks = {pattern: int(rank) for pattern, rank in (spec.lora_rank_pattern or {}).items()}
    alphas: dict[str, float] = {} if spec.lora_alpha else dict(ranks)
    return LoraConfig(
        r=spec.lora_rank,
        lora_alpha=spec.lora_alpha or spec.lora_rank,
        rank_pattern=ranks,
        alpha_pattern=alphas | (spec.lora_alpha_pattern or {}),
        lora_dropout=spec.lora_dropout,
        target_modules=_modules(spec.lora_target_modules) or targets,
        exclude_modules=_modules(spec.lora_exclude_modules),
        use_rslora=spec.lora_variant == "rslora",
        use_dora=spec.lora_variant == "dora",
        init_lora_weights=False,  # `initialise` does it, identically on every rank
    )


def _lokr_config(spec: LoraKeys, targets: str) -> LoKrConfig:
    """Build peft's config of a LoKr; its second factor is split if the rank is below half of it."""
    ranks = {pattern: int(rank) for pattern, rank in (spec.lora_rank_pattern or {}).items()}
    alphas = {} if spec.lora_alpha else ranks
    rank = spec.lora_rank
    alpha: Any = spec.lora_alpha or spec.lora_rank  # peft's type is int, but it only divides
    if spec.lokr_full_matrix:
        rank, alpha, ranks, alphas = WHOLE, WHOLE, {}, {}
    return LoKrConfig(
        r=rank,
        alpha=alpha,
        rank_pattern=ranks,
        alpha_pattern=alphas | ({} if spec.lokr_full_matrix else spec.lora_alpha_pattern or {}),
        decompose_factor=spec.lokr_factor,
        target_modules=_modules(spec.lora_target_modules) or targets,
        exclude_modules=_modules(spec.lora_exclude_modules),
        init_weights=False,  # `initialise` does it, identically on every rank
    )


def unused_layers(model: torch.nn.Module, without: str) -> dict[str, torch.nn.Module]:
    """Return name → layer without an adapter that the loss does not depend on; no norms.

    Args:
        model: A model, adapted or not.
        without: As of `add_lora`.
    """
    if not without:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and weight.dim() > 1
        and not name.endswith(".base_layer")
        and not isinstance(module, BaseTunerLayer)
        and re.search(without, f"{name}.weight")
    }


def _exclude(config: LoraConfig | LoKrConfig, names: Collection[str]) -> None:
    """Exclude layers from an adapter, beside those that its job excludes."""
    targets, excluded = config.target_modules, config.exclude_modules
    adapted = {name for name in names if _is_among(name, targets)}
    if not adapted:  # peft warns of what it need not exclude
        return
    if isinstance(excluded, str):
        config.exclude_modules = "|".join([f"(?:{excluded})", *map(re.escape, sorted(adapted))])
    else:
        config.exclude_modules = {*(excluded or ()), *adapted}


def _is_among(name: str, targets: Any) -> bool:
    """Return whether peft (0.21) takes a module for a target."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def _modules(names: list[str] | None) -> list[str] | str | None:
    """Return suffixes as peft takes them, or one regex if any of them is a regex."""
    if not names or not any(_PATTERN.search(name) for name in names):
        return names
    each = [n if _PATTERN.search(n) else rf"(?:.*\.)?{re.escape(n)}" for n in names]
    return "|".join(f"(?:{pattern})" for pattern in each)


def lora_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return all parameters of the adapter by name."""
    return {name: parameter for name, parameter in model.named_parameters() if is_lora(name)}


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Compute with the base alone inside this context, on every layer that has an adapter.

    Peft's own switch also turns off the gradients of the adapter's parameters, which FSDP and the
    averaging of gradients rely on; the layers read this attribute in each forward.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def scales_of(model: torch.nn.Module) -> dict[str, float]:
    """Return the factor of the adapter's product in each adapted module."""
    return {
        name: float(module.scaling[ADAPTER])
        for name, module in model.named_modules()
        if isinstance(module, (LoraLayer, LoKrLayer))
    }


def is_lora(name: str) -> bool:
    """Return whether a tensor of an adapted model belongs to the adapter."""
    return any(part in name for part in _PARTS)


def starts_at_zero(name: str) -> bool:
    """Return whether an adapter's tensor starts at zero, so that it has no effect at first."""
    return _ZERO.search(name) is not None


def adapted_name(model: torch.nn.Module) -> dict[str, str]:
    """Map each name in the checkpoint to the adapted model (`x.weight` → `x.base_layer.weight`)."""
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return {name.replace(".base_layer.", "."): name for name in names}


@torch.no_grad()
def initialise(model: torch.nn.Module, seed: int, how: LoraInit = "kaiming") -> None:
    """Initialize the adapter with peft's distribution, identically for any number of ranks.

    A is Kaiming-uniform with a = √5, or normal with standard deviation 1 / rank; B is zero (Hu et
    al. 2021, as in `peft`). In LoKr, the last matrix is zero and the others are Kaiming-uniform, as
    in LyCORIS. Each tensor has its own generator, keyed by its name, so that its values depend on
    nothing else. DoRA's magnitudes are the row norms of the loaded weights (Liu et al. 2024), so
    that the adapter has no effect at first; computing them is a collective if the weights are
    sharded.
    """
    for name, parameter in lora_parameters(model).items():
        if _MAGNITUDE in name:
            base = model.get_submodule(f"{name.partition(_MAGNITUDE)[0]}.base_layer")
            fill(parameter, _row_lengths(base.get_parameter("weight")).view(parameter.shape))
            continue
        if starts_at_zero(name):
            local_part(parameter).zero_()
            continue
        key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        whole = torch.empty(parameter.shape, dtype=torch.float32)
        if how == "gaussian":
            torch.nn.init.normal_(whole, std=1 / len(whole), generator=generator)
        else:
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        fill(parameter, whole)


def fill(parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
    """Set a parameter, or this rank's rows of it, to a tensor that every rank has."""
    mine = whole[rows_of(parameter)] if isinstance(parameter, DTensor) else whole
    local_part(parameter).copy_(mine)


def _row_lengths(weight: torch.Tensor) -> torch.Tensor:
    """Return the norm of each output's weights, `(out,)` in fp32, on every rank."""
    mine = local_part(weight)
    dims = tuple(range(1, mine.dim()))
    lengths = torch.linalg.vector_norm(mine, dim=dims, dtype=torch.float32)
    if not isinstance(weight, DTensor):
        return lengths
    mesh = weight.device_mesh  # on the gathering device, even if weights are in host memory
    spread = DTensor.from_local(
        lengths.to(mesh.device_type),
        mesh,
        weight.placements,
        shape=torch.Size(weight.shape[:1]),
        stride=(1,),
    )
    return spread.full_tensor().to(mine.device)


def check_whole(model: torch.nn.Module) -> None:
    """Reject DoRA if FSDP gathers a layer's weights separately from its adapter.

    Raises:
        UserError: It does, and computing row norms needs both at once.
    """
    for name, module in model.named_modules():
        if name.endswith(".base_layer") and isinstance(module, FSDPModule):
            raise UserError(
                f"lora_variant: dora needs {name.removesuffix('.base_layer')} and its adapter in "
                "one FSDP unit",
                "use fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, or raise fsdp_min_num_params",
            )
