"""Small random language models as text encoders: the published classes, tiny sizes.

Pipelines read the stream between two layers, so it keeps its size of about 1 through all of them,
and the words weigh more in it than what the layers add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import (
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from engine.toy.components.weights import fill_random

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

HEAD_DIM = 16
POSITIONS = 32768
VISION_DIM = 32
VISION_LAYERS = 2
PATCH = 14

Model = TypeVar("Model", bound=torch.nn.Module)


def build_gemma2(tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int) -> Gemma2Model:
    """Gemma 2 (Lumina 2 reads its last layer but one, Sana its output), `dim` wide."""
    config = Gemma2Config(
        **_common(tokenizer, dim, layers=3), head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM
    )
    model = Gemma2Model(config)
    # The model itself multiplies its embeddings by the root of their width.
    fill_random(model, seed, gain=_gain(1.0, layers=3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.zero_()  # Gemma's norms multiply by 1 + weight.
    return model.eval()


def build_qwen3(tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 3) -> Qwen3Model:
    """Qwen3 without its head (Z-Image reads its last layer but one), `dim` wide."""
    return _fill(Qwen3Model(_qwen3_config(tokenizer, dim, layers)), dim, layers, seed)


def build_qwen3_lm(
    tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 28
) -> Qwen3ForCausalLM:
    """Qwen3 (FLUX.2 klein reads its layers 9, 18 and 27, side by side), `dim` wide."""
    return _fill(Qwen3ForCausalLM(_qwen3_config(tokenizer, dim, layers)), dim, layers, seed)


def build_llama(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 4
) -> LlamaModel:
    """Llama 3 without its head (HunyuanVideo skips its last two layers), `dim` wide."""
    config = LlamaConfig(**_common(tokenizer, dim, layers))
    return _fill(LlamaModel(config), dim, layers, seed)


def build_llama_lm(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 4
) -> LlamaForCausalLM:
    """Llama 3 (HiDream reads whichever layers its transformer names), `dim` wide."""
    config = LlamaConfig(**_common(tokenizer, dim, layers))
    return _fill(LlamaForCausalLM(config), dim, layers, seed)


def build_qwen2_5_vl(
    tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 3
) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with its image encoder (Qwen-Image reads its output), `dim` wide."""
    text = _common(tokenizer, dim, layers)
    # Time, height and width share the pairs of a head.
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [2, 3, 3],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": VISION_DIM,
            "intermediate_size": 2 * VISION_DIM,
            "num_heads": 2,
            "out_hidden_size": dim,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return _fill(Qwen2_5_VLForConditionalGeneration(config), dim, layers, seed)


def build_qwen2_5_vl_text(
    tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 4
) -> Qwen2_5_VLTextModel:
    """Qwen2.5-VL without head and image encoder (HunyuanVideo 1.5 skips its last two layers)."""
    return build_qwen2_5_vl(tokenizer, dim, seed=seed, layers=layers).model.language_model


def build_mistral3(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 31
) -> Mistral3ForConditionalGeneration:
    """Mistral Small 3, which sees images (FLUX.2-dev reads its layers 10, 20 and 30)."""
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            **_common(tokenizer, dim, layers),
            "head_dim": HEAD_DIM,
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": VISION_DIM,
            "intermediate_size": 2 * VISION_DIM,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 2,
            "image_size": 1540,
            "patch_size": PATCH,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    return _fill(Mistral3ForConditionalGeneration(config), dim, layers, seed)


def _qwen3_config(tokenizer: Qwen2Tokenizer, dim: int, layers: int) -> Qwen3Config:
    # The head is the embedding, as in the model of 4 billion parameters.
    return Qwen3Config(
        **_common(tokenizer, dim, layers), head_dim=HEAD_DIM, tie_word_embeddings=True
    )


def _common(tokenizer: PreTrainedTokenizerFast, dim: int, layers: int) -> dict[str, Any]:
    """Return the config values that all these models share."""
    heads = max(2, dim // HEAD_DIM)
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": dim,
        "intermediate_size": 2 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _fill(model: Model, dim: int, layers: int, seed: int) -> Model:
    fill_random(model, seed, gain=_gain(dim**0.5, layers=layers))
    return model.eval()


def _gain(embedding: float, *, layers: int) -> Callable[[str], float]:
    """Factors for a model with `layers` layers, with one of `embedding` for its words."""

    def gain(name: str) -> float:
        if name.endswith("embed_tokens.weight"):
            return embedding
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return layers**-0.5  # All layers together add about as much as the words are.
        return 1.0

    return gain
