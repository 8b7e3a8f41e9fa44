"""A small Anima: every class, file and setting of the published one, tiny sizes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaTextConditioner,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen3
from engine.toy.components.tokenizers import build_qwen_tokenizer, build_t5_tokenizer
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.families.qwen_image import build_video_vae
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

HEADS: Final = 2
HEAD_DIM: Final = 24
TEXT_DIM: Final = 32


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `ModularPipeline.save_pretrained`.

    Its index names the published repository for each component, as that one's does.
    """
    captions = parts.captions()
    tokenizer, t5_tokenizer = build_qwen_tokenizer(captions), build_t5_tokenizer(captions)
    pipeline = AnimaAutoBlocks().init_pipeline()
    pipeline.update_components(
        transformer=_build_transformer(HEADS * hidden_scale, seed=seed),
        text_conditioner=_build_conditioner(len(t5_tokenizer), seed=seed),
        text_encoder=build_qwen3(tokenizer, TEXT_DIM, seed=seed, layers=2),
        tokenizer=tokenizer,
        t5_tokenizer=t5_tokenizer,
        vae=build_video_vae(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
    )
    parts.save(pipeline, model_dir, dtype, overwrite_modular_index=True)
    index = model_dir / "modular_model_index.json"
    entries: dict[str, Any] = json.loads(index.read_text())
    for entry in entries.values():
        if isinstance(entry, list):
            entry[2]["pretrained_model_name_or_path"] = FAMILIES["anima"].flavours[flavour].hub_id
    index.write_text(json.dumps(entries, indent=2) + "\n")


@torch.no_grad()
def _build_transformer(heads: int, *, seed: int) -> CosmosTransformer3DModel:
    """Random, also its gates; published: 16 heads of 128, 28 layers."""
    return parts.random_model(
        CosmosTransformer3DModel,
        seed=seed,
        gain=_gain,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        mlp_ratio=4.0,
        text_embed_dim=TEXT_DIM,
        adaln_lora_dim=8,
        max_size=(128, 240, 240),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 4.0, 4.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )


def _gain(name: str) -> float:
    """Factors on the scale that keeps sizes: the stream is small, so that blocks count in it."""
    return 0.1 if name == "patch_embed.proj.weight" else 1.0


def _build_conditioner(words: int, *, seed: int) -> AnimaTextConditioner:
    """Random; published: 1024 wide, 6 layers, 32128 words."""
    return parts.random_model(
        AnimaTextConditioner,
        seed=seed,
        gain=lambda name: TEXT_DIM**0.5 if name == "embed.weight" else 1.0,
        source_dim=TEXT_DIM,
        target_dim=TEXT_DIM,
        model_dim=TEXT_DIM,
        num_layers=2,
        num_attention_heads=2,
        target_vocab_size=words,
    )
