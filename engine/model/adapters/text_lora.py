"""LoRA on the CLIP text encoders, in addition to the denoiser's.

Encoders with adapters become children of the denoiser, by their names in the pipeline. Everything
that iterates over a model's parameters (optimizer, average, gradients, checkpoints, exports)
therefore finds their adapters, which are replicated on every rank. They are attached after the
denoiser is sharded, so that FSDP never sees their frozen weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from engine.families.shared.lora_names import adapters_of
from engine.model.adapters import lora
from engine.model.meta_device import parameters_on_meta
from engine.model.text_encoders import read_entries
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from peft import LoraConfig

    from engine.families import Family
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.lora import LoraKeys

TARGETS: Final = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Suffixes of the layers that get an adapter: attention's projections."""


class AdaptedEncoder(torch.nn.Module):
    """A text encoder's blocks under the module name that LoRA files use.

    Depending on the version of transformers, they are in `text_model` or in the encoder itself, and
    the encoders of one pipeline may differ in this.
    """

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.text_model = getattr(encoder, "text_model", encoder)


def adapted_encoders(
    encoders: Mapping[str, torch.nn.Module], spec: RecipeKeys
) -> dict[str, AdaptedEncoder]:
    """Freeze text encoders, and add initialized adapters to them.

    Args:
        encoders: Text encoders by their names in the pipeline; on meta, nothing is initialized.
        spec: The job.

    Returns:
        Encoders by name. The adapters are added to the given modules in place.
    """
    named = {name: AdaptedEncoder(encoder) for name, encoder in encoders.items()}
    for name, adapted in named.items():
        encoders[name].requires_grad_(False)
        lora.add_text_lora(adapted.text_model, spec, TARGETS)
        if checkpoints_activations(spec):
            encoders[name].gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    together = torch.nn.ModuleDict(dict(named))
    if not any(p.is_meta for p in together.parameters()):
        lora.initialise(together, spec.seed, spec.lora_init)
    return named


def attach(model: torch.nn.Module, encoders: Mapping[str, torch.nn.Module]) -> None:
    """Make text encoders children of the denoiser."""
    for name, encoder in encoders.items():
        model.add_module(name, encoder)


def names_of(family: Family, root: Path) -> list[str]:
    """List a model's text encoders that a LoRA is trained on, by their names in the pipeline."""
    return [name for name in read_entries(root) if name in family.facts.text_lora]


def on_meta(family: Family, root: Path) -> dict[str, Any]:
    """Return the text encoders of a model that a LoRA is trained on, without weights."""
    entries = read_entries(root)
    encoders: dict[str, Any] = {}
    for name in names_of(family, root):
        encoder_class = getattr(transformers, entries[name][1])
        config = encoder_class.config_class.from_pretrained(root / name)
        with parameters_on_meta():
            encoders[name] = encoder_class(config)
    return encoders


def is_text(name: str, family: Family) -> bool:
    """Return whether a module or tensor of the adapted model belongs to a text encoder."""
    return name.partition(".")[0] in family.facts.text_lora


def parted(
    layers: Mapping[str, torch.Tensor], family: Family
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Split an adapter's tensors by denoiser and text encoder.

    Returns:
        The denoiser's tensors by name, and each text encoder's tensors by name.
    """
    denoiser: dict[str, torch.Tensor] = {}
    texts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in layers.items():
        if is_text(name, family):
            encoder, _, rest = name.partition(".")
            texts.setdefault(encoder, {})[rest] = tensor
        else:
            denoiser[name] = tensor
    return denoiser, texts


def config_of(spec: LoraKeys) -> LoraConfig:
    """Return peft's config of the text encoders' adapter."""
    return lora.text_config(spec, TARGETS)


def as_kohya(
    texts: Mapping[str, Mapping[str, torch.Tensor]], family: Family
) -> dict[str, torch.Tensor]:
    """Return the text encoders' adapters under kohya's names, with alphas equal to the ranks.

    Args:
        texts: From `parted`.
        family: The model's family.
    """
    tensors: dict[str, torch.Tensor] = {}
    for encoder, layers in texts.items():
        for module, (down, up) in adapters_of(layers).items():
            key = kohya_name(f"{encoder}.{module}", family)
            tensors[f"{key}.lora_down.weight"] = down
            tensors[f"{key}.lora_up.weight"] = up
            tensors[f"{key}.alpha"] = torch.tensor(float(down.shape[0]))
    return tensors


def kohya_name(module: str, family: Family) -> str:
    """Return kohya's name of a text encoder's module."""
    encoder, _, rest = module.partition(".")
    return f"{family.facts.text_lora[encoder]}_{rest.replace('.', '_')}"
