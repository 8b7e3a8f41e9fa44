"""A small HiDream-I1: every class, every file and every setting, tiny sizes; with a Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    FlowMatchLCMScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    UniPCMultistepScheduler,
)

from engine.toy.components.clip_and_t5 import build_clip_with_projection, build_t5
from engine.toy.components.language_models import build_llama_lm
from engine.toy.components.parts import captions, open_gates, picture_vae, random_model, save
from engine.toy.components.tokenizers import (
    build_llama3_tokenizer,
    build_other_clip_tokenizer,
    build_t5_tokenizer,
    save_clip_vocabulary,
)
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

HEADS: Final = 2
HEAD_DIM: Final = 32
TEXT_DIM: Final = 64  # of each encoder
LLAMA_LAYERS: Final = 3
DOUBLE: Final = 2
SINGLE: Final = 2
SIDE: Final = 64
"""Latents of the largest image (published: 128); one that is not square is filled up to it."""

# Factors on the scale that keeps sizes: the stream is small, so that blocks count in it.
GAIN: Final = gains(
    (0.1, "x_embedder*", "caption_projection*"),
    (0.1, "*.to_out.weight", "*.to_out_t.weight", "*.w2.weight"),
    (0.3, "*adaLN_modulation*"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `HiDreamImagePipeline.save_pretrained`.

    The published ones have no Llama, `text_encoder_4` and `tokenizer_4`; this one has.
    """
    clip = build_other_clip_tokenizer(captions(), pad_token="<|endoftext|>", length=248)
    t5, llama = build_t5_tokenizer(captions()), build_llama3_tokenizer(captions())
    pipeline = HiDreamImagePipeline(
        scheduler=build_scheduler(flavour),
        vae=picture_vae(seed),
        text_encoder=build_clip_with_projection(clip, TEXT_DIM, seed=seed),
        tokenizer=clip,
        text_encoder_2=build_clip_with_projection(clip, TEXT_DIM, seed=seed + 1, hidden_act="gelu"),
        tokenizer_2=clip,
        text_encoder_3=build_t5(t5, TEXT_DIM, seed=seed),
        tokenizer_3=t5,
        text_encoder_4=build_llama_lm(llama, TEXT_DIM, seed=seed, layers=LLAMA_LAYERS),
        tokenizer_4=llama,
        transformer=build_transformer(HEADS * hidden_scale, seed=seed),
    )
    save(pipeline, model_dir, dtype)
    for name in ("tokenizer", "tokenizer_2"):
        save_clip_vocabulary(clip, model_dir / name)


def build_scheduler(flavour: str) -> Any:
    """Build the scheduler of Full; Dev's and Fast's are for few steps, each with new noise."""
    if flavour == "full":
        return UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
    return FlowMatchLCMScheduler(shift=6.0 if flavour == "dev" else 3.0)


@torch.no_grad()
def build_transformer(heads: int, *, seed: int) -> HiDreamImageTransformer2DModel:
    """Random, with open gates; published: 20 heads of 128, 16 double blocks and 32 single ones."""
    transformer = random_model(
        HiDreamImageTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=DOUBLE,
        num_single_layers=SINGLE,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        caption_channels=[TEXT_DIM, TEXT_DIM],
        text_emb_dim=2 * TEXT_DIM,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(HEAD_DIM // 2, HEAD_DIM // 4, HEAD_DIM // 4),
        max_resolution=(SIDE, SIDE),
        # One for each block; when there are no more, the last one again.
        llama_layers=[min(block, LLAMA_LAYERS - 1) for block in range(DOUBLE + SINGLE)],
    )
    for name, parameter in transformer.named_parameters():
        if name.endswith("block.adaLN_modulation.1.bias"):
            # Shift, scale and gate of attention, and of the feed-forward; text has its own.
            chunks = len(parameter) // transformer.inner_dim
            open_gates(parameter, chunks=chunks, gates=range(2, chunks, 3))
    return transformer
