"""A training adapter of the toy, as published ones lie on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.diffusion.random_numbers import keyed_generator

if TYPE_CHECKING:
    from pathlib import Path

RANK: Final = 3
ALPHA: Final = 1.5


def write_training_adapter(toy: Path) -> Path:
    """Write a LoRA of all attention and of a layer outside of the blocks, once; its file.

    It is strong enough for every loss to differ.
    """
    file = toy / "training-adapter.safetensors"
    if file.exists():
        return file
    stored = toy / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(stored, framework="pt") as weights:
        for number, name in enumerate(sorted(weights.keys())):
            module = name.removesuffix(".weight")
            if not name.endswith((".to_q.weight", ".to_v.weight", "context_embedder.weight")):
                continue
            out, width = weights.get_slice(name).get_shape()
            draw = keyed_generator(number)
            key = f"diffusion_model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, width, generator=draw)
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) / 10
            tensors[f"{key}.alpha"] = torch.tensor(ALPHA)
    # Ranks that start at once must not read half a file.
    part = file.with_suffix(".part")
    save_file(tensors, part)
    part.rename(file)
    return file


def merge_training_adapter(model: Path, adapter: Path) -> None:
    """Add an adapter to the weights of a model on the disk."""
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights, tensors = load_file(file), load_file(adapter)
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        product = tensors[f"{module}.lora_B.weight"] @ tensors[key]
        name = module.removeprefix("diffusion_model.") + ".weight"
        weights[name] = weights[name] + (ALPHA / RANK) * product
    save_file(weights, file, {"format": "pt"})
