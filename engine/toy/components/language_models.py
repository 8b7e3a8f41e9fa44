"""Build small random language models as text encoders: the published classes, with tiny sizes.

Pipelines read hidden states between layers, so these keep a size of about 1 through all layers, and
the words have more weight in them than the layers' contributions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
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
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from engine.toy.components.weights import fill_random, gains

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer


HEAD_DIM = 16
POSITIONS = 32768
VISION_DIM = 32
VISION_LAYERS = 2
PATCH = 14

Model = TypeVar("Model", bound=torch.nn.Module)


def build_gemma2(tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int) -> Gemma2Model:
    """Build Gemma 2, `dim` wide (Lumina 2 reads its last layer but one, Sana its output)."""
    config = Gemma2Config(
        **_common(tokenizer, dim, layers=3), head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM
    )
    model = Gemma2Model(config)
    return _fill_gemma(model, layers=3, seed=seed)


def build_gemma3(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 3
) -> Gemma3ForConditionalGeneration:
    """Build Gemma 3 with its image encoder, `dim` wide (LTX-2 reads all of its layers)."""
    config = Gemma3Config(
        text_config={
            "model_type": "gemma3_text",
            **_common(tokenizer, dim, layers),
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": VISION_DIM,
            "intermediate_size": 2 * VISION_DIM,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": 2,
            "image_size": 8 * PATCH,
            "patch_size": PATCH,
        },
        mm_tokens_per_image=16,
    )
    return _fill_gemma(Gemma3ForConditionalGeneration(config), layers=layers, seed=seed)


def build_gemma4(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 3
) -> Gemma4UnifiedForConditionalGeneration:
    """Build Gemma 4 with its embeddings of images and sound, `dim` wide (LTX-2.5)."""
    config = Gemma4UnifiedConfig(
        text_config={
            "model_type": "gemma4_unified_text",
            **_common(tokenizer, dim, layers),
            "head_dim": HEAD_DIM,
            "global_head_dim": 2 * HEAD_DIM,
            "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        },
        vision_config={
            "model_type": "gemma4_unified_vision",
            "patch_size": 2,
            "mm_embed_dim": dim,
            "mm_posemb_size": 8,
            "output_proj_dims": dim,
        },
        audio_config={"model_type": "gemma4_unified_audio", "audio_embed_dim": HEAD_DIM},
    )
    model = Gemma4UnifiedForConditionalGeneration(config)
    fill_random(model, seed, gain=_gain(1.0, layers=layers))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)  # as published, a number of each layer
    return model.eval()


def build_qwen3(tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 3) -> Qwen3Model:
    """Build Qwen3 without its head, `dim` wide (Z-Image reads its last layer but one)."""
    return _fill(Qwen3Model(_qwen3_config(tokenizer, dim, layers)), dim, layers, seed)


def build_qwen3_lm(
    tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 28
) -> Qwen3ForCausalLM:
    """Build Qwen3, `dim` wide (FLUX.2 klein concatenates its layers 9, 18 and 27)."""
    return _fill(Qwen3ForCausalLM(_qwen3_config(tokenizer, dim, layers)), dim, layers, seed)


def build_llama(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 4
) -> LlamaModel:
    """Build Llama 3 without its head, `dim` wide (HunyuanVideo skips its last two layers)."""
    config = LlamaConfig(**_common(tokenizer, dim, layers))
    return _fill(LlamaModel(config), dim, layers, seed)


def build_llama_lm(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 4
) -> LlamaForCausalLM:
    """Build Llama 3, `dim` wide (HiDream reads the layers that its transformer lists)."""
    config = LlamaConfig(**_common(tokenizer, dim, layers))
    return _fill(LlamaForCausalLM(config), dim, layers, seed)


def build_qwen2_5_vl(
    tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 3
) -> Qwen2_5_VLForConditionalGeneration:
    """Build Qwen2.5-VL with its image encoder, `dim` wide (Qwen-Image reads its output)."""
    text = _common(tokenizer, dim, layers)
    # Time, height and width share the rotary pairs of a head.
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
    """Build Qwen2.5-VL's text model (HunyuanVideo 1.5 skips its last two layers)."""
    return build_qwen2_5_vl(tokenizer, dim, seed=seed, layers=layers).model.language_model


def build_qwen3_vl(
    tokenizer: Qwen2Tokenizer, dim: int, *, seed: int, layers: int = 51
) -> Qwen3VLForConditionalGeneration:
    """Build Qwen3-VL with its image encoder, `dim` wide (MiniMax-H3 reads its layer 50).

    Krea 2 reads layers between its first and last, without the head.
    """
    text = _common(tokenizer, dim, layers) | {"head_dim": HEAD_DIM}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": VISION_DIM,
            "intermediate_size": 2 * VISION_DIM,
            "num_heads": 2,
            "out_hidden_size": dim,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return _fill(Qwen3VLForConditionalGeneration(config), dim, layers, seed)


def build_mistral3(
    tokenizer: PreTrainedTokenizerFast, dim: int, *, seed: int, layers: int = 31
) -> Mistral3ForConditionalGeneration:
    """Build Mistral Small 3, which sees images (FLUX.2-dev reads its layers 10, 20 and 30)."""
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
    # The head is tied to the embedding, as in the 4B model.
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


def _fill_gemma(model: Model, *, layers: int, seed: int) -> Model:
    # These models multiply their embeddings by the square root of their width.
    fill_random(model, seed, gain=_gain(1.0, layers=layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.zero_()  # Gemma's norms multiply by 1 + weight.
    return model.eval()


def _gain(embedding: float, *, layers: int) -> Callable[[str], float]:
    """Return weight factors for a model with `layers` layers, given the factor of its embedding."""
    # All layers together add about the size of the words.
    return gains(
        (embedding, "*embed_tokens.weight"), (layers**-0.5, "*o_proj.weight", "*down_proj.weight")
    )


# -- processors -----------------------------------------------------------------------------
# Write processor files, which turn images into inputs of FLUX.2-dev, Qwen-Image-Edit and CLIP.
#
# The classes need torchvision, which nothing else here does, or have other names without it.
# Therefore, their settings are written directly, in the same form.


_COMMON = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
PROCESSOR = "PixtralProcessor"
IMAGE_SETTINGS = {
    **_COMMON,
    "patch_size": PATCH,
    "image_processor_type": "PixtralImageProcessor",
    "processor_class": PROCESSOR,
    "size": {"longest_edge": 1540},
}
CLIP_SETTINGS = {
    **_COMMON,
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 224},
}
SIGLIP_SETTINGS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 384, "width": 384},
}
QWEN_SETTINGS = {
    **_COMMON,
    "image_processor_type": "Qwen2VLImageProcessor",
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": PATCH,
    "processor_class": "Qwen2_5_VLProcessor",
    "size": {"longest_edge": 12845056, "shortest_edge": 3136},
    "temporal_patch_size": 2,
}
SETTINGS = {
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "image_token": "[IMG]",
    "patch_size": PATCH,
    "processor_class": PROCESSOR,
    "spatial_merge_size": 2,
}


def save_pixtral_processor(model_dir: Path) -> None:
    """Turn the saved tokenizer of a pipeline into a processor, as in the published model.

    Args:
        model_dir: Written by `Flux2Pipeline.save_pretrained` with `build_mistral_tokenizer`'s
            tokenizer in it.
    """
    directory = model_dir / "tokenizer"
    _write(directory / "preprocessor_config.json", IMAGE_SETTINGS)
    _write(directory / "processor_config.json", SETTINGS)
    settings = _read(directory / "tokenizer_config.json")
    _write(directory / "tokenizer_config.json", {**settings, "processor_class": PROCESSOR})
    parts = _read(model_dir / "model_index.json")
    _write(model_dir / "model_index.json", {**parts, "tokenizer": ["transformers", PROCESSOR]})


def save_qwen_processor(model_dir: Path, pipeline: str, tokenizer: Qwen2Tokenizer) -> None:
    """Turn a saved Qwen-Image pipeline into an editing one, as in the published models.

    Args:
        model_dir: Written by `QwenImagePipeline.save_pretrained`.
        pipeline: Class of the editing pipeline.
        tokenizer: Its tokenizer.
    """
    directory = model_dir / "processor"
    tokenizer.save_pretrained(directory)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        _write(directory / name, QWEN_SETTINGS)
    parts = _read(model_dir / "model_index.json")
    named = {"_class_name": pipeline, "processor": ["transformers", "Qwen2VLProcessor"]}
    _write(model_dir / "model_index.json", {**parts, **named})


def save_qwen3_vl_processor(
    model_dir: Path, tokenizer: Qwen2Tokenizer, name: str = "processor"
) -> None:
    """Write Qwen3-VL's processor, which makes inputs of images and videos, as a component."""
    directory = model_dir / name
    tokenizer.save_pretrained(directory)
    common = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 2, "patch_size": 16}
    common |= {"processor_class": "Qwen3VLProcessor", "temporal_patch_size": 2}
    for name, kind, pixels in (
        ("preprocessor", {"image_processor_type": "Qwen2VLImageProcessorFast"}, (65536, 16777216)),
        ("video_preprocessor", {"video_processor_type": "Qwen3VLVideoProcessor"}, (4096, 25165824)),
    ):
        size = {"shortest_edge": pixels[0], "longest_edge": pixels[1]}
        _write(directory / f"{name}_config.json", {**common, **kind, "size": size})


def save_clip_processor(model_dir: Path) -> None:
    """Add CLIP's image processor to a saved pipeline, under the name in published models."""
    _write(model_dir / "image_processor" / "preprocessor_config.json", CLIP_SETTINGS)
    parts = _read(model_dir / "model_index.json")
    named = {"image_processor": ["transformers", "CLIPImageProcessor"]}
    _write(model_dir / "model_index.json", {**parts, **named})


def save_siglip_processor(model_dir: Path) -> None:
    """Add SigLIP's image processor to a saved pipeline, under the name in published models."""
    _write(model_dir / "feature_extractor" / "preprocessor_config.json", SIGLIP_SETTINGS)
    parts = _read(model_dir / "model_index.json")
    named = {"feature_extractor": ["transformers", "SiglipImageProcessor"]}
    _write(model_dir / "model_index.json", {**parts, **named})


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
