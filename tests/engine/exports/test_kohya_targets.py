"""Layers that sd-scripts and musubi-tuner adapt, as imports name them, have names in exports."""

from __future__ import annotations

import re
from typing import Any, Final

import diffusers
import pytest
import torch

from engine.blocks.build import on_meta
from engine.families import load
from jobs.imports.kohya.model import TARGETS
from jobs.spec.families import FAMILIES

# As published, but for the number of blocks.
SMALL: Final[dict[str, dict[str, Any]]] = {
    "flux": {"num_layers": 2, "num_single_layers": 1},
    "stable_diffusion": {"cross_attention_dim": 768},
    "sdxl": {
        "cross_attention_dim": 2048,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "use_linear_projection": True,
    },
    "sd3": {"num_layers": 2},
    "lumina2": {"num_layers": 2, "num_refiner_layers": 1},
    "z_image": {"n_layers": 2, "n_refiner_layers": 1},
    "hunyuanvideo15": {"num_layers": 1, "num_refiner_layers": 1},
    "krea2": {"num_layers": 1},
}
# Kinds of layers of the blocks that stay as they are.
LEFT: Final = {
    "flux": r"(norm_out|proj_out|x_embedder|context_embedder|time_text_embed)\b.*",
    "sd3": (
        r"(norm_out|proj_out|pos_embed|context_embedder|time_text_embed)\b.*"
        r"|.*\.norm1_context\.\w+"
    ),
    "krea2": "nothing",
    "lumina2": r"(x_embedder|time_caption_embed)\b.*",
}


@pytest.mark.parametrize(("tool", "name"), list(TARGETS), ids=[name for _, name in TARGETS])
def test_layers_that_kohya_s_tools_adapt_are_there_and_have_names(tool: str, name: str) -> None:
    with on_meta():
        model = getattr(diffusers, FAMILIES[name].transformer)(**SMALL[name])
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, kinds)}
    adapted = {n: m for n, m in modules.items() if re.fullmatch(TARGETS[tool, name], n)}
    layers = {}
    for module, layer in adapted.items():
        (out, into), ends = layer.weight.shape[:2], (1,) * (layer.weight.dim() - 2)
        layers[f"{module}.lora_A.weight"] = torch.zeros(1, into, *ends)
        layers[f"{module}.lora_B.weight"] = torch.zeros(out, 1, *ends)
    assert layers
    family = load(name)
    for style in filter(None, (family.KOHYA, family.COMFYUI)):
        assert style.convert(layers)
    if name in LEFT:
        others = modules.keys() - adapted.keys()
        assert [other for other in others if not re.fullmatch(LEFT[name], other)] == []
