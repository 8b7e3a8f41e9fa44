"""A LoKr under the names of LyCORIS, which ComfyUI reads, and as peft and diffusers load it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch

from engine.families.shared.lora_names import ComfyUI, named_singly
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.families import LoraStyle
    from jobs.spec.keys.lora import LoraKeys

HEADER: Final = {"ss_network_module": "lycoris.kohya"}
"""Which network kohya's scripts load such files with."""


def named(style: LoraStyle, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a LoKr under the names of another tool, with alphas that scale nothing.

    Args:
        style: How it names LoRAs.
        layers: `<module>.lokr_w1`, `.lokr_w2` and so on, with no scale beside them.

    Raises:
        UserError: The tool has no name for a module.
    """
    shapes = _shapes(layers)
    try:
        names = named_singly(style, shapes)
    except UserError:
        prefix = style.lokr if isinstance(style, ComfyUI) else None
        if prefix is None:
            raise
        flat = prefix.endswith("_")
        names = {m: prefix + (m.replace(".", "_") if flat else m) for m in shapes}
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in layers.items():
        module, _, part = name.rpartition(".")
        converted[f"{names[module]}.{part}"] = tensor
        if part == "lokr_w2_b":
            converted[f"{names[module]}.alpha"] = torch.tensor(float(tensor.shape[0]))
        elif part == "lokr_w2":  # both are whole: no tool scales them
            converted[f"{names[module]}.alpha"] = torch.tensor(float(max(tensor.shape[:2])))
    return converted


def header(spec: LoraKeys) -> dict[str, str]:
    """Return what LyCORIS writes into the header of a file."""
    arguments = {"algo": "lokr", "factor": str(spec.lokr_factor)}
    if spec.lokr_full_matrix:
        arguments["full_matrix"] = "True"
    return HEADER | {"ss_network_args": json.dumps(arguments, sort_keys=True)}


def _shapes(layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Return module → shape of the change of its weight."""
    shapes: dict[str, torch.Size] = {}
    for name, left in layers.items():
        module, _, part = name.rpartition(".")
        if part != "lokr_w1":
            continue
        whole = layers.get(f"{module}.lokr_w2")
        if whole is not None:
            rows, columns, kernel = whole.shape[0], whole.shape[1], whole.shape[2:]
        else:
            rows = len(layers[f"{module}.lokr_w2_a"])
            columns, kernel = layers[f"{module}.lokr_w2_b"].shape[1], torch.Size()
        shapes[module] = torch.Size([left.shape[0] * rows, left.shape[1] * columns, *kernel])
    return shapes
