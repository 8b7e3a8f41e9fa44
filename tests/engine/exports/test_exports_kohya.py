"""FLUX.1 adapters under kohya's names, read back by diffusers' own converter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from safetensors.torch import save_file

from engine.blocks.build import on_meta
from engine.diffusion.random_numbers import keyed_generator
from engine.families import load
from engine.families.shared import flux_kohya
from engine.families.shared.lora_names import Kohya
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

flux = load("flux")
KOHYA = Kohya(flux_kohya.rename, flux_kohya.METADATA)

# What people may name in lora_target_modules besides the family's own choice.
OTHERS = (
    r"((transformer_blocks\.\d+\.norm1(_context)?|single_transformer_blocks\.\d+\.norm|norm_out)"
    r"\.linear|x_embedder|context_embedder|proj_out|time_text_embed\..*linear_\d)"
)


def published_width() -> FluxTransformer2DModel:
    """One block of each kind as wide as in FLUX.1, on the meta device."""
    with on_meta():
        return FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)


def drawn_layers(targets: str, ranks: int = 3) -> dict[str, torch.Tensor]:
    """Adapters of the modules that a regular expression names, as diffusers names their tensors."""
    model, layers, draw = published_width(), {}, keyed_generator(7)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and re.fullmatch(targets, name):
            down, up = (ranks, module.in_features), (module.out_features, ranks)
            layers[f"{name}.lora_A.weight"] = torch.randn(down, generator=draw) / 50
            layers[f"{name}.lora_B.weight"] = torch.randn(up, generator=draw) / 50
    return layers


def changes(layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Module → what its adapter adds to its outputs for eight random inputs.

    Two adapters that agree on these have the same product, and it is not made: it is large.
    """
    found = {}
    for name, down in layers.items():
        if name.endswith(".lora_A.weight"):
            up = layers[name.replace("lora_A", "lora_B")].double()
            inputs = torch.randn(down.shape[1], 8, generator=keyed_generator(9)).double()
            found[name.removesuffix(".lora_A.weight")] = up @ (down.double() @ inputs)
    return found


def through_diffusers(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return FluxPipeline.lora_state_dict(path.parent, weight_name=path.name)


@pytest.mark.parametrize(
    "targets",
    [
        flux.LORA_TARGETS,
        OTHERS,
        r".*\.to_q",
        r".*(proj_mlp|to_v)",
        r".*(add_k_proj|add_v_proj|to_k)",
    ],
    ids=["ours", "others", "queries", "last members", "some"],
)
def test_every_layer_changes_by_the_same(targets: str, tmp_path: Path) -> None:
    layers = drawn_layers(targets)
    assert layers
    back = through_diffusers(KOHYA.convert(layers), tmp_path / "x.safetensors")
    wanted = changes(layers)
    # A layer that is fused with one that has an adapter comes back with one that adds nothing.
    found = {name.removeprefix("transformer."): t for name, t in changes(back).items()}
    assert wanted.keys() <= found.keys()
    for name, change in found.items():
        expected = wanted.get(name, torch.zeros_like(change))
        assert (change - expected).abs().max() < 1e-6 * max(1.0, float(expected.abs().max())), name


def test_fused_names_ranks_and_alphas_are_kohyas() -> None:
    tensors = KOHYA.convert(drawn_layers(flux.LORA_TARGETS))
    qkv = "lora_unet_double_blocks_0_img_attn_qkv"
    assert tensors[f"{qkv}.lora_down.weight"].shape == (9, 3072)
    assert tensors[f"{qkv}.lora_up.weight"].shape == (9216, 9)
    assert tensors[f"{qkv}.alpha"].item() == 9
    linear1 = "lora_unet_single_blocks_0_linear1"
    assert tensors[f"{linear1}.lora_up.weight"].shape == (3 * 3072 + 12288, 12)
    assert tensors[f"{linear1}.alpha"].item() == 12
    assert tensors["lora_unet_double_blocks_0_img_mlp_0.alpha"].item() == 3
    assert {name.split(".")[0] for name in tensors} == {
        qkv,
        linear1,
        "lora_unet_single_blocks_0_linear2",
        *(
            f"lora_unet_double_blocks_0_{part}"
            for part in (
                "img_attn_proj",
                "img_mlp_0",
                "img_mlp_2",
                "txt_attn_qkv",
                "txt_attn_proj",
                "txt_mlp_0",
                "txt_mlp_2",
            )
        ),
    }


def test_a_member_without_an_adapter_takes_no_rank() -> None:
    tensors = KOHYA.convert(drawn_layers(r"transformer_blocks\.0\.attn\.to_[qv]"))
    (name,) = {name.split(".")[0] for name in tensors}
    up = tensors[f"{name}.lora_up.weight"]
    assert up.shape == (9216, 6)
    assert not up[3072:6144].any()
    assert up[:3072, :3].all()
    assert up[6144:, 3:].all()


def test_a_module_that_bfl_does_not_have_is_named() -> None:
    layers = {
        "new_block.lora_A.weight": torch.ones(2, 4),
        "new_block.lora_B.weight": torch.ones(4, 2),
    }
    with pytest.raises(UserError, match="no name for new_block"):
        KOHYA.convert(layers)


@torch.no_grad()
def test_both_files_load_into_a_single_block_of_the_published_width(tmp_path: Path) -> None:
    """The forward with either is the same, fused layers included."""
    config = {
        "num_layers": 0,
        "num_single_layers": 1,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "in_channels": 16,
    }
    with on_meta():
        model = FluxTransformer2DModel(**config)
    model = model.to_empty(device="cpu")
    draw = keyed_generator(1)
    for parameter in model.parameters():
        parameter.normal_(std=0.02, generator=draw)
    layers = {n: t for n, t in drawn_layers(flux.LORA_TARGETS).items() if n.startswith("single")}
    model.add_adapter(LoraConfig(r=3, lora_alpha=3, target_modules=flux.LORA_TARGETS), "default")
    inputs = {
        "hidden_states": torch.randn(1, 4, 16, generator=draw),
        "encoder_hidden_states": torch.randn(1, 2, 32, generator=draw),
        "pooled_projections": torch.randn(1, 32, generator=draw),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(2, 3),
    }
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(layers[name.replace(".default.", ".")])
    trained = model(**inputs, return_dict=False)[0]
    model.delete_adapters("default")
    plain = model(**inputs, return_dict=False)[0]
    save_file(KOHYA.convert(layers), tmp_path / "k.safetensors")
    pipeline = FluxPipeline(
        transformer=model,
        **dict.fromkeys(
            ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        ),
    )
    pipeline.load_lora_weights(tmp_path, weight_name="k.safetensors")
    loaded = model(**inputs, return_dict=False)[0]
    size = float(trained.abs().max())
    assert (loaded - trained).abs().max() < 1e-5 * size
    assert (plain - trained).abs().max() > 1e-3 * size
