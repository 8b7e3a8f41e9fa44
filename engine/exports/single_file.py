"""Write a trained transformer as one file in its authors' layout, for ComfyUI and Forge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from engine.exports.model import check_fit
from engine.exports.readback import VerifiedFile
from engine.exports.recipe import describe
from engine.exports.source import read_stored
from engine.families.shared.lora_names import ComfyUI
from engine.families.shared.sdxl_kohya import module_of_stability
from engine.model.files import weights
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact
    from engine.families import Family, LoraStyle


# -- assembled tensors ----------------------------------------------------------------------
# How a tensor of the authors' layout is assembled from diffusers' tensors.


@dataclass(frozen=True)
class Fused:
    """A tensor of the authors' layout.

    Attributes:
        members: Diffusers' names of the tensors that it consists of, in order.
        order: For each row, its index among the concatenated members' rows; None if unchanged.
        transposed: Whether it is a matrix with its sides swapped.
        kernel: Whether it is a linear layer stored as a 1x1 convolution.
    """

    members: tuple[str, ...]
    order: torch.Tensor | None = None
    transposed: bool = False
    kernel: bool = False

    def make(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Assemble the tensor.

        Args:
            tensors: Tensors by their names in diffusers, including all members.
        """
        parts = [tensors[name] for name in self.members]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = whole if self.order is None else whole[self.order]
        whole = whole.T if self.transposed else whole
        return whole[:, :, None, None] if self.kernel else whole

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the tensor's shape.

        Args:
            shapes: Shapes by names in diffusers, including all members.
        """
        first = shapes[self.members[0]]
        shape = (sum(shapes[m][0] for m in self.members), *first[1:]) if first else ()
        shape = shape[::-1] if self.transposed else shape
        return (*shape, 1, 1) if self.kernel else shape


# -- sdxl layout ----------------------------------------------------------------------------
# An SDXL checkpoint in Stability's layout: U-Net, autoencoder and both text encoders in one file.
#
# Tests compare with `diffusers.loaders.single_file_utils`, which reads such files.


PARTS: Final = ("vae", "text_encoder", "text_encoder_2")
"""The components apart from the U-Net; their tensors are called `<component>/<name>` here."""
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


def sdxl_layout(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Fused]:
    """Return the tensors of Stability's layout by name.

    Args:
        shapes: Shape by name in diffusers: plain names for the U-Net, `<component>/…` for the
            others.

    Raises:
        UserError: A tensor has no counterpart in the layout.
    """
    made: dict[str, Fused] = {}
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
            made[f"{_VAE}{theirs}.{end}"] = Fused((name,), kernel=point)
        elif component == "text_encoder":
            own = inner if inner.startswith("text_model.") else f"text_model.{inner}"
            made[_CLIP + own] = Fused((name,))
        elif component == "text_encoder_2":
            _add_open_clip(made, name, inner.removeprefix("text_model."), shapes)
        else:
            made[f"{UNET}{module_of_stability(module)}.{end}"] = Fused((name,))
    return made


def _of_vae(module: str, blocks: int) -> str:
    """Return Stability's name of a module of the autoencoder.

    Args:
        module: Its name in diffusers.
        blocks: Number of the decoder's blocks, which Stability counts from the other end.
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
    made: dict[str, Fused], name: str, inner: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Add a tensor of the second text encoder, where query, key and value are fused.

    Raises:
        UserError: The tensor has no counterpart in the layout.
    """
    if inner == "text_projection.weight":
        made[f"{_OPEN_CLIP}text_projection"] = Fused((name,), transposed=True)
    elif inner in _SINGLE:
        made[_OPEN_CLIP + _SINGLE[inner]] = Fused((name,))
    elif match := _PROJECTION.fullmatch(inner):
        target = f"{_OPEN_CLIP}transformer.resblocks.{match[1]}.attn.in_proj_{match[3]}"
        members = tuple(name.replace(f".{match[2]}_proj.", f".{part}_proj.") for part in "qkv")
        if missing := [member for member in members if member not in shapes]:
            raise UserError(f"the model lacks {missing[0]}")
        made[target] = Fused(members)
    elif match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", inner):
        theirs = _LAYERS.get(match[2])
        if theirs is None:
            raise UserError(f"the single file of sdxl has no place for {name}")
        made[f"{_OPEN_CLIP}transformer.resblocks.{match[1]}.{theirs}.{match[3]}"] = Fused((name,))
    elif not inner.endswith("position_ids"):
        raise UserError(f"the single file of sdxl has no place for {name}")


# -- authors layout -------------------------------------------------------------------------
# Convert a transformer's tensors to its authors' names: the reverse of diffusers' own converters.
#
# Layers are named, fused and ordered like a ComfyUI LoRA (`engine.families`): converting an adapter
# whose up matrices hold row numbers shows where each row of each layer ends up. Tensors that no
# LoRA adapts (norms, embeddings) are renamed by the patterns below. Tests compare with
# `diffusers.loaders.single_file_utils`.


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
# Family → pattern for the start of tensor names inside its repeated blocks.
_BLOCKS: Final = {
    "flux": r"(double|single)_blocks\.\d+\.",
    "qwen_image": r"transformer_blocks\.\d+\.",
    "z_image": r"(layers|noise_refiner|context_refiner)\.\d+\.",
    "wan": r"blocks\.\d+\.",
    "sdxl": re.escape(UNET) + r"(input_blocks\.[1-9]|middle_block\.|output_blocks\.)",
}
# Family → (pattern, replacement) pairs for the tensors that no LoRA adapts.
RENAMES: Final = {
    "flux": _FLUX,
    "qwen_image": ((r"(.+)", r"\1"),),
    "z_image": _Z_IMAGE,
    "wan": _WAN,
}


def authors_layout(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Fused]:
    """Return the tensors of the authors' layout by name.

    Args:
        family: The model's family.
        shapes: Shape by name in diffusers, for all tensors; `<component>/<name>` for the components
            of SDXL other than the U-Net.

    Raises:
        UserError: The family has no such layout here, or it does not cover one of the tensors.
    """
    name, style = family.facts.name, family.COMFYUI
    if name == "sdxl":
        return sdxl_layout(shapes)
    if name not in RENAMES or style is None:
        raise UserError(
            f"{name} has no single-file export",
            f"{', '.join(RENAMES)} and sdxl have; others export as a diffusers directory",
        )
    made: dict[str, Fused] = {}
    rest = set(shapes)
    for target, members, order in _layers(style, shapes):
        for end in ("weight", "bias"):
            sources = tuple(f"{member}.{end}" for member in members)
            if all(source in shapes for source in sources):
                made[f"{target}.{end}"] = Fused(sources, order)
                rest -= {*sources}
    for source in sorted(rest):
        for pattern, theirs in RENAMES[name]:
            if match := re.fullmatch(pattern, source):
                made[match.expand(theirs)] = Fused((source,))
                break
        else:
            raise UserError(f"the single file of {name} has no place for {source}")
    return made


def fits_8_bits(family: str, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix of a repeated block, which can be stored in fp8.

    Args:
        family: The model's family.
        name: The authors' name of the tensor.
        shape: The tensor's shape.
    """
    block = re.match(_BLOCKS[family], name)
    return block is not None and name.endswith(".weight") and len(shape) > 1


def _layers(
    style: LoraStyle, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, list[str], torch.Tensor | None]]:
    """Return the authors' layers as (name, members, row order or None if unchanged)."""
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


# -- single file ----------------------------------------------------------------------------


_FP8: Final = torch.float8_e4m3fn


class SingleFileOutput:
    """Receives a transformer's tensors one by one, and writes them under the authors' names.

    Only SDXL's file includes text encoders and the autoencoder; for other families, both tools load
    them from separate files. Only the members of fused layers are kept, until the layer is
    complete.

    Args:
        recipe: Describes the export.
        facts: The tensors that will be added, by the names in the model. Untrained tensors are
            copied from the base model.
        directory: An empty directory.

    Attributes:
        bytes: The disk space needed.
        pieces: Number of tensors that are checked at the end.
        warnings: Always empty.

    Raises:
        UserError: The job trains a LoRA, or the family has no such file.
        OSError: The file cannot be written.
    """

    def __init__(self, recipe: Recipe, facts: Mapping[str, Fact], directory: Path) -> None:
        if recipe.spec.model_type == "lora":
            raise UserError(
                "a single file is for a full model, and the job trains a LoRA",
                "remove --as; `fsdp-tui lora merge --into` puts a LoRA into a model's file",
            )
        self.warnings: list[str] = []
        model, self._stored = weights.build_on_meta(
            recipe.family.transformer_class(), recipe.family.denoiser_of(recipe.root), recipe.spec
        )
        check_fit(model, facts)
        if recipe.spec.model_family == "sdxl":
            for part in PARTS:
                tensors = weights.stored_tensors(recipe.root / part)
                self._stored = self._stored | {f"{part}/{name}": t for name, t in tensors.items()}
        shapes = {name: place.shape for name, place in self._stored.items()}
        self._layout = authors_layout(recipe.family, shapes)
        self._owners = {
            member: name for name, made in self._layout.items() for member in made.members
        }
        planned: dict[str, Fact] = {}
        for name, made in self._layout.items():
            first = made.members[0]
            trained = facts[first][0] if first in facts else self._stored[first].dtype
            shape = made.shape(shapes)
            if recipe.dtype == "fp8":
                narrow = fits_8_bits(recipe.spec.model_family, name, shape)
                planned[name] = (_FP8 if narrow else torch.bfloat16, shape)
            else:
                base = self._stored[first].dtype
                planned[name] = (recipe.model_dtype(trained, base, keep_fp32=False), shape)
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self._missing = set(self._owners)
        self.bytes = sum(
            dtype.itemsize * torch.Size(shape).numel() for dtype, shape in planned.values()
        )
        self.pieces = len(planned)
        path = directory / f"{recipe.spec.name}.safetensors"
        self._file = VerifiedFile(path, planned, describe(recipe, "comfyui"))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor, and write the layer that it completes."""
        if name not in self._missing:
            return  # an alias of a tensor that was added under its first name
        self._missing.discard(name)
        owner = self._owners[name]
        parts = self._waiting.setdefault(owner, {})
        parts[name] = tensor
        if len(parts) == len(self._layout[owner].members):
            self._file.add(owner, self._layout[owner].make(self._waiting.pop(owner)))

    def finish(self, checked: Callable[[], None]) -> None:
        """Add the untrained tensors, and read the file back.

        Args:
            checked: Called after each tensor that was read back.

        Raises:
            DamagedError: The file on disk differs from the model.
            UserError: The base model cannot be read.
            OSError: The file cannot be written.
        """
        for made in self._layout.values():
            for member in made.members:
                if member in self._missing:
                    self.add(member, read_stored(self._stored[member]))
        self._file.close()
        self._file.check(checked)

    def abandon(self) -> None:
        """Close and remove an unfinished file."""
        self._file.abandon()
