"""A small HunyuanVideo: every class, file and setting of the published one, tiny sizes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)

from engine.toy.components import parts, tokenizers
from engine.toy.components.clip_and_t5 import build_clip
from engine.toy.components.language_models import build_llama
from engine.toy.components.parts import mislead, open_gates, quieten
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM, CLIP_DIM = 64, 32
HEADS, HEAD_DIM = 4, 32
ROTARY_AXES = (8, 12, 12)

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.3, "x_embedder.proj.weight"),
    (1.0, "context_embedder*"),
    (0.1, "*to_out.0.weight", "*to_add_out.weight", "*net.2.weight"),
    (0.1, "*single_transformer_blocks*proj_out.weight"),
    (0.1, "norm_out.linear.weight"),
    (0.3, "*norm.linear.weight", "*norm1.linear.weight", "*norm1_context.linear.weight"),
    # Training and sampling at different guidance should not be far apart.
    (0.3, "time_text_embed.guidance*"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model; there is one flavour."""
    llama_tokenizer = tokenizers.build_llama3_tokenizer(parts.captions())
    clip_tokenizer = tokenizers.build_clip_tokenizer(parts.captions())
    pipeline = HunyuanVideoPipeline(
        text_encoder=build_llama(llama_tokenizer, TEXT_DIM, seed=seed),
        tokenizer=llama_tokenizer,
        transformer=_build_transformer(seed, HEADS * hidden_scale),
        vae=_build_vae(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=build_clip(clip_tokenizer, CLIP_DIM, seed=seed),
        tokenizer_2=clip_tokenizer,
    )
    parts.save(pipeline, model_dir, dtype)
    tokenizers.save_clip_vocabulary(clip_tokenizer, model_dir / "tokenizer_2")
    _name_tokenizer_as_published(model_dir)


def _name_tokenizer_as_published(model_dir: Path) -> None:
    """Call the tokenizer by the class that it had when the model was published."""
    for path, change in (
        (model_dir / "model_index.json", {"tokenizer": ["transformers", "LlamaTokenizerFast"]}),
        (model_dir / "tokenizer" / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
    ):
        values = json.loads(path.read_text(encoding="utf-8")) | change
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _build_transformer(seed: int, heads: int) -> HunyuanVideoTransformer3DModel:
    transformer = parts.random_model(
        HunyuanVideoTransformer3DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=16,
        out_channels=16,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=2,
        patch_size_t=1,
        qk_norm="rms_norm",
        guidance_embeds=True,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=CLIP_DIM,
        rope_theta=256.0,
        rope_axes_dim=ROTARY_AXES,
    )
    for block in transformer.transformer_blocks:
        for norm in (block.norm1, block.norm1_context):
            open_gates(norm.linear.bias, chunks=6, gates=(2, 5))
    for block in transformer.single_transformer_blocks:
        open_gates(block.norm.linear.bias, chunks=3, gates=(2,))
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.x_embedder.proj.weight)
    mislead(transformer.proj_out.bias, seed)
    return transformer


def _build_vae(seed: int) -> AutoencoderKLHunyuanVideo:
    """Random; its latents of toy images have mean 0, and the factor that makes their size 1."""
    vae = parts.random_model(
        AutoencoderKLHunyuanVideo,
        seed=seed,
        latent_channels=16,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    )
    parts.standardize(vae, vae.quant_conv.bias, seed)
    return vae
