"""A frozen LoRA that takes part in training alone, such as one that undoes a base's distillation.

It stays beside the weights that it changes and is never merged into them: so it is exact in every
precision and on a packed base, and what is sampled without it is what the base by itself makes. Its
matrices are buffers, and not saved: nothing that is trained, sharded, averaged, checkpointed or
exported sees them. Every rank has them whole.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from engine.model.adapters import lora
from engine.model.adapters.training_adapter_file import read_training_adapter
from engine.model.precision import compute_dtype
from jobs.errors import UserError
from jobs.models.find_lora import find_lora

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.families import Family
    from jobs.spec.job_spec import RecipeKeys

_NAME = "training_adapter"


class TrainingAdapter(torch.nn.Module):
    """What is added to a layer's output.

    Attributes:
        down: `(rank, in)`, frozen.
        up: `(out, rank)`, frozen; the scale is part of it.
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

        The sum is made in a copy, in place: what selective checkpointing keeps of matrix products
        is their results, and would else be this too.
        """
        dtype = out.dtype
        low = functional.linear(x.to(dtype), self.down.to(dtype)).to(dtype)  # (…, rank)
        total = out.flatten(0, -2).clone()
        return total.addmm_(low.flatten(0, -2), self.up.to(dtype).t()).view(out.shape)


def add_training_adapter(
    model: torch.nn.Module, spec: RecipeKeys, family: Family, device: torch.device
) -> str:
    """Add the job's training adapter, if it names one; every rank reads all of the file.

    Args:
        model: With the adapter that is trained; sharded or not.
        spec: The job.
        family: Its family.
        device: Where the model computes; meta: only sizes matter.

    Returns:
        A line for the log; "" where the job names none.

    Raises:
        UserError: There is none, or it is not one of this model.
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
    """Within, a model computes as without its training adapter, if it has one."""
    present = [module for module in model.modules() if isinstance(module, TrainingAdapter)]
    for adapter in present:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in present:
            adapter.enabled = True


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Name in the checkpoint → linear layer, without those of the adapter that is trained."""
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not lora.is_lora(f"{name}.")
    }


def _add(layer: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    """Return a hook after the forward of a layer, or of what wraps it with the trained adapter."""
    adapter: TrainingAdapter = layer.training_adapter
    return adapter(args[0], out) if adapter.enabled else out
