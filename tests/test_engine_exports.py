"""Exports of one rank: what stock diffusers makes of them, and what happens when one fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from engine_support import toy_spec
from export_support import bytes_of, export_alone, recipe_of, trained_model
from safetensors import safe_open
from safetensors.torch import load_file

from engine.draws import keyed_generator
from engine.exports import model as whole_model
from engine.exports import place, writing
from engine.exports.components import files_of, take_over
from engine.exports.readback import DamagedError, VerifiedFile
from engine.exports.recipe import describe
from jobs.errors import UserError
from jobs.export_places import export_facts
from jobs.rundir import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DOUBLE_BLOCKS = r"^transformer_blocks\.\d+\.(attn\.(to_q|to_k|add_v_proj|to_out\.0)|ff\.net\.2)"


def picture(pipeline: FluxPipeline) -> NDArray[Any]:
    """What a stock pipeline makes of one prompt, seed and number of steps."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt="a red circle", height=64, width=64, num_inference_steps=2, guidance_scale=3.5,
        max_sequence_length=16, generator=keyed_generator(0), output_type="np",
    ).images[0]  # fmt: skip


# -- LoRA ----------------------------------------------------------------------------------


def test_an_exported_lora_gives_the_picture_of_the_trained_model(
    toy: Path, tmp_path: Path
) -> None:
    """With an alpha of its own, and under both kinds of names."""
    spec = toy_spec(toy, lora_rank=3, lora_alpha=5, lora_target_modules=None)
    spec = spec.model_copy(update={"lora_target_modules": None})
    model = trained_model(spec, toy / "model")
    with torch.no_grad():
        trained = picture(FluxPipeline.from_pretrained(toy / "model", transformer=model))
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    pipeline = FluxPipeline.from_pretrained(toy / "model")
    plain = picture(pipeline)
    pipeline.load_lora_weights(made.path)
    loaded = picture(pipeline)
    assert abs(loaded - trained).max() < 1e-5
    assert abs(plain - trained).max() > 1e-2
    assert made.warnings == ()


def test_kohyas_names_give_the_same_picture(toy: Path, tmp_path: Path) -> None:
    """Of double blocks: for the single ones diffusers' converter knows only the published width."""
    spec = toy_spec(toy, lora_rank=3, lora_alpha=5, lora_target_modules=[DOUBLE_BLOCKS])
    spec = spec.model_copy(update={"lora_target_modules": ["to_q", "to_k", "add_v_proj"]})
    model = trained_model(spec, toy / "model")
    for name, parameter in model.named_parameters():
        if name.startswith("single_transformer_blocks") and ".lora_" in name:
            parameter.data.zero_()
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    pictures = []
    for name in ("pytorch_lora_weights.safetensors", "t-kohya.safetensors"):
        tensors = load_file(made.path / name)
        tensors = {n: t for n, t in tensors.items() if "single" not in n}
        pipeline = FluxPipeline.from_pretrained(toy / "model")
        pipeline.load_lora_weights(tensors)
        pictures.append(picture(pipeline))
    assert abs(pictures[0] - pictures[1]).max() < 1e-5
    with torch.no_grad():
        trained = picture(FluxPipeline.from_pretrained(toy / "model", transformer=model))
    assert abs(pictures[1] - trained).max() < 1e-5
