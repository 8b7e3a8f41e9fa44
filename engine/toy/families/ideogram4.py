"""A small Ideogram 4: every class, file and setting of the published one, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
)
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen3_vl
from engine.toy.components.parts import quieten
from engine.toy.components.tokenizers import QWEN_VL_CHAT, build_qwen_tokenizer
from engine.toy.components.weights import gains, one_thread
from engine.toy.families.flux2 import LATENT_CHANNELS, build_flux2_vae

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM: Final = 16
HEADS: Final = 4
HEAD_DIM: Final = 32

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "input_proj.weight", "llm_cond_proj.weight", "embed_image_indicator.weight"),
    (0.3, "*adaln_modulation.weight"),
    (2.0, "final_layer.linear.weight"),
    (0.1, "*to_out.0.weight", "*feed_forward.w2.weight"),  # before a norm: training tells sooner
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model, with as many layers of text as the pipeline counts."""
    tokenizer = build_qwen_tokenizer(parts.captions())
    tokenizer.chat_template = QWEN_VL_CHAT
    vae = build_flux2_vae(seed)
    with torch.no_grad():  # in the order of channels in which the pipeline applies them
        for values in (vae.bn.running_mean, vae.bn.running_var):
            values.copy_(values.view(LATENT_CHANNELS, 4).T.flatten())
    pipeline = Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000),
        vae=vae,
        text_encoder=build_qwen3_vl(
            tokenizer, TEXT_DIM, seed=seed, layers=QWEN3_VL_ACTIVATION_LAYERS[-1] + 1
        ).model,
        tokenizer=tokenizer,
        transformer=_build_transformer(seed, HEADS * hidden_scale),
        unconditional_transformer=_build_transformer(seed + 1, HEADS * hidden_scale),
    )
    parts.save(pipeline, model_dir, dtype)


@torch.no_grad()
def _build_transformer(seed: int, heads: int) -> Ideogram4Transformer2DModel:
    """Random; published: 18 heads of 256, 34 layers, as the defaults."""
    width = heads * HEAD_DIM
    transformer = parts.random_model(
        Ideogram4Transformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        adaln_dim=32,
        llm_features_dim=TEXT_DIM * len(QWEN3_VL_ACTIVATION_LAYERS),
        mrope_section=(6, 5, 5),
    )
    for block in transformer.layers:
        for gate in (1, 3):  # the pipeline's gates are tanh of these
            block.adaln_modulation.bias.chunk(4)[gate].add_(0.5)
    with one_thread():
        quieten(transformer.final_layer.linear.weight, transformer.input_proj.weight)
    return transformer
