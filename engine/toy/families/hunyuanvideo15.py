"""A small HunyuanVideo 1.5: every class, file and setting of the published one, tiny sizes."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import ByT5Tokenizer, SiglipVisionConfig, SiglipVisionModel

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_t5
from engine.toy.components.language_models import (
    build_qwen2_5_vl_text,
    save_siglip_processor,
)
from engine.toy.components.parts import mislead, open_gates, quieten
from engine.toy.components.tokenizers import build_qwen_tokenizer
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM, GLYPH_DIM, IMAGE_DIM = 64, 32, 32
HEADS, HEAD_DIM = 4, 32
ROTARY_AXES = (8, 12, 12)
LATENT_CHANNELS = 16

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.3, "x_embedder.proj.weight"),
    (1.0, "context_embedder*"),
    (0.1, "*to_out.0.weight", "*to_add_out.weight", "*net.2.weight"),
    (0.1, "norm_out.linear.weight"),
    (0.3, "*norm1.linear.weight", "*norm1_context.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: for 720p with another size and shift, as published.

    Image-to-video has SigLIP as well, of as many tokens as published. Step-distilled models have
    the shift of 720p, and a second time.
    """
    large, from_image, meanflow = (word in flavour for word in ("720p", "i2v", "step"))
    shift = (7.0 if from_image else 9.0) if large or meanflow else 5.0
    vae = _build_vae(seed)
    tokenizer = build_qwen_tokenizer(parts.captions(), _template(vae))
    glyph_tokenizer = ByT5Tokenizer()
    kind: Any = HunyuanVideo15ImageToVideoPipeline if from_image else HunyuanVideo15Pipeline
    seeing = {"image_encoder": _build_siglip(seed), "feature_extractor": None} if from_image else {}
    pipeline = kind(
        text_encoder=build_qwen2_5_vl_text(tokenizer, TEXT_DIM, seed=seed),
        tokenizer=tokenizer,
        transformer=_build_transformer(
            seed, HEADS * hidden_scale, target_size=960 if large else 640, use_meanflow=meanflow
        ),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder_2=build_t5(glyph_tokenizer, GLYPH_DIM, seed=seed),
        tokenizer_2=glyph_tokenizer,
        guider=ClassifierFreeGuidance(guidance_scale=1.0 if "distilled" in flavour else 6.0),
        **seeing,
    )
    parts.save(pipeline, model_dir, dtype)
    if from_image:
        save_siglip_processor(model_dir)


def _template(vae: AutoencoderKLHunyuanVideo15) -> str:
    """Return the template around a prompt.

    The pipeline cuts its beginning off by the published length.
    """
    names = signature(HunyuanVideo15Pipeline).parameters
    message = HunyuanVideo15Pipeline(**dict.fromkeys(names) | {"vae": vae}).system_message
    return (
        f"<|im_start|>system\n{message}<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    )


def _build_transformer(seed: int, heads: int, **config: Any) -> HunyuanVideo15Transformer3DModel:
    transformer = parts.random_model(
        HunyuanVideo15Transformer3DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=2 * LATENT_CHANNELS + 1,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        qk_norm="rms_norm",
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=GLYPH_DIM,
        image_embed_dim=IMAGE_DIM,
        rope_theta=256.0,
        rope_axes_dim=ROTARY_AXES,
        task_type="t2v",
        **config,
    )
    for block in transformer.transformer_blocks:
        for norm in (block.norm1, block.norm1_context):
            open_gates(norm.linear.bias, chunks=6, gates=(2, 5))
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.x_embedder.proj.weight)
    mislead(transformer.proj_out.bias, seed)
    return transformer


def _build_siglip(seed: int) -> SiglipVisionModel:
    return parts.random_model(
        SiglipVisionModel,
        config=SiglipVisionConfig(
            hidden_size=IMAGE_DIM,
            intermediate_size=2 * IMAGE_DIM,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=384,
            patch_size=14,
        ),
        seed=seed,
    )


def _build_vae(seed: int) -> AutoencoderKLHunyuanVideo15:
    """Random; its latents of toy images have mean 0, and the factor that makes their size 1."""
    vae = parts.random_model(
        AutoencoderKLHunyuanVideo15,
        seed=seed,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 16, 16, 16, 32),
        layers_per_block=1,
    )
    vae.enable_slicing()  # its attention takes one video at a time
    parts.standardize(vae, vae.encoder.conv_out.conv.bias, seed)
    return vae
