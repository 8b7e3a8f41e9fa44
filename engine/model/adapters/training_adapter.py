"""A frozen LoRA that is active only in training, such as one that undoes a base's distillation.

It is applied next to the weights and never merged into them. It is therefore exact in every
precision and on a quantized base, and samples without it equal those of the base alone. Its
matrices are non-persistent buffers, so training, sharding, averaging, checkpoints and exports do
not see them. They are replicated on every rank.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from engine.model.adapters import lora, lora_file
from engine.model.precision import compute_dtype
from jobs.errors import UserError
from jobs.models.find_model import find_lora

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.families import Family
    from engine.families.shared.lora_names import LoraStyle
    from jobs.spec.job_spec import RecipeKeys


# -- training adapter file ------------------------------------------------------------------
# Read the file of a training adapter: a LoRA of any rank, which stays frozen.


def read_training_adapter(
    file: Path, linears: Mapping[str, torch.nn.Linear], family: Family
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Read the adapters of a file, of any rank, for any of a model's linear layers.

    Args:
        file: A safetensors file.
        linears: All linear layers of the model by name.
        family: The model's family.

    Yields:
        A layer's name, and its down `(rank, in)` and up `(out, rank)` in fp32, whose product is
        added to the layer's weight.

    Raises:
        UserError: The file is not a LoRA, or does not match these layers.
    """
    layers: dict[str, lora_file.Layer] = {}
    first = 1
    for name, linear in linears.items():
        down, up = torch.empty(0, linear.in_features), torch.empty(linear.out_features, 0)
        layers[name] = lora_file.Layer({"down": down, "up": up}, 1.0, first)  # type: ignore[dict-item]
        first += linear.out_features
    try:
        stored, header = lora_file.read_lora(file)
        scale_of = lora_file.scales_in(file, header, stored, family)
        yield from _products(file, stored, layers, family, scale_of)
    except UserError as error:
        raise UserError(
            f"training_adapter: cannot use {error.message.removeprefix(lora_file.CANNOT)}"
        ) from None


def _products(
    file: Path,
    stored: Mapping[str, dict[str, torch.Tensor]],
    layers: Mapping[str, lora_file.Layer],
    family: Family,
    scale_of: Any,
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield name, down and scaled up of each layer that a file adapts.

    Raises:
        UserError: A module of the file matches no layer, is not a plain LoRA, or has another size.
    """
    named = any_naming(stored, layers, family)
    for key, tensors in stored.items():
        if key not in named:
            raise lora_file.refusal(file, f"it adapts {key}, which the model does not have")
        if tensors.keys() - {"alpha"} != {"down", "up"}:
            raise lora_file.refusal(file, f"{key} is no plain LoRA")
        for name, part in lora_file.parted(file, key, tensors, named[key], layers):
            down, up = part["down"].float(), part["up"].float()
            if (down.shape[1:], up.shape[1:]) != (
                layers[name].parts["down"].shape[1:],
                (len(down),),
            ):
                raise lora_file.refusal(file, f"{name} has another size than the model's layer")
            if not (down.isfinite().all() and up.isfinite().all()):
                raise lora_file.refusal(file, f"{name} has values that are not finite")
            scale = float(tensors.get("alpha", torch.nan)) / len(down)
            yield name, (down, up * (scale_of(name, len(down)) if math.isnan(scale) else scale))


def any_naming(
    stored: Mapping[str, Any], layers: Mapping[str, lora_file.Layer], family: Family | None
) -> dict[str, torch.Tensor]:
    """Return `naming`, but allow other tools to lack names for some of the layers."""
    candidates = [layers]
    for style in (family.KOHYA, family.COMFYUI) if family is not None else ():
        if style is not None:
            candidates.append({n: a for n, a in layers.items() if _has_name(style, n, a)})
    ways = [lora_file.naming(stored, some, family) for some in candidates]
    return max(ways, key=lambda way: len(way.keys() & stored.keys()))


def _has_name(style: LoraStyle, name: str, layer: lora_file.Layer) -> bool:
    down, up = torch.zeros(1, *layer.parts["down"].shape[1:]), torch.zeros(layer.outputs, 1)
    try:
        style.convert({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up})
    except UserError:
        return False
    return True


# -- training adapter -----------------------------------------------------------------------


_NAME = "training_adapter"


class TrainingAdapter(torch.nn.Module):
    """An adapter's contribution to a layer's output.

    Attributes:
        down: `(rank, in)`, frozen.
        up: `(out, rank)`, frozen, with the scale multiplied into it.
        enabled: Whether it has an effect.
    """

    down: torch.Tensor
    up: torch.Tensor

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)
        self.enabled = True

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the adapter's product of `x (…, in)` to `out (…, out)`; nothing is kept for backward.

        The sum is computed in place in a copy: selective checkpointing keeps the results of matrix
        multiplications, and would otherwise keep this one too.
        """
        dtype = out.dtype
        low = functional.linear(x.to(dtype), self.down.to(dtype)).to(dtype)  # (…, rank)
        total = out.flatten(0, -2).clone()
        return total.addmm_(low.flatten(0, -2), self.up.to(dtype).t()).view(out.shape)


def add_training_adapter(
    model: torch.nn.Module, spec: RecipeKeys, family: Family, device: torch.device
) -> str:
    """Add the job's training adapter, if it sets one; every rank reads the full file.

    Args:
        model: With the adapter that is trained; sharded or not.
        spec: The job.
        family: Its family.
        device: The device that the model computes on; with meta, only sizes matter.

    Returns:
        A line for the log; "" if the job sets none.

    Raises:
        UserError: The file does not exist, or does not match this model.
    """
    if spec.model_type != "lora" or not spec.training_adapter:
        return ""
    file = find_lora(spec.training_adapter)
    if file is None:
        raise UserError(f"training_adapter: there is no LoRA at {spec.training_adapter}")
    linears = _linear_layers(model)
    count = size = 0
    for name, (down, up) in read_training_adapter(file, linears, family):
        base = linears[name].weight.dtype
        dtype = base if base.is_floating_point else compute_dtype(spec)
        layer = model.get_submodule(name)
        adapter = TrainingAdapter(down.to(device, dtype), up.to(device, dtype))
        layer.add_module(_NAME, adapter)
        layer.register_forward_hook(_add)
        count += 1
        size += sum(buffer.numel() * buffer.element_size() for buffer in adapter.buffers())
    return (
        f"{count} layers have the training adapter of {file} ({size / 2**20:.1f} MiB) "
        "while they are trained; samples are made without it"
    )


@contextmanager
def without_training_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Disable a model's training adapter, if it has one, inside this context."""
    present = [module for module in model.modules() if isinstance(module, TrainingAdapter)]
    for adapter in present:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in present:
            adapter.enabled = True


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return linear layers by name in the checkpoint, without those of the trained adapter."""
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not lora.is_lora(f"{name}.")
    }


def _add(layer: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    """Add the training adapter's output, as a forward hook of a layer or its LoRA wrapper."""
    adapter: TrainingAdapter = layer.training_adapter
    return adapter(args[0], out) if adapter.enabled else out
