"""A transformer's tensors under its authors' names: the reverse of diffusers' own converters.

Layers are named, fused and ordered as a LoRA's are for ComfyUI (`engine.families`): an adapter
whose ups hold numbers of rows says which row of which layer stands where. What no LoRA adapts
(norms, embeddings) has renames here. Tests compare with `diffusers.loaders.single_file_utils`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch

from engine.exports.made import Made
from engine.exports.sdxl_layout import UNET, sdxl_layout
from engine.families.shared.lora_names import ComfyUI
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.families import Family, LoraStyle

_FLUX: Final = tuple(
    (rf"{ours}\.(\d+)\.attn\.{norm}\.weight", rf"{theirs}.\1.{part}norm.{which}_norm.scale")
    for ours, theirs, norm, part, which in (
        ("transformer_blocks", "double_blocks", "norm_q", "img_attn.", "query"),
        ("transformer_blocks", "double_blocks", "norm_k", "img_attn.", "key"),
        ("transformer_blocks", "double_blocks", "norm_added_q", "txt_attn.", "query"),
        ("transformer_blocks", "double_blocks", "norm_added_k", "txt_attn.", "key"),
        ("single_transformer_blocks", "single_blocks", "norm_q", "", "query"),
        ("single_transformer_blocks", "single_blocks", "norm_k", "", "key"),
    )
)
_Z_IMAGE: Final = (
    (r"all_final_layer\.2-1\.(.+)", r"final_layer.\1"),
    (r"all_x_embedder\.2-1\.(.+)", r"x_embedder.\1"),
    (r"(.+\.attention)\.norm_([qk])\.weight", r"\1.\2_norm.weight"),
    (r"((?:t|cap)_embedder\..+|(?:x|cap)_pad_token)", r"\1"),
    (r"((?:layers|noise_refiner|context_refiner)\.\d+\.(?:adaLN_modulation|\w*norm\d?).+)", r"\1"),
)
_WAN: Final = (
    (r"condition_embedder\.time_embedder\.linear_1\.(\w+)", r"time_embedding.0.\1"),
    (r"condition_embedder\.time_embedder\.linear_2\.(\w+)", r"time_embedding.2.\1"),
    (r"condition_embedder\.text_embedder\.linear_1\.(\w+)", r"text_embedding.0.\1"),
    (r"condition_embedder\.text_embedder\.linear_2\.(\w+)", r"text_embedding.2.\1"),
    (r"condition_embedder\.time_proj\.(\w+)", r"time_projection.1.\1"),
    (r"condition_embedder\.image_embedder\.norm1\.(\w+)", r"img_emb.proj.0.\1"),
    (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj\.(\w+)", r"img_emb.proj.1.\1"),
    (r"condition_embedder\.image_embedder\.ff\.net\.2\.(\w+)", r"img_emb.proj.3.\1"),
    (r"condition_embedder\.image_embedder\.norm2\.(\w+)", r"img_emb.proj.4.\1"),
    (r"(blocks\.\d+)\.attn1\.(norm_[qk]\.\w+)", r"\1.self_attn.\2"),
    (r"(blocks\.\d+)\.attn2\.(norm_[qk]\.\w+)", r"\1.cross_attn.\2"),
    (r"(blocks\.\d+)\.attn2\.norm_added_k\.(\w+)", r"\1.cross_attn.norm_k_img.\2"),
    (r"(blocks\.\d+)\.norm2\.(\w+)", r"\1.norm3.\2"),
    (r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation"),
    (r"scale_shift_table", r"head.modulation"),
    (r"proj_out\.(\w+)", r"head.head.\1"),
    (r"(patch_embedding\.\w+)", r"\1"),
)
# Family → how the names of what is in its repeated blocks begin.
_BLOCKS: Final = {
    "flux": r"(double|single)_blocks\.\d+\.",
    "qwen_image": r"transformer_blocks\.\d+\.",
    "z_image": r"(layers|noise_refiner|context_refiner)\.\d+\.",
    "wan": r"blocks\.\d+\.",
    "sdxl": re.escape(UNET) + r"(input_blocks\.[1-9]|middle_block\.|output_blocks\.)",
}
# Family → patterns of the names that no LoRA has, and what the authors call these.
RENAMES: Final = {
    "flux": _FLUX,
    "qwen_image": ((r"(.+)", r"\1"),),
    "z_image": _Z_IMAGE,
    "wan": _WAN,
}


def authors_layout(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Made]:
    """Return the authors' names, and what each tensor consists of.

    Args:
        family: The model's.
        shapes: Name in diffusers → shape, of all its tensors; of SDXL's components besides the
            U-Net, `<component>/<name>`.

    Raises:
        UserError: The family has no such layout here, or the model a tensor that it does not.
    """
    name, style = family.facts.name, family.COMFYUI
    if name == "sdxl":
        return sdxl_layout(shapes)
    if name not in RENAMES or style is None:
        raise UserError(
            f"{name} has no single-file export",
            f"{', '.join(RENAMES)} and sdxl have; others export as a diffusers directory",
        )
    made: dict[str, Made] = {}
    rest = set(shapes)
    for target, members, order in _layers(style, shapes):
        for end in ("weight", "bias"):
            sources = tuple(f"{member}.{end}" for member in members)
            if all(source in shapes for source in sources):
                made[f"{target}.{end}"] = Made(sources, order)
                rest -= {*sources}
    for source in sorted(rest):
        for pattern, theirs in RENAMES[name]:
            if match := re.fullmatch(pattern, source):
                made[match.expand(theirs)] = Made((source,))
                break
        else:
            raise UserError(f"the single file of {name} has no place for {source}")
    return made


def fits_8_bits(family: str, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix of a repeated block, and so can be stored in fp8.

    Args:
        family: The model's.
        name: The authors' name.
        shape: The tensor's.
    """
    block = re.match(_BLOCKS[family], name)
    return block is not None and name.endswith(".weight") and len(shape) > 1


def _layers(
    style: LoraStyle, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, list[str], torch.Tensor | None]]:
    """Return the authors' layers: name, members, and order of their rows unless it is theirs."""
    probe: dict[str, torch.Tensor] = {}
    firsts: dict[str, int] = {}
    first = 1
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) < 2 or not _has_name(style, module, shape):
            continue
        rows = torch.arange(first, first + shape[0], dtype=torch.float64)
        probe[f"{module}.lora_A.weight"] = torch.zeros(1, *shape[1:])
        probe[f"{module}.lora_B.weight"] = rows.reshape(-1, *[1] * (len(shape) - 1))
        firsts[module] = first
        first += shape[0]
    names = list(firsts)
    starts = torch.tensor(list(firsts.values()))
    layers = []
    for key, ups in style.convert(probe).items():
        if not key.endswith(".lora_B.weight"):
            continue
        target = key.removesuffix(".lora_B.weight").removeprefix("diffusion_model.")
        rows = ups.flatten(1).sum(1).long()
        if not rows.all():
            raise UserError(f"the model lacks a part of {target}")
        owners = torch.bucketize(rows, starts, right=True) - 1
        members = [names[owner] for owner in owners.unique_consecutive().tolist()]
        natural = torch.cat([torch.arange(shapes[f"{m}.weight"][0]) + firsts[m] for m in members])
        order = None
        if not torch.equal(rows, natural):
            by_number = natural.argsort()
            order = by_number[torch.searchsorted(natural, rows, sorter=by_number)]
        layers.append((target, members, order))
    return layers


def _has_name(style: LoraStyle, module: str, shape: tuple[int, ...]) -> bool:
    """Return whether the authors' model has a layer for a module."""
    assert isinstance(style, ComfyUI)
    try:
        style.rename({module: (torch.zeros(1, *shape[1:]), torch.zeros(shape[0], 1))})
    except UserError:
        return False
    return True
