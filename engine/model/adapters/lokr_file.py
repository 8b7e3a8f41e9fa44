"""Initialize from a LoKr file with the names of peft, diffusers, ComfyUI or LyCORIS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from peft.utils.other import get_pattern_key

from engine.families.shared.lora_names import named_singly
from engine.model.adapters import lora
from engine.model.adapters.adapter_config import read_adapter_config
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from engine.families import Family

Parts = dict[str, torch.Tensor]
"""Tensors of an adapter by part: `lokr_w1`, `lokr_w2_a`, `alpha`, …"""

PARTS: Final = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
_HINT: Final = "set lora_rank, lokr_factor and lokr_full_matrix to the file's"


@torch.no_grad()
def set_adapter(
    model: torch.nn.Module,
    stored: Mapping[str, Parts],
    rename: Callable[[list[str]], list[dict[str, str]]],
    scale_of: Callable[[str, Parts], float],
) -> None:
    """Set a model's adapter to the content of a file.

    Args:
        model: With an adapter; sharded or not.
        stored: Parts of each module, by module name as stored.
        rename: Takes the model's modules and returns, for each naming convention, a mapping of
            stored names to modules.
        scale_of: Takes a module and its parts and returns the factor of its product.

    Raises:
        UserError: The file has other layers or shapes. The message starts after the file's name.
    """
    layers: dict[str, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in lora.lora_parameters(model).items():
        module, part, _ = name.rsplit(".", 2)
        layers.setdefault(module, {})[part] = parameter
    named = max(rename(list(layers)), key=lambda way: len(way.keys() & stored.keys()))
    if odd := sorted(stored.keys() ^ named.keys()):
        file, job = ("adapts", "does not") if odd[0] in stored else ("does not adapt", "does")
        raise UserError(
            f"it {file} {odd[0]}, and the job {job}",
            "set lora_target_modules to what the file adapts",
        )
    scales = lora.scales_of(model)
    for key, module in named.items():
        parts = dict(stored[key])
        scale = scale_of(module, parts) / scales[module]
        parts.pop("alpha", None)
        if "lokr_w1_a" in parts and "lokr_w1_b" in parts:
            left, right = parts.pop("lokr_w1_a"), parts.pop("lokr_w1_b")
            if left.shape[1:] != right.shape[:1]:
                raise UserError(f"{module}'s lokr_w1_a and lokr_w1_b do not fit each other")
            parts["lokr_w1"] = left @ right
        if parts.keys() != layers[module].keys():
            raise UserError(
                f"{module} has {_list(parts)} there and {_list(layers[module])} here", _HINT
            )
        for part, parameter in layers[module].items():
            if parts[part].shape != parameter.shape:
                raise UserError(
                    f"{module}'s {part} is {tuple(parts[part].shape)} there and "
                    f"{tuple(parameter.shape)} here",
                    _HINT,
                )
            if not parts[part].isfinite().all():
                raise UserError(f"{module} has values that are not finite")
            whole = parts[part].float()
            lora.fill(parameter, whole * scale if part == "lokr_w1" else whole)


def scales_in(
    file: Path, header: Mapping[str, str], modules: Collection[str], prefix: str
) -> Callable[[str, Parts], float]:
    """Return a function that gives the scales of a file's adapters.

    Args:
        file: The file.
        header: Strings of its header.
        modules: Its module names as stored.
        prefix: Prefix of diffusers' names.

    Returns:
        Takes a module and its parts and returns the factor of its product: from its alpha if a
        matrix is factorized, as in LyCORIS, else from peft's configuration, else 1.

    Raises:
        UserError: The configuration cannot be read.
    """
    config = read_adapter_config(file, header, modules, prefix)

    def scale(module: str, parts: Parts) -> float:
        parted = parts.get("lokr_w2_b", parts.get("lokr_w1_b"))
        if "alpha" in parts:
            return 1.0 if parted is None else float(parts["alpha"]) / len(parted)
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        rank = ranks.get(get_pattern_key(list(ranks), module), config.get("r", 1))
        alpha = alphas.get(get_pattern_key(list(alphas), module), config.get("alpha", rank))
        return float(alpha) / float(rank)

    return scale


def single_names(
    model: torch.nn.Module, modules: list[str], family: Family
) -> list[dict[str, str]]:
    """Return other tools' names of a model's modules, for tools that fuse none of them."""
    shapes = {}
    for module in modules:
        layer: Any = model.get_submodule(module).base_layer
        convolution = isinstance(layer, torch.nn.Conv2d)
        rows, columns = (
            (layer.out_channels, layer.in_channels)
            if convolution
            else (layer.out_features, layer.in_features)
        )
        kernel = layer.kernel_size if convolution else ()
        shapes[module] = torch.Size([rows, columns, *kernel])
    ways = []
    for style in (family.KOHYA, family.COMFYUI):
        if style is None:
            continue
        try:
            ways.append({name: module for module, name in named_singly(style, shapes).items()})
        except UserError:  # the tool lacks a layer, or fuses it with others
            continue
    return ways


def _list(parts: Mapping[str, Any]) -> str:
    return " and ".join(sorted(parts))
