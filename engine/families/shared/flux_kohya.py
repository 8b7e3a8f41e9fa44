"""Names of FLUX.1 LoRAs in kohya's scripts and ComfyUI: BFL's modules, some of them fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from engine.families.shared.lora_names import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.families.shared.lora_names import Adapter

METADATA: Final = {
    "ss_network_module": "networks.lora_flux",
    "ss_base_model_version": "flux1",
}

# Diffusers' module (# is a block's number) → BFL's module.
_SAME: Final = {
    "transformer_blocks.#.norm1.linear": "double_blocks.#.img_mod.lin",
    "transformer_blocks.#.norm1_context.linear": "double_blocks.#.txt_mod.lin",
    "transformer_blocks.#.attn.to_out.0": "double_blocks.#.img_attn.proj",
    "transformer_blocks.#.attn.to_add_out": "double_blocks.#.txt_attn.proj",
    "transformer_blocks.#.ff.net.0.proj": "double_blocks.#.img_mlp.0",
    "transformer_blocks.#.ff.net.2": "double_blocks.#.img_mlp.2",
    "transformer_blocks.#.ff_context.net.0.proj": "double_blocks.#.txt_mlp.0",
    "transformer_blocks.#.ff_context.net.2": "double_blocks.#.txt_mlp.2",
    "single_transformer_blocks.#.norm.linear": "single_blocks.#.modulation.lin",
    "single_transformer_blocks.#.proj_out": "single_blocks.#.linear2",
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_FUSED: Final = {
    "double_blocks.#.img_attn.qkv": {
        f"transformer_blocks.#.attn.to_{part}": 1 for part in ("q", "k", "v")
    },
    "double_blocks.#.txt_attn.qkv": {
        f"transformer_blocks.#.attn.add_{part}_proj": 1 for part in ("q", "k", "v")
    },
    "single_blocks.#.linear1": {
        **{f"single_transformer_blocks.#.attn.to_{part}": 1 for part in ("q", "k", "v")},
        "single_transformer_blocks.#.proj_mlp": 4,
    },
}
LAYOUT: Final = Layout(_SAME, _FUSED)

_MODULATION: Final = "final_layer.adaLN_modulation.1"


def rename(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Return adapters by BFL's module names.

    Raises:
        UserError: A module has no counterpart in BFL's model.
    """
    renamed = LAYOUT.rename(adapters)
    if _MODULATION in renamed:
        down, up = renamed[_MODULATION]  # BFL stores shift before scale, diffusers after
        renamed[_MODULATION] = down, torch.cat(up.chunk(2)[::-1])
    return renamed
