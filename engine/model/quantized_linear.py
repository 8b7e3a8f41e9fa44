"""A frozen linear layer whose weight is packed in 8 or 4 bits, and unpacked while it computes.

It holds plain parameters, so FSDP2 shards and gathers the packed bytes, and everything else that
works on parameters works on these too: HSDP, offload, DDP, checkpointing, compile. Tensor
subclasses (torchao 0.18) do not: uneven shards, a shard group of one rank, resharding to a number
and compile fail with one or the other.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from engine.model.packing import Packing, packing_of
from engine.model.precision import compute_dtype
from jobs.errors import UserError
from jobs.spec.rules.lora_conflicts import modulation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.families import Family
    from engine.model.files.weight_files import StoredTensor
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.lora import LoraKeys
    from jobs.spec.values.value_types import BasePrecision


class QuantizedLinear(torch.nn.Linear):
    """A linear layer with a packed weight.

    Attributes:
        packing: How its weight is packed.
        weight: `uint8`, `(out, in)` or, of nf4, `(out, in / 2)`; frozen.
        weight_scale: fp32, `(out, 1)` or, of nf4, `(out, in / 64)`; None of plain fp8.
        codes: What a byte of nf4 stands for; not saved.
    """

    weight_scale: torch.nn.Parameter | None
    codes: torch.Tensor | None

    def __init__(self, like: torch.nn.Linear, packing: Packing, dtype: torch.dtype) -> None:
        """Take the place of a layer whose weights are not loaded.

        Args:
            like: The layer; its bias is used on.
            packing: How to pack its weight.
            dtype: The precision that computes.
        """
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.packing = packing
        weight, scale = packing.shapes(self.out_features, self.in_features)
        device = like.weight.device
        # The first: diffusers takes the dtype of the first parameter for the one that computes.
        self.bias = like.bias
        self.weight = _frozen(torch.empty(weight, dtype=torch.uint8, device=device))
        self.weight_scale = scale and _frozen(torch.empty(scale, device=device))
        self.register_buffer("codes", packing.code_table(dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, in)` → `(…, out)`."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        bias = self.bias if self.bias is None else self.bias.to(dtype)
        out: torch.Tensor = _Product.apply(
            x.to(dtype), self.weight, self.weight_scale, self.codes, bias, self.packing
        )
        return out

    def extra_repr(self) -> str:
        """Describe the layer for `print`."""
        return f"{super().extra_repr()}, weight in {self.packing.scheme}"


class _Product(torch.autograd.Function):
    """`x Wᵀ + bias` with a frozen, packed W, of which only the packed bytes are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor | None,
        codes: torch.Tensor | None,
        bias: torch.Tensor | None,
        packing: Packing,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scale, codes)
        ctx.packing = packing
        return packing.product(x, packed, scale, codes, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        packed, scale, codes = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ ctx.packing.unpack(packed, scale, codes, gradient.dtype, gradient)
        return of_x, None, None, None, None, None


def base_precision(spec: RecipeKeys) -> BasePrecision:
    """Return how a job's base is packed; `none` for full training."""
    return spec.base_precision if spec.model_type == "lora" else "none"


def quantize_layers(
    model: torch.nn.Module,
    spec: RecipeKeys,
    family: Family,
    stored: Mapping[str, StoredTensor] | None = None,
) -> str:
    """Replace the linear layers of the model's blocks whose weights `base_precision` packs.

    Done before the adapter is added and before anything is loaded.

    Args:
        model: Frozen, on the meta device.
        spec: The job.
        family: Its family, whose modulation layers have a precision of their own unless the job
            names layers that stay as they are.
        stored: Where its tensors are, if that is known: what is packed there stays so, and
            nothing else is packed then.

    Returns:
        A line for the log; "" where the job packs nothing.

    Raises:
        UserError: No layer is left that could be packed.
    """
    if base_precision(spec) == "none":
        return ""
    packing = Packing(spec.base_precision)
    published = [n.removesuffix(".weight") for n, place in (stored or {}).items() if place.packed]
    if odd := [n for n in published if type(model.get_submodule(n)) is not torch.nn.Linear]:
        raise UserError(
            f"the model's {odd[0]} is published in {spec.base_precision}, and only linear layers "
            "can be packed",
            "use the model's bf16 weights",
        )
    chosen = dict.fromkeys(published, packing) or _chosen(model, spec, family, packing)
    if not chosen:
        raise UserError(
            f"base_precision: {spec.base_precision} quantizes no layer of this model",
            "check keep_in_full_precision, or set base_precision: none",
        )
    return replace_layers(model, chosen, compute_dtype(spec))


def replace_layers(
    model: torch.nn.Module, layers: Mapping[str, Packing], dtype: torch.dtype
) -> str:
    """Replace linear layers by packed ones.

    Args:
        model: On the meta device.
        layers: Name of a layer → how to pack it.
        dtype: The precision that computes.

    Returns:
        A line for the log.
    """
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    for name, packing in layers.items():
        owner, _, leaf = name.rpartition(".")
        layer: Any = model.get_submodule(name)
        setattr(model.get_submodule(owner), leaf, QuantizedLinear(layer, packing, dtype))
    after = sum(p.numel() * p.element_size() for p in model.parameters())
    counts = Counter(packing.scheme for packing in layers.values()).most_common()
    return (
        f"{len(layers)} linear layers of {type(model).__name__} are quantized to "
        f"{' and '.join(f'{scheme} ({count})' for scheme, count in counts)}: it takes "
        f"{after / 2**30:.2f} GiB, not {before / 2**30:.2f}"
    )


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """Name → layer of those that are packed."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def weights_per_element(model: torch.nn.Module) -> dict[int, int]:
    """Map a packed parameter's `id` to the number of weights that an element holds.

    Two of nf4's packed weight, none of a scale. Other parameters are not listed.
    """
    counts: dict[int, int] = {}
    for layer in quantized_layers(model).values():
        counts[id(layer.weight)] = layer.packing.per_byte
        if layer.weight_scale is not None:
            counts[id(layer.weight_scale)] = 0
    return counts


def _chosen(
    model: torch.nn.Module, spec: LoraKeys, family: Family, packing: Packing
) -> dict[str, Packing]:
    """Find the layers to pack, and how: linear, in a repeated block, and not kept as they are."""
    blocks = tuple(f"{n}." for n, m in model.named_modules() if type(m).__name__ in family.blocks)
    own = spec.keep_in_full_precision
    modulation = packing_of(modulation_of(spec))
    in_fp32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    chosen = {}
    for name, module in model.named_modules():
        if own is not None:
            how = None if any(re.search(pattern, name) for pattern in own) else packing
        else:
            how = modulation if re.search(family.MODULATION, name) else packing
        if (
            how is not None
            and type(module) is torch.nn.Linear
            and name.startswith(blocks)
            and how.fits(module.in_features)
            and not any(part in name.split(".") for part in in_fp32)
        ):
            chosen[name] = how
    return chosen


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
