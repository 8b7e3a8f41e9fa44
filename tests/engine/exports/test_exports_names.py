"""Adapters under the names of ComfyUI and kohya's scripts: those of the published checkpoints.

`LAYOUTS` is written from the checkpoints that the models' authors, or ComfyUI, published: every
linear layer of a block with its shape. What diffusers makes of such a checkpoint says what each of
them is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils

from engine.blocks.build import on_meta
from engine.diffusion.random_numbers import keyed_generator
from engine.exports import lora
from engine.families import load
from engine.loras.kinds import families_of
from jobs.errors import UserError
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

RANK = 3

Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Published:
    """A model as it was published.

    Attributes:
        config: Of its denoiser in diffusers, which we have.
        changes: Of that, so that there is one block of each kind.
        layout: The authors' module → outputs and inputs.
        converter: Reads such a checkpoint in diffusers; none where it has none.
    """

    config: str
    changes: dict[str, Any]
    layout: Shapes
    converter: str | None = None


def square(width: int, *names: str) -> Shapes:
    return dict.fromkeys(names, (width, width))


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def streams(width: int, hidden: int, joined: int | None = None) -> Shapes:
    """Blocks of FLUX and its relatives: two streams, then one.

    Args:
        width: Of a token.
        hidden: Of the feed-forward.
        joined: What its first layer gives, where it has gates.
    """
    joined = joined or hidden
    double = {
        **{f"{side}_attn.qkv": (3 * width, width) for side in ("img", "txt")},
        **square(width, "img_attn.proj", "txt_attn.proj"),
        **{f"{side}_mlp.0": (joined, width) for side in ("img", "txt")},
        **{f"{side}_mlp.2": (width, hidden) for side in ("img", "txt")},
    }
    single = {"linear1": (3 * width + joined, width), "linear2": (width, width + hidden)}
    return prefixed("double_blocks.0.", double) | prefixed("single_blocks.0.", single)


def next_dit(width: int, keys: int, hidden: int) -> Shapes:
    """Blocks of Lumina 2 and Z-Image; `keys` of keys and of values."""
    block = {
        "attention.qkv": (width + 2 * keys, width),
        "attention.out": (width, width),
        "feed_forward.w1": (hidden, width),
        "feed_forward.w3": (hidden, width),
        "feed_forward.w2": (width, hidden),
    }
    return {
        name: shape
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for name, shape in prefixed(f"{blocks}.0.", block).items()
    }


def sd3_block(width: int, *, last: bool) -> Shapes:
    x_block = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.fc1": (4 * width, width),
        "mlp.fc2": (width, 4 * width),
    }
    context = {"attn.qkv": x_block["attn.qkv"]} if last else x_block
    second = {"attn2.qkv": (3 * width, width), "attn2.proj": (width, width)}
    return prefixed("x_block.", x_block | ({} if last else second)) | prefixed(
        "context_block.", context
    )


def two_attentions(width: int, hidden: int, names: tuple[str, ...], *ends: str) -> Shapes:
    """Blocks with attention to themselves and to text, whose parts are not fused."""
    return square(width, *names) | {ends[0]: (hidden, width), ends[1]: (width, hidden)}


def krea2_block(width: int, keys: int, hidden: int) -> Shapes:
    """A block of Krea 2; `keys` of keys and of values."""
    return {
        **square(width, "attn.wq", "attn.gate", "attn.wo"),
        **dict.fromkeys(("attn.wk", "attn.wv"), (keys, width)),
        **dict.fromkeys(("mlp.gate", "mlp.up"), (hidden, width)),
        "mlp.down": (width, hidden),
    }


def hidream() -> Shapes:
    width = 2560

    def forward(name: str, hidden: int) -> Shapes:
        return {
            f"{name}.w1": (hidden, width),
            f"{name}.w3": (hidden, width),
            f"{name}.w2": (width, hidden),
        }

    parts = ("to_q", "to_k", "to_v", "to_out")
    own = square(width, *(f"attn1.{part}" for part in parts))
    own |= forward("ff_i.shared_experts", 3584)
    text = square(width, *(f"attn1.{part}_t" for part in parts)) | forward("ff_t", 6912)
    return prefixed("double_stream_blocks.0.block.", own | text) | prefixed(
        "single_stream_blocks.0.block.", own
    )


ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
ONE_OF_EACH = {"num_layers": 1, "num_single_layers": 1}
GATED = {"c_fc1": (8192, 3072), "c_fc2": (8192, 3072), "c_proj": (3072, 8192)}

LAYOUTS = {
    "flux": Published(
        "black-forest-labs--FLUX.1-dev",
        ONE_OF_EACH,
        streams(3072, 12288),
        "convert_flux_transformer_checkpoint_to_diffusers",
    ),
    "chroma": Published(
        "lodestones--Chroma1-HD",
        ONE_OF_EACH,
        streams(3072, 12288),
        "convert_chroma_transformer_checkpoint_to_diffusers",
    ),
    "hunyuanvideo": Published(
        "hunyuanvideo-community--HunyuanVideo",
        ONE_OF_EACH,
        streams(3072, 12288),
        "convert_hunyuan_video_transformer_to_diffusers",
    ),
    "hunyuanvideo15": Published(
        "hunyuanvideo-community--HunyuanVideo-1.5-Diffusers-480p_t2v",
        {"num_layers": 1},
        {n: s for n, s in streams(2048, 8192).items() if n.startswith("double_blocks.")},
    ),
    "flux2": Published(
        "black-forest-labs--FLUX.2-klein-base-4B",
        ONE_OF_EACH,
        streams(3072, 9216, 18432),
        "convert_flux2_transformer_checkpoint_to_diffusers",
    ),
    "qwen_image": Published(
        "Qwen--Qwen-Image",
        {"num_layers": 1},
        prefixed(
            "transformer_blocks.0.",
            {
                **square(3072, *(f"attn.{part}" for part in ATTENTION)),
                **{f"{side}_mlp.net.0.proj": (12288, 3072) for side in ("img", "txt")},
                **{f"{side}_mlp.net.2": (3072, 12288) for side in ("img", "txt")},
            },
        ),
    ),
    "z_image": Published(
        "Tongyi-MAI--Z-Image",
        {"n_layers": 1, "n_refiner_layers": 1},
        next_dit(3840, 3840, 10240),
        "convert_z_image_transformer_checkpoint_to_diffusers",
    ),
    "lumina2": Published(
        "Alpha-VLLM--Lumina-Image-2.0",
        {"num_layers": 1, "num_refiner_layers": 1},
        next_dit(2304, 768, 9216),
        "convert_lumina2_to_diffusers",
    ),
    "sd3": Published(
        "stabilityai--stable-diffusion-3.5-medium",
        {"num_layers": 2, "dual_attention_layers": [0]},
        prefixed("joint_blocks.0.", sd3_block(1536, last=False))
        | prefixed("joint_blocks.1.", sd3_block(1536, last=True)),
        "convert_sd3_transformer_checkpoint_to_diffusers",
    ),
    "wan": Published(
        "Wan-AI--Wan2.1-I2V-14B-480P-Diffusers",  # as wide as the smallest text-to-video model
        {"num_layers": 1, "num_attention_heads": 12, "ffn_dim": 8960, "added_kv_proj_dim": 1536},
        prefixed(
            "blocks.0.",
            two_attentions(
                1536,
                8960,
                (
                    *(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"),
                    *("cross_attn.k_img", "cross_attn.v_img"),
                ),
                "ffn.0",
                "ffn.2",
            ),
        ),
        "convert_wan_transformer_to_diffusers",
    ),
    "auraflow": Published(
        "fal--AuraFlow-v0.3",
        {"num_mmdit_layers": 1, "num_single_dit_layers": 1},
        prefixed(
            "double_layers.0.",
            {
                **square(3072, *(f"attn.w{side}{part}" for side in (1, 2) for part in "qkvo")),
                **prefixed("mlpX.", GATED),
                **prefixed("mlpC.", GATED),
            },
        )
        | prefixed(
            "single_layers.0.",
            {
                **square(3072, *(f"attn.w1{part}" for part in "qkvo")),
                **prefixed("mlp.", GATED),
            },
        ),
        "convert_auraflow_transformer_checkpoint_to_diffusers",
    ),
    "pixart_sigma": Published(
        "PixArt-alpha--PixArt-Sigma-XL-2-1024-MS",
        {"num_layers": 1},
        prefixed(
            "blocks.0.",
            {
                "attn.qkv": (3456, 1152),
                "cross_attn.kv_linear": (2304, 1152),
                **two_attentions(
                    1152,
                    4608,
                    ("attn.proj", "cross_attn.q_linear", "cross_attn.proj"),
                    "mlp.fc1",
                    "mlp.fc2",
                ),
            },
        ),
    ),
    "anima": Published(
        "circlestone-labs--Anima-Base-v1.0-Diffusers",
        {"num_layers": 1},
        prefixed(
            "blocks.0.",
            {
                **two_attentions(
                    2048,
                    8192,
                    tuple(
                        f"{kind}_attn.{part}_proj"
                        for kind in ("self", "cross")
                        for part in ("q", "k", "v", "output")
                    ),
                    "mlp.layer1",
                    "mlp.layer2",
                ),
                **{f"cross_attn.{part}_proj": (2048, 1024) for part in "kv"},
            },
        ),
        "convert_cosmos_transformer_checkpoint_to_diffusers",
    ),
    "flux3": Published(
        "black-forest-labs--flux-3-image-klein-base",
        {"num_layers": 1, "num_single_layers": 1},
        {
            name: shape
            for blocks in ("content_mode_blocks.image", "txt_mode_blocks", "single_blocks")
            for name, shape in prefixed(
                f"{blocks}.0.",
                {
                    **square(3072, "q_proj", "k_proj", "v_proj", "attn_out"),
                    "mlp_in": (2 * 9216, 3072),
                    "mlp_out": (3072, 9216),
                },
            ).items()
        },
        "convert_flux3_transformer_checkpoint_to_diffusers",
    ),
    "ideogram4": Published(
        "CalamitousFelicitousness--Ideogram-4-bf16-Diffusers",
        {"num_layers": 1},
        prefixed(
            "layers.0.",
            {
                "attention.qkv": (13824, 4608),
                "attention.o": (4608, 4608),
                "feed_forward.w1": (12288, 4608),
                "feed_forward.w3": (12288, 4608),
                "feed_forward.w2": (4608, 12288),
            },
        ),
    ),
    "krea2": Published(
        "krea--Krea-2-Raw",
        {"num_layers": 1, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
        prefixed("blocks.0.", krea2_block(6144, 1536, 16384))
        | prefixed("txtfusion.layerwise_blocks.0.", krea2_block(2560, 2560, 6912))
        | prefixed("txtfusion.refiner_blocks.0.", krea2_block(2560, 2560, 6912)),
        "convert_krea2_transformer_checkpoint_to_diffusers",
    ),
    "minimax_h3": Published(
        "MiniMaxAI--MiniMax-H3",
        {"num_layers": 1, "num_refiner_layers": 1},
        {
            name: shape
            for blocks in ("blocks", "token_refiner.blocks")
            for name, shape in prefixed(
                f"{blocks}.0.",
                {
                    "attn.qkv_proj": (3 * 7168, 5376),
                    "attn.out_proj": (5376, 7168),
                    "mlp.fc1": (2 * 14336, 5376),
                    "mlp.fc2": (5376, 14336),
                },
            ).items()
        },
        "convert_minimax_h3_transformer_checkpoint_to_diffusers",
    ),
    "hidream": Published(
        "HiDream-ai--HiDream-I1-Full",
        ONE_OF_EACH,
        hidream(),
        "convert_hidream_transformer_to_diffusers",
    ),
    "ltxvideo": Published(
        "Lightricks--LTX-Video",
        {"num_layers": 1},
        prefixed(
            "transformer_blocks.0.",
            two_attentions(
                2048,
                8192,
                tuple(f"attn{number}.{part}" for number in (1, 2) for part in ATTENTION[:4]),
                "ff.net.0.proj",
                "ff.net.2",
            ),
        ),
        "convert_ltx_transformer_checkpoint_to_diffusers",
    ),
    # `LTX_2_0_TRANSFORMER_KEYS_RENAME_DICT` of diffusers' script renames none of these; the library
    # has no converter of its own.
    "ltx2": Published(
        "Lightricks--LTX-2",
        {"num_layers": 1},
        prefixed(
            "transformer_blocks.0.",
            two_attentions(
                4096,
                16384,
                tuple(f"attn{number}.{part}" for number in (1, 2) for part in ATTENTION[:4]),
                "ff.net.0.proj",
                "ff.net.2",
            ),
        ),
    ),
}

# The files that a LoRA is exported to; `tests/engine/families/test_sdxl_kohya.py` and
# `test_stable_diffusion.py` beside it have the names of U-Nets.
FORMATS = {
    **dict.fromkeys(
        (
            "flux",
            "chroma",
            "sdxl",
            "stable_diffusion",
            "sd3",
            "lumina2",
            "flux2",
            "qwen_image",
            "wan",
            "anima",
            "krea2",
            "ideogram4",
        ),
        ("diffusers", "kohya"),
    ),
    **dict.fromkeys(
        ("hunyuanvideo", "hunyuanvideo15", "z_image"), ("diffusers", "kohya", "comfyui")
    ),
    **dict.fromkeys(
        ("auraflow", "pixart_sigma", "hidream", "ltxvideo", "ltx2", "minimax_h3", "flux3"),
        ("diffusers", "comfyui"),
    ),
    "sana": ("diffusers",),  # ComfyUI has no Sana, and no script of kohya's trains it
}


def test_every_family_is_exported_for_every_tool_that_has_it() -> None:
    assert {name: load(name).lora_formats for name in FAMILIES} == FORMATS
    assert LAYOUTS.keys() == FAMILIES.keys() - {"sdxl", "stable_diffusion", "sana"}


# What converters of diffusers look at besides the blocks' layers.
LOOKED_AT = {
    "chroma": {"distilled_guidance_layer.layers.0.in_layer.weight": (1,)},
    "sd3": {"context_embedder.weight": (1536, 1)},
}


@cache
def layers_of(name: str) -> dict[str, torch.Tensor]:
    """An adapter of the family's own layers, in the published width, as diffusers names it."""
    family, published = load(name), LAYOUTS[name]
    path = files("jobs") / "models" / "published" / f"{published.config}.json"
    config = json.loads(path.read_text(encoding="utf-8")) | published.changes
    with on_meta():
        model = getattr(diffusers, FAMILIES[name].transformer).from_config(config)
    layers, draw = {}, keyed_generator(7)
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and re.fullmatch(family.LORA_TARGETS, module_name):
            down, up = (RANK, module.in_features), (module.out_features, RANK)
            layers[f"{module_name}.lora_A.weight"] = torch.randn(down, generator=draw)
            layers[f"{module_name}.lora_B.weight"] = torch.randn(up, generator=draw)
    return layers


def adapters(tensors: Mapping[str, torch.Tensor], down: str, up: str, *other: str) -> Any:
    """Key of a module → its down and up; nothing but these and `other` may be there."""
    keys = {name.removesuffix(down) for name in tensors if name.endswith(down)}
    assert tensors.keys() == {key + end for key in keys for end in (down, up, *other)}
    return {key: (tensors[key + down], tensors[key + up]) for key in keys}


def in_comfyui(name: str) -> dict[str, Any]:
    style = load(name).COMFYUI
    assert style is not None
    found = style.convert(layers_of(name))
    return {
        key.removeprefix("diffusion_model."): adapter
        for key, adapter in adapters(found, ".lora_A.weight", ".lora_B.weight").items()
    }


def check_shapes(found: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]) -> None:
    assert found.keys() == shapes.keys()
    for key, (down, up) in found.items():
        assert (up.shape[0], down.shape[1]) == shapes[key], key
        assert up.shape[1] == down.shape[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_comfyuis_keys_are_those_of_the_published_checkpoint(name: str) -> None:
    """It reads `diffusion_model.<module>` of any model."""
    check_shapes(in_comfyui(name), LAYOUTS[name].layout)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "kohya" in FORMATS[name]])
def test_kohyas_keys_are_the_modules_of_its_scripts(name: str) -> None:
    """ComfyUI reads `lora_unet_<module>` of any model too, where the modules have its names."""
    style = load(name).KOHYA
    assert style is not None
    assert style.METADATA["ss_network_module"].startswith("networks.lora")
    shapes = LAYOUTS[name].layout
    if name == "hunyuanvideo":
        shapes = {tencent(module): shape for module, shape in shapes.items()}
    if name == "hunyuanvideo15":  # in Tencent's model, too, query, key and value are three
        shapes = {
            tencent(module).replace("_qkv", f"_{part}"): (
                (outputs // 3, inputs) if "qkv" in module else (outputs, inputs)
            )
            for module, (outputs, inputs) in shapes.items()
            for part in "qkv"
        }
    if name == "z_image":  # musubi-tuner has modules of their own for query, key and value
        layers = layers_of(name)
        shapes = {
            key.removesuffix(".lora_A.weight"): (
                layers[key.replace("lora_A", "lora_B")].shape[0],
                down.shape[1],
            )
            for key, down in layers.items()
            if ".lora_A." in key
        }
    tensors = style.convert(layers_of(name))
    found = adapters(tensors, ".lora_down.weight", ".lora_up.weight", ".alpha")
    assert all(tensors[f"{key}.alpha"] == len(down) for key, (down, _) in found.items())
    check_shapes(
        found, {"lora_unet_" + module.replace(".", "_"): shape for module, shape in shapes.items()}
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_names_tell_whose_a_lora_can_be(name: str) -> None:
    """In every style: a family without a mark would be taken for none, or for another."""
    family, layers = load(name), layers_of(name)
    for style in filter(None, (family.KOHYA, family.COMFYUI)):
        modules = {key.partition(".lora_")[0] for key in style.convert(layers) if ".lora_" in key}
        assert name in families_of(modules, {})
    assert name in families_of({key.partition(".lora_")[0] for key in layers}, {})


# What a LoKr's names begin with where several layers of diffusers are one in ComfyUI.
FUSED = {
    **dict.fromkeys(("flux", "chroma", "flux2", "sd3", "lumina2", "z_image"), "lycoris_"),
    "pixart_sigma": "transformer.",
    **dict.fromkeys(("hunyuanvideo", "hunyuanvideo15", "minimax_h3", "ideogram4")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_lokr_has_a_name_for_each_layer_or_for_none(name: str) -> None:
    """Of the published checkpoint, where its layers are those of diffusers."""
    family, shapes = load(name), {}
    for key, down in layers_of(name).items():
        if key.endswith(".lora_A.weight"):
            up = layers_of(name)[key.replace("lora_A", "lora_B")]
            shapes[key.removesuffix(".lora_A.weight")] = (len(up), down.shape[1])
    layers = {}
    for module, (rows, columns) in shapes.items():
        layers[f"{module}.lokr_w1"] = torch.ones(2, 2)
        layers[f"{module}.lokr_w2_a"] = torch.ones(rows // 2, 3)
        layers[f"{module}.lokr_w2_b"] = torch.ones(3, columns // 2)
    assert family.COMFYUI is not None
    if FUSED.get(name, "") is None:
        with pytest.raises(UserError, match="a Kronecker product has no parts"):
            lora.named(family.COMFYUI, layers)
        return
    found = lora.named(family.COMFYUI, layers)
    ends = ("lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha")
    keys = {key.removesuffix(".lokr_w1") for key in found if key.endswith(".lokr_w1")}
    assert found.keys() == {f"{key}.{end}" for key in keys for end in ends}
    if prefix := FUSED.get(name):
        flat = "_" if prefix.endswith("_") else "."
        assert keys == {prefix + module.replace(".", flat) for module in shapes}
        return
    assert keys == {f"diffusion_model.{module}" for module in LAYOUTS[name].layout}
    for module, shape in LAYOUTS[name].layout.items():
        key = f"diffusion_model.{module}"
        assert found[f"{key}.alpha"].item() == 3
        assert (len(found[f"{key}.lokr_w2_a"]) * 2, found[f"{key}.lokr_w2_b"].shape[1] * 2) == shape


class Checkpoint(dict[str, torch.Tensor]):
    """A published checkpoint of which only the adapters' layers matter."""

    def __init__(self, weights: Mapping[str, torch.Tensor], layout: Shapes) -> None:
        super().__init__(weights)
        self._layout = layout

    def pop(self, key: str, *default: Any) -> Any:
        if key in self or default:
            return super().pop(key, *default)
        outputs, _ = self._layout.get(key.removesuffix(".bias"), (12, 12))
        return torch.zeros(outputs)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].converter])
def test_every_layer_changes_by_the_same_as_in_diffusers(name: str) -> None:
    """Diffusers reads the authors' checkpoint, whose weights here are the adapters' products.

    With eight inputs instead of all: what is fused, it parts by outputs.
    """
    published = LAYOUTS[name]
    assert published.converter is not None

    def change(down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        inputs = torch.randn(down.shape[1], 8, generator=keyed_generator(9))
        return up @ (down @ inputs)

    named = tencent if name == "hunyuanvideo" else str
    weights = {
        f"{named(module)}.weight": change(down, up)
        for module, (down, up) in in_comfyui(name).items()
    }
    weights |= {key: torch.zeros(shape) for key, shape in LOOKED_AT.get(name, {}).items()}
    convert = getattr(single_file_utils, published.converter)
    read = convert(Checkpoint(weights, published.layout), config={})
    layers = layers_of(name)
    for key, down in layers.items():
        if key.endswith(".lora_A.weight"):
            module = key.removesuffix(".lora_A.weight")
            expected = change(down, layers[f"{module}.lora_B.weight"])
            assert torch.allclose(read[f"{module}.weight"], expected, rtol=1e-4, atol=1e-3), module


def tencent(module: str) -> str:
    """A module of HunyuanVideo as Tencent named it; ComfyUI names it as FLUX.1's."""
    for theirs, ours in (("_attn.", "_attn_"), ("_mlp.0", "_mlp.fc1"), ("_mlp.2", "_mlp.fc2")):
        module = module.replace(theirs, ours)
    return module
