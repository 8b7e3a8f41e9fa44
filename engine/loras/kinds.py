"""Detect which families a LoRA can be for, from its header or its module names."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from engine.exports.recipe import PREFIX, families_called
from engine.loras.lora_file import COMPONENT, STYLES, TEXT
from jobs.errors import UserError
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from engine.loras.lora_file import LoraFile, Parts


SECOND: Final = "transformer_2"
"""The denoiser for low noise, in models with two."""
_FIRST: Final = "transformer"
_STEPS: Final = 1000  # timesteps of the schedule that a timestep range refers to
_ALL: Final = frozenset(FAMILIES)
_STREAMS: Final = frozenset(("flux", "chroma", "hunyuanvideo"))
_AUTHORS: Final = _STREAMS | {"flux2", "hunyuanvideo15"}
# Patterns of module names, with dots as underscores and without prefixes, and their families.
_MARKS: Final = tuple(
    (re.compile(pattern), frozenset(names))
    for pattern, names in (
        (r"double_blocks_\d+_(img|txt)_", _AUTHORS),
        (r"single_blocks_\d+_", (*_AUTHORS, "flux3")),
        (
            r"(^|_)mode_blocks_(image_(cond_)?)?\d+_"
            r"|single_blocks_\d+_([qkv]_proj|attn_out|mlp_(in|out))$",
            ("flux3",),
        ),
        (r"single_transformer_blocks_\d+_attn_to_(qkv_mlp_proj|out$)", ("flux2",)),
        (r"(?<!single_)transformer_blocks_\d+_ff(_context)?_linear_(in|out)", ("flux2",)),
        (r"single_transformer_blocks_\d+_ff_linear_(in|out)", ("flux3",)),
        (r"single_transformer_blocks_\d+_(proj_mlp|proj_out)", _STREAMS),
        (
            r"(?<!single_)transformer_blocks_\d+_attn_(to_|add_)",
            (*_AUTHORS, "sd3", "qwen_image", "auraflow", "krea2", "minimax_h3"),
        ),
        (r"(?<!single_)transformer_blocks_\d+_(img|txt)_mlp_", ("qwen_image",)),
        (r"joint_blocks_\d+_", ("sd3",)),
        (r"joint_transformer_blocks_\d+_|(double|single)_layers_\d+_", ("auraflow",)),
        (r"(double|single)_stream_blocks_\d+_", ("hidream",)),
        (r"^layers_\d+_attention_to_", ("z_image", "ideogram4")),
        (r"^layers_\d+_(attention_o$|adaln_modulation)", ("ideogram4",)),
        (r"(noise|context)_refiner_\d+_attention_to_", ("z_image",)),
        (r"(layers|(noise|context)_refiner)_\d+_attn_to_", ("lumina2",)),
        (
            r"(noise|context)_refiner_\d+_(attention_(qkv|out)|feed_forward)|layers_\d+_attention_out",
            ("z_image", "lumina2"),
        ),
        (
            r"^layers_\d+_(attention_qkv|feed_forward)",
            ("z_image", "lumina2", "ideogram4"),
        ),
        (r"^blocks_\d+_((self|cross)_attn_\w+_proj|mlp_layer\d|adaln_modulation)", ("anima",)),
        (r"^blocks_\d+_(self_attn_[qkvo](_img)?$|ffn|attn[12]_)", ("wan",)),
        (
            r"(transformer_blocks|fusion_\w+_blocks)_\d+_(attn_to_gate|ff_(gate|up|down))"
            r"|(^|fusion_\w+_)blocks_\d+_(attn_(w[qkvo]|gate)|mlp_(gate|up|down))$",
            ("krea2",),
        ),
        (r"blocks_\d+_attn_(qkv|out)_proj|token_refiner_(refiner_)?blocks", ("minimax_h3",)),
        (r"^blocks_\d+_mlp_fc", ("pixart_sigma", "minimax_h3")),
        (r"^blocks_\d+_adaln_proj_", ("minimax_h3",)),
        (
            r"^blocks_\d+_(attn_(?!w[qkvo]|gate|(qkv|out)_proj)|cross_attn_(q|kv)_linear)",
            ("pixart_sigma",),
        ),
        (r"^blocks_\d+_cross_attn_[qkvo](_img)?$", ("wan",)),
        (
            r"^transformer_blocks_\d+_(attn[12]_to_|ff_net)",
            (
                *(*_STREAMS, "hunyuanvideo15", "sd3", "ltxvideo", "ltx2"),
                *("pixart_sigma", "sana", "anima", "minimax_h3"),
            ),
        ),
        (
            r"^transformer_blocks_\d+_attn[12]_to_",
            ("ltxvideo", "ltx2", "pixart_sigma", "sana", "sd3", "anima"),
        ),
        (
            r"^transformer_blocks_\d+_(audio_(attn|ff|to_video)|video_to_audio_attn)|"
            r"^transformer_blocks_\d+_attn[12]_to_gate_logits",
            ("ltx2",),
        ),
        (
            r"(down|up|mid)_blocks?_.*(attentions|resnets|samplers)_"
            r"|(input|output)_blocks_\d+_|middle_block_",
            ("sdxl", "stable_diffusion"),
        ),
    )
)


def families_of(modules: Collection[str], header: Mapping[str, str]) -> frozenset[str]:
    """Return the families that a LoRA can be for; empty if nothing tells.

    Args:
        modules: Its module names as stored.
        header: Strings of its header.
    """
    family = header.get("fsdp_tui.model_family", "")
    if family in _ALL:
        return frozenset((family,))
    if called := families_called(header.get(f"{PREFIX}architecture", "")):
        return called
    return _named(name for name in modules if not name.startswith(TEXT))


def _named(modules: Iterable[str]) -> frozenset[str]:
    """Return the families that have modules of all these names."""
    possible, marked = _ALL, False
    for module in modules:
        prefix = next((prefix for prefix in STYLES if module.startswith(prefix)), "")
        name = module.removeprefix(prefix).replace(".", "_")
        for pattern, names in _MARKS:
            if pattern.search(name):
                possible, marked = possible & names, True
    return possible if marked else frozenset()


def check_together(files: list[LoraFile]) -> None:
    """Reject files that are for different models or denoisers, or that use different naming.

    Raises:
        UserError: The files do not fit together.
    """
    _check_denoisers(files)
    first, styles = files[0], [file.style for file in files]
    for file, style in zip(files, styles, strict=True):
        if style != styles[0]:
            raise UserError(
                f"{first.path} has names of {styles[0]} and {file.path} of {style}",
                "merge files with the same names; an export has several",
            )
        mine, theirs = (families_of(each.modules, each.header) for each in (first, file))
        if mine and theirs and not mine & theirs:
            raise UserError(f"{first.path} is for {_or(mine)} and {file.path} for {_or(theirs)}")
        for module in first.modules.keys() & file.modules.keys():
            if _sides(first, module) != _sides(file, module):
                raise UserError(
                    f"{module} has other sizes in {file.path} than in {first.path}: "
                    "they are for different models"
                )


def expert_of(header: Mapping[str, str]) -> str:
    """Return which of two denoisers a LoRA's header says it is for; "" if unknown."""
    if component := header.get(COMPONENT):
        return component
    low, _, high = header.get(f"{PREFIX}timestep_range", "").partition(",")
    if low.isdigit() and high.isdigit() and (int(low) == 0) != (int(high) >= _STEPS - 1):
        return SECOND if int(low) == 0 else _FIRST
    flavour = header.get("fsdp_tui.model_flavour", "")
    experts = {"-high": _FIRST, "-low": SECOND}
    return next((name for end, name in experts.items() if flavour.endswith(end)), "")


def is_second(module: str) -> bool:
    """Return whether a module's name says that it belongs to the denoiser for low noise."""
    return module.startswith(f"{SECOND}.")


def _check_denoisers(files: list[LoraFile]) -> None:
    """Reject LoRAs for both denoisers of a model: in one file, both would act on one denoiser.

    Raises:
        UserError: The files are for different denoisers.
    """
    names = [_named_denoiser(file) for file in files]
    if SECOND not in names:  # then `transformer.` may mean either denoiser
        names = [expert_of(file.header) for file in files]
    experts = [(file, name) for file, name in zip(files, names, strict=True) if name]
    for file, name in experts[1:]:
        first, other = experts[0]
        if name != other:
            raise UserError(
                f"{first.path} is for {other} and {file.path} for {name}, which are two denoisers",
                "keep a file for each, or merge them --into the model",
            )


def _named_denoiser(file: LoraFile) -> str:
    """Return the denoiser that all module names of a LoRA agree on; "" if there is none."""
    modules = [module for module in file.modules if not module.startswith(TEXT)]
    prefixes = {module.partition(".")[0] for module in modules}
    return next(iter(prefixes)) if prefixes in ({SECOND}, {_FIRST}) else ""


def _sides(file: LoraFile, module: str) -> tuple[int, ...]:
    """Return a layer's outputs and inputs, ignoring kernels: a 1x1 convolution counts as linear."""
    parts = file.modules[module]
    return (parts["up"].shape[0], math.prod(parts["down"].shape[1:])) if "down" in parts else ()


def _or(names: Collection[str]) -> str:
    return " or ".join(sorted(names))


# -- info -----------------------------------------------------------------------------------
# Describe a LoRA file, for `fsdp-tui lora info`.


_LARGEST: Final = 5  # modules to list with their norms
_LONGEST: Final = 400  # characters shown of a header string


def info(file: LoraFile) -> dict[str, Any]:
    """Describe a LoRA, including the norms of its weight updates.

    Returns:
        JSON values. `alphas` are effective values, which for rsLoRA differ from the stored ones.

    Raises:
        UserError: An alpha is zero, or a value is not finite.
    """
    ranks: Counter[int] = Counter()
    alphas: Counter[float] = Counter()
    norms: dict[str, float] = {}
    for module, parts in file.modules.items():
        if "down" in parts:
            rank = file.rank(module)
            ranks[rank] += 1
            alphas[round(file.scale(module) * rank, 4)] += 1
        norms[module] = norm(file.read(module))
    dtypes = Counter(
        str(place.dtype).removeprefix("torch.")
        for parts in file.modules.values()
        for part, place in parts.items()
        if part != "alpha"
    )
    largest = sorted(norms, key=lambda module: -norms[module])[:_LARGEST]
    return {
        "path": str(file.path),
        "bytes": file.path.stat().st_size,
        "families": sorted(families_of(file.modules, file.header)),
        "names": file.style,
        "kind": "LoKr" if file.is_lokr else "DoRA" if file.is_dora else "LoRA",
        "modules": len(file.modules),
        "text_modules": sum(module.startswith(TEXT) for module in file.modules),
        "ranks": {str(rank): count for rank, count in sorted(ranks.items())},
        "alphas": {f"{alpha:g}": count for alpha, count in sorted(alphas.items())},
        "dtypes": dict(sorted(dtypes.items())),
        "norm": {
            "mean": sum(norms.values()) / len(norms),
            "largest": {module: norms[module] for module in largest},
        },
        "header": {
            name: text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
            for name, text in sorted(file.header.items())
        },
    }


def norm(parts: Parts) -> float:
    """Return the Frobenius norm of an adapter's weight update, without forming the product.

    ‖up · down‖² is the sum of (upᵀ up) ∘ (down downᵀ), and a Kronecker product's norm is the
    product of its factors' norms. DoRA's magnitudes are ignored, since they need the base weights.
    """
    if "lokr_w1" in parts:
        return float(parts["lokr_w1"].norm() * parts["lokr_w2"].norm())
    up, down = parts["up"].flatten(1).double(), parts["down"].flatten(1).double()
    return float(((up.T @ up) * (down @ down.T)).sum().clamp_min(0).sqrt())
