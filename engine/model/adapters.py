"""LoRA through peft, inside the blocks, so that sharding and saving see it."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.tensor import DTensor

from engine.model.lora_layer import LoraConv2d, LoraLinear, narrow_together
from engine.model.precision import compute_dtype
from engine.model.weights import local_part, rows_of
from jobs.errors import UserError
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.values.value_types import LoraInit

ADAPTER = "default"


def add_lora(model: torch.nn.Module, spec: JobSpec, targets: str) -> None:
    """Put an adapter into the model, on whatever device its base weights are (meta: also fine).

    Args:
        model: A diffusers model.
        spec: The job.
        targets: Regular expression of module names, unless the job names its own.

    Raises:
        UserError: No module fits the targets.
    """
    config = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=spec.lora_alpha or spec.lora_rank,
        lora_dropout=spec.lora_dropout,
        target_modules=spec.lora_target_modules or targets,
        init_lora_weights=False,  # `initialise` does it, alike on every rank
    )
    # Inductor fuses peft's own, and autocast's casts with them.
    if not spec.torch_compile:
        config._register_custom_module({
            torch.nn.Linear: LoraLinear, torch.nn.Conv2d: LoraConv2d,
        })  # fmt: skip
    model.requires_grad_(False)
    try:
        if hasattr(model, "add_adapter"):
            model.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
        else:  # a model without diffusers' mixin (PixArt's); the modules are the same
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise UserError(f"lora_target_modules: {error}") from None
    # Peft makes adapters in the base's precision; what is trained is kept in fp32.
    for name, parameter in list(lora_parameters(model).items()):
        owner, _, leaf = name.rpartition(".")
        master = torch.nn.Parameter(parameter.detach().float(), requires_grad=True)
        setattr(model.get_submodule(owner), leaf, master)
    selective = checkpoints_activations(spec) and spec.gradient_checkpointing_policy == "selective"
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.keeps = selective
    if compute_dtype(spec) is not torch.float32:
        narrow_together(model, compute_dtype(spec))


def lora_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name → parameter of everything the adapter adds."""
    return {name: parameter for name, parameter in model.named_parameters() if is_lora(name)}


def is_lora(name: str) -> bool:
    """Whether a tensor of an adapted model is the adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def adapted_name(model: torch.nn.Module) -> dict[str, str]:
    """Name in the checkpoint → name in the adapted model (`x.weight` → `x.base_layer.weight`)."""
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return {name.replace(".base_layer.", "."): name for name in names}


@torch.no_grad()
def initialise(model: torch.nn.Module, seed: int, how: LoraInit = "kaiming") -> None:
    """Draw the adapter's first weights: peft's distribution, the same on any number of ranks.

    A is Kaiming-uniform with a = √5, or normal with deviation 1 / rank; B is zero (Hu et al. 2021,
    as in `peft`). Each tensor has a generator of its own, keyed by its name, so that the draw
    depends on nothing else.
    """
    for name, parameter in lora_parameters(model).items():
        if ".lora_B." in name:
            local_part(parameter).zero_()
            continue
        key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        whole = torch.empty(parameter.shape, dtype=torch.float32)
        if how == "gaussian":
            torch.nn.init.normal_(whole, std=1 / len(whole), generator=generator)
        else:
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        mine = whole[rows_of(parameter)] if isinstance(parameter, DTensor) else whole
        local_part(parameter).copy_(mine)
