"""An SDXL checkpoint in Stability's layout: U-Net, autoencoder and both text encoders in one file.

Tests compare with `diffusers.loaders.single_file_utils`, which reads such files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from engine.exports.made import Made
from engine.families.shared.sdxl_kohya import module_of_stability
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

PARTS: Final = ("vae", "text_encoder", "text_encoder_2")
"""The components besides the U-Net; their tensors are called `<component>/<name>` here."""
UNET: Final = "model.diffusion_model."
_VAE: Final = "first_stage_model."
_CLIP: Final = "conditioner.embedders.0.transformer."
_OPEN_CLIP: Final = "conditioner.embedders.1.model."

_ATTENTION: Final = {
    **{"group_norm": "norm", "to_out.0": "proj_out", "proj_attn": "proj_out"},
    **{"to_q": "q", "to_k": "k", "to_v": "v", "query": "q", "key": "k", "value": "v"},
}
_LAYERS: Final = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_SINGLE: Final = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_PROJECTION: Final = re.compile(r"encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")


def sdxl_layout(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Made]:
    """Return Stability's names, and what each tensor consists of.

    Args:
        shapes: Name in diffusers → shape; of the U-Net as they are, of the others `<component>/…`.

    Raises:
        UserError: A tensor has no place.
    """
    made: dict[str, Made] = {}
    blocks = 1 + max(
        (int(m[1]) for n in shapes if (m := re.match(r"vae/decoder\.up_blocks\.(\d+)", n))),
        default=0,
    )
    for name, shape in shapes.items():
        component, _, inner = name.rpartition("/")
        module, _, end = inner.rpartition(".")
        if component == "vae":
            theirs = _of_vae(module, blocks)
            point = ".mid.attn_1." in theirs and end == "weight" and len(shape) == 2
            made[f"{_VAE}{theirs}.{end}"] = Made((name,), kernel=point)
        elif component == "text_encoder":
            own = inner if inner.startswith("text_model.") else f"text_model.{inner}"
            made[_CLIP + own] = Made((name,))
        elif component == "text_encoder_2":
            _add_open_clip(made, name, inner.removeprefix("text_model."), shapes)
        else:
            made[f"{UNET}{module_of_stability(module)}.{end}"] = Made((name,))
    return made


def _of_vae(module: str, blocks: int) -> str:
    """Return Stability's name of a module of the autoencoder.

    Args:
        module: Its name in diffusers.
        blocks: Of the decoder, which counts them from the other end.
    """
    if match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(.+)", module):
        module = f"encoder.down.{match[1]}.{match[2]}"
    elif match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.(.+)", module):
        module = f"decoder.up.{blocks - 1 - int(match[1])}.{match[2]}"
    if match := re.fullmatch(r"(\w+)\.mid_block\.resnets\.(\d)\.(.+)", module):
        module = f"{match[1]}.mid.block_{int(match[2]) + 1}.{match[3]}"
    elif match := re.fullmatch(r"(\w+)\.mid_block\.attentions\.0\.(.+)", module):
        return f"{match[1]}.mid.attn_1.{_ATTENTION.get(match[2], match[2])}"
    for ours, theirs in (
        (".resnets.", ".block."),
        (".downsamplers.0.", ".downsample."),
        (".upsamplers.0.", ".upsample."),
        (".conv_shortcut", ".nin_shortcut"),
        (".conv_norm_out", ".norm_out"),
    ):
        module = module.replace(ours, theirs)
    return module


def _add_open_clip(
    made: dict[str, Made], name: str, inner: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Add a tensor of the second text encoder; query, key and value are one there.

    Raises:
        UserError: It has no place.
    """
    if inner == "text_projection.weight":
        made[f"{_OPEN_CLIP}text_projection"] = Made((name,), transposed=True)
    elif inner in _SINGLE:
        made[_OPEN_CLIP + _SINGLE[inner]] = Made((name,))
    elif match := _PROJECTION.fullmatch(inner):
        target = f"{_OPEN_CLIP}transformer.resblocks.{match[1]}.attn.in_proj_{match[3]}"
        members = tuple(name.replace(f".{match[2]}_proj.", f".{part}_proj.") for part in "qkv")
        if missing := [member for member in members if member not in shapes]:
            raise UserError(f"the model lacks {missing[0]}")
        made[target] = Made(members)
    elif match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", inner):
        theirs = _LAYERS.get(match[2])
        if theirs is None:
            raise UserError(f"the single file of sdxl has no place for {name}")
        made[f"{_OPEN_CLIP}transformer.resblocks.{match[1]}.{theirs}.{match[3]}"] = Made((name,))
    elif not inner.endswith("position_ids"):
        raise UserError(f"the single file of sdxl has no place for {name}")
