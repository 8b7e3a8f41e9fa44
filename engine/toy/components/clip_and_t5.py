"""Build small random CLIP and T5 text encoders: the published classes, with any width.

Encodings of two prompts differ clearly, since words have more weight than their mixing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from engine.toy.components.weights import fill_random, gains

if TYPE_CHECKING:
    from transformers import CLIPTokenizer, PreTrainedTokenizerFast

CLIP_HEAD_DIM = 32
T5_HEAD_DIM = 32
LAYERS = 2

Model = TypeVar("Model", bound=torch.nn.Module)


def build_clip(tokenizer: CLIPTokenizer, dim: int, *, seed: int) -> CLIPTextModel:
    """Build CLIP without its projection, `dim` wide, a multiple of 32."""
    return _fill(CLIPTextModel(_clip_config(tokenizer, dim, "quick_gelu")), dim, seed)


def build_clip_with_projection(
    tokenizer: CLIPTokenizer, dim: int, *, seed: int, hidden_act: str = "quick_gelu"
) -> CLIPTextModelWithProjection:
    """Build CLIP with embeddings and pooled output `dim` wide.

    Args:
        tokenizer: Its maximum length is the model's.
        dim: A multiple of 32.
        seed: Seed of the weights. Use different seeds for two encoders of one pipeline.
        hidden_act: "quick_gelu" for CLIP-L, "gelu" for CLIP-G.
    """
    config = _clip_config(tokenizer, dim, hidden_act)
    return _fill(CLIPTextModelWithProjection(config), dim, seed)


def build_clip_vision(dim: int, *, seed: int) -> CLIPVisionModel:
    """Build CLIP's image encoder, `dim` wide, with the 257 tokens of published ones."""
    config = CLIPVisionConfig(
        hidden_size=dim,
        intermediate_size=4 * dim,
        projection_dim=dim,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(1, dim // CLIP_HEAD_DIM),
        image_size=224,
        patch_size=14,
    )
    model = CLIPVisionModel(config)
    fill_random(model, seed)
    return model.eval()


def build_t5(tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int) -> T5EncoderModel:
    """Build T5 v1.1's encoder, `dim` wide, a multiple of 32."""
    return _fill(T5EncoderModel(T5Config(**_t5_settings(tokenizer, dim))), dim, seed)


def build_umt5(tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int) -> UMT5EncoderModel:
    """Build UMT5's encoder, `dim` wide, a multiple of 32: T5 with positions in every layer."""
    return _fill(UMT5EncoderModel(UMT5Config(**_t5_settings(tokenizer, dim))), dim, seed)


def _t5_settings(tokenizer: PreTrainedTokenizerFast, dim: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": dim,
        "d_kv": T5_HEAD_DIM,
        "d_ff": 4 * dim,
        "num_layers": LAYERS,
        "num_heads": max(1, dim // T5_HEAD_DIM),
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }


def _clip_config(tokenizer: CLIPTokenizer, dim: int, hidden_act: str) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=dim,
        intermediate_size=4 * dim,
        projection_dim=dim,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(1, dim // CLIP_HEAD_DIM),
        max_position_embeddings=tokenizer.model_max_length,
        hidden_act=hidden_act,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _fill(model: Model, dim: int, seed: int) -> Model:
    """Fill in random weights with which words matter more than their mixing."""
    gain = gains(
        (dim**0.5, "*shared.weight", "*token_embedding.weight"),  # entries have unit size
        (3.0, "*self_attn.out_proj.weight"),  # words reach CLIP's pooled output only by attention
        (T5_HEAD_DIM**-0.5, "*SelfAttention.q.weight"),  # T5 does not scale its attention scores
    )
    fill_random(model, seed, gain=gain)
    return model.eval()
