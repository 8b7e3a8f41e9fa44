"""The names of a FLUX.1 LoRA in kohya's scripts and ComfyUI: BFL's modules, some of them fused.

BFL's model has one linear layer where diffusers has several: query, key and value of a stream; and
in the single blocks, those and the first half of the feed-forward. Side by side their adapters are
one adapter of the fused layer, exactly: the downs are stacked, and the ups are the blocks of a
diagonal, so that each sees only its own down.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA: Final = {
    "ss_network_module": "networks.lora_flux",
    "ss_base_model_version": "flux1",
    "modelspec.architecture": "flux-1-dev/lora",
    "modelspec.implementation": "https://github.com/black-forest-labs/flux",
}

# Module of diffusers (# is a block's number) → module of BFL.
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
# Module of BFL → modules of diffusers that it fuses, each with its outputs per input.
_FUSED: Final[dict[str, dict[str, int]]] = {
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
_OWNERS: Final = {member: fused for fused, members in _FUSED.items() for member in members}
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")

Adapter = tuple[torch.Tensor, torch.Tensor]  # down (rank, in) and up (out, rank)


def convert(layers: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The same adapter under kohya's names.

    Args:
        layers: `<module of diffusers>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank).
        scale: What their product is multiplied with: alpha / rank.

    Returns:
        `lora_unet_<module of BFL>.lora_down.weight`, `.lora_up.weight` and `.alpha` (a number).

    Raises:
        UserError: A module has no counterpart in BFL's model.
    """
    suffix = ".lora_A.weight"
    adapters = {
        name.removesuffix(suffix): (down, layers[name.replace(".lora_A.", ".lora_B.")])
        for name, down in layers.items()
        if name.endswith(suffix)
    }
    found: dict[str, torch.Tensor] = {}
    for module, (down, up) in _renamed(adapters).items():
        alpha = down.shape[0] * scale
        if module == "final_layer.adaLN_modulation.1":
            up = torch.cat(up.chunk(2)[::-1])  # BFL shifts first, diffusers scales first
        if module.startswith("final_layer."):
            # Diffusers' own loader takes no notice of this layer's alpha: none is needed so.
            up, alpha = up * scale, down.shape[0]
        key = "lora_unet_" + module.replace(".", "_")
        found[f"{key}.lora_down.weight"] = down
        found[f"{key}.lora_up.weight"] = up
        found[f"{key}.alpha"] = torch.tensor(float(alpha))
    return found


def _renamed(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Module of BFL → its adapter."""
    found: dict[str, Adapter] = {}
    parts: dict[str, dict[str, Adapter]] = {}  # of fused modules
    for module, adapter in adapters.items():
        # Only the block's number: `to_out.0` keeps its own.
        number = match[0] if (match := _NUMBER.search(module)) else "#"
        pattern = _NUMBER.sub("#", module, count=1)
        if pattern in _SAME:
            found[_SAME[pattern].replace("#", number)] = adapter
        elif pattern in _OWNERS:
            owner = _OWNERS[pattern].replace("#", number)
            parts.setdefault(owner, {})[pattern] = adapter
        else:
            raise UserError(
                f"export_formats: kohya has no name for {module}",
                "remove it from lora_target_modules, or export for diffusers only",
            )
    for owner, members in parts.items():
        found[owner] = _fuse(_FUSED[_NUMBER.sub("#", owner, count=1)], members)
    return found


def _fuse(layout: Mapping[str, int], members: Mapping[str, Adapter]) -> Adapter:
    """One adapter of a fused layer; what has no adapter gets nothing added.

    Args:
        layout: The fused modules in order, each with its outputs per input.
        members: The adapters of those that have one.
    """
    present = [members[name] for name in layout if name in members]
    width = present[0][0].shape[1]
    rank = sum(down.shape[0] for down, _ in present)
    heights = [
        members[name][1].shape[0] if name in members else per_input * width
        for name, per_input in layout.items()
    ]
    fused = present[0][1].new_zeros(sum(heights), rank)
    row = column = 0
    for name, height in zip(layout, heights, strict=True):
        if name in members:
            up = members[name][1]
            fused[row : row + height, column : column + up.shape[1]] = up
            column += up.shape[1]
        row += height
    return torch.cat([down for down, _ in present]), fused
