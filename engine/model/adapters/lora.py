"""LoRA and LoKr through peft, inside the blocks, so that sharding and saving see them."""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any, Final

import torch
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine.model.adapters.lokr_layer import LokrModel
from engine.model.adapters.lora_layer import LoraConv2d, LoraLinear, narrow_together
from engine.model.files.weights import local_part, rows_of
from engine.model.precision import compute_dtype
from jobs.errors import UserError
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.lora import LoraKeys
    from jobs.spec.keys.training import TrainingKeys
    from jobs.spec.values.value_types import LoraInit

ADAPTER = "default"
WHOLE: Final = 1_000_000
"""A rank beyond which no factor of LoKr is parted into two."""
_MAGNITUDE: Final = ".lora_magnitude_vector."
_PARTS: Final = (".lora_A.", ".lora_B.", _MAGNITUDE, ".lokr_w")
_ZERO: Final = re.compile(r"\.(lora_B|lokr_w2|lokr_w2_b)(\.|$)")
_PATTERN: Final = re.compile(r"[*+?|(\[\\]")  # no name of a module has one of these


def add_lora(model: torch.nn.Module, spec: RecipeKeys, targets: str) -> None:
    """Put an adapter into the model, on whatever device its base weights are (meta: also fine).

    Args:
        model: A diffusers model.
        spec: The job.
        targets: Regular expression of module names, unless the job names its own.

    Raises:
        UserError: No module fits the targets.
    """
    model.requires_grad_(False)
    try:
        if spec.lora_variant == "lokr":
            with torch.device(next(model.parameters()).device):
                LokrModel(model, _lokr_config(spec, targets), ADAPTER)
        else:
            _add(model, _config(spec, targets), spec)
    except (ValueError, TypeError) as error:  # of LoKr, a layer of a kind that it is not for
        raise UserError(f"lora_target_modules: {error}") from None
    _make_masters(model)
    selective = checkpoints_activations(spec) and spec.gradient_checkpointing_policy == "selective"
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.keeps = selective
    if compute_dtype(spec) is not torch.float32 and spec.lora_variant != "lokr":
        narrow_together(model, compute_dtype(spec))


def add_text_lora(encoder: torch.nn.Module, spec: RecipeKeys, targets: Sequence[str]) -> None:
    """Put an adapter into a text encoder, which is frozen already.

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
    """Return the text encoders' adapter as peft describes it; its scale is the denoiser's."""
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
    """Peft makes adapters in the base's precision; what is trained is kept in fp32."""
    for name, parameter in list(lora_parameters(model).items()):
        owner, _, leaf = name.rpartition(".")
        master = torch.nn.Parameter(parameter.detach().float(), requires_grad=True)
        setattr(model.get_submodule(owner), leaf, master)


def _add(
    model: torch.nn.Module, config: LoraConfig, spec: TrainingKeys, *, inject: bool = False
) -> None:
    """Put peft's layers into the model, or ours in their place.

    Args:
        model: The model.
        config: The adapter.
        spec: The job.
        inject: Not by the model's own function, which transformers has too, for other purposes.
    """
    # Inductor fuses peft's own, and autocast's casts with them.
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
        init_lora_weights=False,  # `initialise` does it, alike on every rank
    )


def _lokr_config(spec: LoraKeys, targets: str) -> LoKrConfig:
    """Build peft's config of a LoKr; its second factor is split if the rank is below half of it."""
    ranks = {pattern: int(rank) for pattern, rank in (spec.lora_rank_pattern or {}).items()}
    alphas = {} if spec.lora_alpha else ranks
    rank = spec.lora_rank
    alpha: Any = spec.lora_alpha or spec.lora_rank  # peft wants an int, and only divides it
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
        init_weights=False,  # `initialise` does it, alike on every rank
    )


def _modules(names: list[str] | None) -> list[str] | str | None:
    """Suffixes as peft takes them; with regular expressions among them, one for all."""
    if not names or not any(_PATTERN.search(name) for name in names):
        return names
    each = [n if _PATTERN.search(n) else rf"(?:.*\.)?{re.escape(n)}" for n in names]
    return "|".join(f"(?:{pattern})" for pattern in each)


def lora_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name → parameter of everything the adapter adds."""
    return {name: parameter for name, parameter in model.named_parameters() if is_lora(name)}


def scales_of(model: torch.nn.Module) -> dict[str, float]:
    """Adapted module → what its adapter's product is multiplied by."""
    return {
        name: float(module.scaling[ADAPTER])
        for name, module in model.named_modules()
        if isinstance(module, (LoraLayer, LoKrLayer))
    }


def is_lora(name: str) -> bool:
    """Whether a tensor of an adapted model is the adapter's."""
    return any(part in name for part in _PARTS)


def begins_at_zero(name: str) -> bool:
    """Whether a tensor of an adapter is zero at first, so that it has no effect."""
    return _ZERO.search(name) is not None


def adapted_name(model: torch.nn.Module) -> dict[str, str]:
    """Name in the checkpoint → name in the adapted model (`x.weight` → `x.base_layer.weight`)."""
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return {name.replace(".base_layer.", "."): name for name in names}


@torch.no_grad()
def initialise(model: torch.nn.Module, seed: int, how: LoraInit = "kaiming") -> None:
    """Draw the adapter's first weights: peft's distribution, the same on any number of ranks.

    A is Kaiming-uniform with a = √5, or normal with deviation 1 / rank; B is zero (Hu et al. 2021,
    as in `peft`). Of LoKr, the last matrix is zero and the others are Kaiming-uniform, as in
    LyCORIS. Each tensor has a generator of its own, keyed by its name, so that the draw
    depends on nothing else. DoRA's magnitudes are the lengths of the rows that were loaded (Liu et
    al. 2024), so that the adapter has no effect at first; a collective where these are sharded.
    """
    for name, parameter in lora_parameters(model).items():
        if _MAGNITUDE in name:
            base = model.get_submodule(f"{name.partition(_MAGNITUDE)[0]}.base_layer")
            fill(parameter, _row_lengths(base.get_parameter("weight")).view(parameter.shape))
            continue
        if begins_at_zero(name):
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
    mesh = weight.device_mesh  # of the device that gathers, also where weights are in host memory
    spread = DTensor.from_local(
        lengths.to(mesh.device_type),
        mesh,
        weight.placements,
        shape=torch.Size(weight.shape[:1]),
        stride=(1,),
    )
    return spread.full_tensor().to(mine.device)


def check_whole(model: torch.nn.Module) -> None:
    """Refuse DoRA where FSDP gathers a layer's weights apart from its adapter.

    Raises:
        UserError: It does, and the lengths of rows need both at once.
    """
    for name, module in model.named_modules():
        if name.endswith(".base_layer") and isinstance(module, FSDPModule):
            raise UserError(
                f"lora_variant: dora needs {name.removesuffix('.base_layer')} and its adapter in "
                "one FSDP unit",
                "use fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, or raise fsdp_min_num_params",
            )
