"""Names of SDXL LoRAs in kohya's scripts and ComfyUI: those of Stability's own UNet.

ComfyUI uses the same for Stable Diffusion 1 and 2, whose UNet is one block deeper.

Diffusers' `convert_state_dict_to_kohya` gives other names, derived from its own UNet, which kohya's
scripts do not know for SDXL.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.families.shared.lora_names import Adapter

METADATA: Final = {
    "ss_network_module": "networks.lora",
    "ss_base_model_version": "sdxl_base_v1-0",
}

_LAYERS: Final = 2  # `layers_per_block` of SDXL: three list entries per block
# Layers of a ResnetBlock2D.
_RESNET: Final = {
    "norm1": "in_layers.0",
    "norm2": "out_layers.0",
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
# Modules outside of the blocks, and the middle block.
_SINGLE: Final = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_MIDDLE: Final = {"resnets.0": 0, "attentions.0": 1, "resnets.1": 2}
_PLACE: Final = re.compile(
    r"(?:(?P<side>down|up)_blocks\.(?P<block>\d+)|mid_block)"
    r"\.(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<layer>\d+)\.(?P<rest>.+)"
)


def rename(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Return adapters by Stability's module names.

    Raises:
        UserError: A module has no counterpart in Stability's UNet.
    """
    return {module_of_stability(module): adapter for module, adapter in adapters.items()}


def rename_of_four_blocks(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Rename the modules of Stable Diffusion 1 and 2.

    Their first up block has no transformer.

    Raises:
        UserError: A module has no counterpart in Stability's UNet.
    """
    renamed = rename(adapters)
    upsampler = "output_blocks.2.2.conv"  # one index lower without a transformer
    if upsampler in renamed:
        renamed["output_blocks.2.1.conv"] = renamed.pop(upsampler)
    return renamed


def module_of_stability(module: str) -> str:
    """Return Stability's module for one of diffusers'.

    Raises:
        UserError: There is none.
    """
    if module in _SINGLE:
        return _SINGLE[module]
    if match := _PLACE.fullmatch(module):
        kind, rest = match["kind"], match["rest"]
        if kind == "resnets" and rest in _RESNET:
            return f"{_place(match)}.{_RESNET[rest]}"
        if kind == "attentions":
            return f"{_place(match)}.{rest}"
        if kind == "downsamplers" and rest == "conv":
            return f"{_place(match)}.op"
        if kind == "upsamplers" and rest == "conv":
            return f"{_place(match)}.conv"
    raise UserError(
        f"export_formats: kohya has no name for {module}",
        "remove it from lora_target_modules, or export for diffusers only",
    )


def _place(match: re.Match[str]) -> str:
    """Return the position of a resnet, transformer or sampler in Stability's lists."""
    kind, layer = match["kind"], int(match["layer"])
    if match["side"] is None:
        return f"middle_block.{_MIDDLE[f'{kind}.{layer}']}"
    first = int(match["block"]) * (_LAYERS + 1)
    if match["side"] == "down":
        if kind == "downsamplers":  # a separate entry, after the block's layers
            return f"input_blocks.{first + _LAYERS + 1}.0"
        return f"input_blocks.{first + layer + 1}.{int(kind == 'attentions')}"
    if kind == "upsamplers":  # in the entry of the block's last layer, after its transformer
        return f"output_blocks.{first + _LAYERS}.2"
    return f"output_blocks.{first + layer}.{int(kind == 'attentions')}"
