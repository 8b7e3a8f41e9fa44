"""SDXL adapters under kohya's names, read back by diffusers' own converter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import save_file

from engine.blocks.build import on_meta
from engine.diffusion.random_numbers import keyed_generator
from engine.families import load
from engine.families.shared import sdxl_kohya
from engine.families.shared.lora_names import Kohya
from engine.toy import write_toy
from jobs.errors import UserError
from jobs.models.model_config import find_target

if TYPE_CHECKING:
    from pathlib import Path

RANK = 3
KOHYA = Kohya(sdxl_kohya.rename, sdxl_kohya.METADATA)
# What people may name in lora_target_modules: every linear layer and every convolution.
EVERYTHING = r".*"
TRANSFORMERS = r".*attentions\.\d+\..*"

# Of kohya's scripts, by their own UNet (`sdxl_original_unet.py`): module of diffusers → theirs.
KNOWN = {
    "conv_in": "input_blocks_0_0",
    "down_blocks.0.resnets.1.conv1": "input_blocks_2_0_in_layers_2",
    "down_blocks.0.downsamplers.0.conv": "input_blocks_3_0_op",
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (
        "input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    ),
    "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.2": (
        "input_blocks_8_1_transformer_blocks_9_ff_net_2"
    ),
    "mid_block.attentions.0.proj_in": "middle_block_1_proj_in",
    "mid_block.resnets.1.conv2": "middle_block_2_out_layers_3",
    "up_blocks.0.attentions.2.transformer_blocks.3.attn2.to_out.0": (
        "output_blocks_2_1_transformer_blocks_3_attn2_to_out_0"
    ),
    "up_blocks.0.upsamplers.0.conv": "output_blocks_2_2_conv",
    "up_blocks.1.resnets.0.conv_shortcut": "output_blocks_3_0_skip_connection",
    "up_blocks.2.resnets.2.time_emb_proj": "output_blocks_8_0_emb_layers_1",
    "add_embedding.linear_2": "label_emb_0_2",
    "conv_out": "out_2",
}


def published_layout() -> UNet2DConditionModel:
    """Every module of the published UNet, a tenth as wide and more, on the meta device."""
    narrow = {"block_out_channels": (32,) * 3, "attention_head_dim": 2, "cross_attention_dim": 32}
    with on_meta():
        return UNet2DConditionModel.from_config(find_target("sdxl").config | narrow)


def drawn_layers(
    targets: str, model: UNet2DConditionModel | None = None
) -> dict[str, torch.Tensor]:
    """Adapters of the modules that a regular expression names, as diffusers names their tensors."""
    layers, draw = {}, keyed_generator(7)
    for name, module in (model or published_layout()).named_modules():
        if not re.fullmatch(targets, name):
            continue
        if isinstance(module, torch.nn.Linear):
            down, up = (RANK, module.in_features), (module.out_features, RANK)
        elif isinstance(module, torch.nn.Conv2d):
            down = (RANK, module.in_channels, *module.kernel_size)
            up = (module.out_channels, RANK, 1, 1)
        else:
            continue
        layers[f"{name}.lora_A.weight"] = torch.randn(down, generator=draw) / 5
        layers[f"{name}.lora_B.weight"] = torch.randn(up, generator=draw) / 5
    return layers


@pytest.mark.parametrize(
    "targets",
    [load("sdxl").LORA_TARGETS, TRANSFORMERS, EVERYTHING],
    ids=["ours", "transformers", "everything"],
)
def test_diffusers_reads_the_same_tensors_of_the_same_modules(targets: str, tmp_path: Path) -> None:
    layers = drawn_layers(targets)
    assert layers
    file = tmp_path / "x.safetensors"
    tensors = KOHYA.convert(layers)
    save_file(tensors, file)
    read, alphas = StableDiffusionXLPipeline.lora_state_dict(
        tmp_path, weight_name=file.name, unet_config=published_layout().config
    )
    found = {_as_peft(name.removeprefix("unet.")): tensor for name, tensor in read.items()}
    assert found.keys() == layers.keys()
    assert all(torch.equal(found[name], layers[name]) for name in layers)
    assert len(alphas) == len(layers) / 2
    assert set(alphas.values()) == {RANK}


def _as_peft(name: str) -> str:
    """Diffusers' older names, which its converter makes."""
    for old, new in (
        ("_lora.down.", ".lora_A."),
        ("_lora.up.", ".lora_B."),
        (".lora.down.", ".lora_A."),
        (".lora.up.", ".lora_B."),
        (".processor.", "."),
        ("to_out.lora_", "to_out.0.lora_"),
    ):
        name = name.replace(old, new)
    return name


def test_the_names_are_kohyas_own() -> None:
    for module, name in KNOWN.items():
        layers = {
            f"{module}.lora_A.weight": torch.ones(2, 4),
            f"{module}.lora_B.weight": torch.ones(4, 2),
        }
        assert set(KOHYA.convert(layers)) == {
            f"lora_unet_{name}.{part}" for part in ("lora_down.weight", "lora_up.weight", "alpha")
        }


@torch.no_grad()
def test_both_files_make_the_same_picture(tmp_path: Path) -> None:
    root = write_toy(tmp_path / "toy", "sdxl", pictures=1).model
    pipeline = StableDiffusionXLPipeline.from_pretrained(root)
    pipeline.set_progress_bar_config(disable=True)
    layers = drawn_layers(load("sdxl").LORA_TARGETS, pipeline.unet)
    save_file({f"unet.{n}": t for n, t in layers.items()}, tmp_path / "diffusers.safetensors")
    save_file(KOHYA.convert(layers), tmp_path / "kohya.safetensors")
    pictures = []
    for name in (None, "diffusers", "kohya"):
        if name is not None:
            pipeline.load_lora_weights(tmp_path, weight_name=f"{name}.safetensors")
        pictures.append(
            pipeline(
                "a red circle",
                height=64,
                width=64,
                num_inference_steps=2,
                output_type="np",
                generator=torch.Generator().manual_seed(1),
            ).images
        )
        pipeline.unload_lora_weights()
    assert abs(pictures[1] - pictures[2]).max() < 1e-5
    assert abs(pictures[1] - pictures[0]).max() > 1e-2


def test_a_module_that_has_no_counterpart_is_named() -> None:
    layers = {
        "down_blocks.0.resnets.0.new.lora_A.weight": torch.ones(2, 4),
        "down_blocks.0.resnets.0.new.lora_B.weight": torch.ones(4, 2),
    }
    with pytest.raises(UserError, match=r"kohya has no name for down_blocks\.0\.resnets\.0\.new"):
        KOHYA.convert(layers)
