"""A small MiniMax-H3: every class, file and setting that its jobs read, tiny sizes.

The published index also names `transformer_ref`, for videos from references; so does this one, and
it has no such folder.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Blocks,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen3_vl, save_qwen3_vl_processor
from engine.toy.components.tokenizers import build_qwen_tokenizer
from engine.toy.components.weights import gains
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

HEADS: Final = 3  # attention is 4/3 as wide as the stream, as in the published model
HEAD_DIM: Final = 32
STREAM: Final = 72
TEXT_DIM: Final = 32


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `ModularPipeline.save_pretrained`."""
    tokenizer = build_qwen_tokenizer(parts.captions())
    pipeline = MiniMaxH3Blocks().init_pipeline()
    pipeline.update_components(
        transformer=_build_transformer(hidden_scale, seed=seed),
        text_encoder=build_qwen3_vl(tokenizer, TEXT_DIM, seed=seed),
        tokenizer=tokenizer,
        vae=_build_vae(seed),
        audio_vae=_build_audio_vae(seed),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )
    parts.save(pipeline, model_dir, dtype, overwrite_modular_index=True)
    save_qwen3_vl_processor(model_dir, tokenizer)
    index = model_dir / "modular_model_index.json"
    entries: dict[str, Any] = json.loads(index.read_text())
    for name, kind in (
        ("processor", ["transformers", "Qwen3VLProcessor"]),
        ("transformer_ref", ["diffusers", "MiniMaxH3Transformer3DModel"]),
    ):
        entries[name] = [*kind, {"type_hint": kind, "subfolder": name}]
    for entry in entries.values():
        if isinstance(entry, list):
            hub_id = FAMILIES["minimax_h3"].flavours[flavour].hub_id
            entry[2]["pretrained_model_name_or_path"] = hub_id
    index.write_text(json.dumps(entries, indent=2) + "\n")


def _build_transformer(scale: int, *, seed: int) -> MiniMaxH3Transformer3DModel:
    """Random; published: 56 heads of 128, 50 layers, 5376 wide."""
    return parts.random_model(
        MiniMaxH3Transformer3DModel,
        seed=seed,
        gain=gains((0.1, "proj_in.weight"), (0.3, "*adaln_proj.linear.weight")),
        num_attention_heads=HEADS * scale,
        attention_head_dim=HEAD_DIM,
        hidden_size=STREAM * scale,
        num_layers=2,
        num_refiner_layers=2,
        ffn_dim=2 * STREAM * scale,
        text_dim=TEXT_DIM,
        freq_dim=32,
        time_embed_hidden_dim=32,
        time_embed_dim=16,
        rope_freq_dim=4,
    )


@torch.no_grad()
def _build_vae(seed: int) -> AutoencoderKLMiniMaxH3:
    """Random, with the statistics of the latents that it makes of toy images."""
    vae = parts.random_model(
        AutoencoderKLMiniMaxH3,
        seed=seed,
        block_out_channels=(8, 8, 8, 16),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2, 2),
        temporal_downsample_factors=(1, 2, 2, 1),
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=32,
    )
    parts.register_statistics(vae, seed)
    return vae


def _build_audio_vae(seed: int) -> AutoencoderKLMiniMaxH3Audio:
    """Random: samples have no sound."""
    return parts.random_model(
        AutoencoderKLMiniMaxH3Audio,
        seed=seed,
        encoder_dim=2,
        latent_dim=32,
        num_attention_heads=2,
        decoder_dim=128,
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
        latents_mean=[0.0] * 32,
        latents_std=[1.0] * 32,
    )
