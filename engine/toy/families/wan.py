"""A small Wan: every class, every file and every setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_clip_vision, build_umt5
from engine.toy.components.language_models import save_clip_processor
from engine.toy.components.parts import mislead, open_gates, quieten
from engine.toy.components.tokenizers import build_t5_tokenizer
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
IMAGE_DIM = 64
PATCHES = 257  # of an image that CLIP sees
HEADS, HEAD_DIM = 8, 16
LARGE_HEADS = 14  # a token of the larger autoencoder has 192 numbers
LAYERS = 2

# The autoencoder of Wan 2.2's TI2V-5B: pixels in squares of 2x2, residual up- and downsampling.
LARGE_VAE = {
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.3, "patch_embedding.weight"),
    (0.1, "*to_out.0.weight", "*net.2.weight"),
    (0.3, "condition_embedder.time_proj.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: with two experts for Wan 2.2's A14B, with the other autoencoder for its 5B,
    with channels for given frames for image-to-video, and in 2.1 with CLIP besides; for VACE with
    blocks for a control video.

    All flavours of an A14B are one model.
    """
    large, experts = "5b" in flavour, "a14b" in flavour
    last = "-flf2v" in flavour
    from_image = last or "-i2v" in flavour
    sees = from_image and not experts
    tokenizer = build_t5_tokenizer(parts.captions())
    vae = _build_vae(seed, **(LARGE_VAE if large else {}))
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=16.0 if last and sees else 5.0 if large else 3.0,
    )
    heads = (LARGE_HEADS if large else HEADS) * hidden_scale
    channels = vae.config.z_dim
    image_inputs = {"image_dim": IMAGE_DIM, "added_kv_proj_dim": heads * HEAD_DIM} if sees else {}
    if last and sees:
        image_inputs["pos_embed_seq_len"] = 2 * PATCHES
    beside = {"in_channels": 2 * channels + 4, **image_inputs} if from_image else {}
    common = {
        "tokenizer": tokenizer,
        "text_encoder": build_umt5(tokenizer, TEXT_DIM, seed=seed),
        "vae": vae,
        "scheduler": scheduler,
    }
    if "-vace" in flavour:
        both = [
            _build_transformer(
                number, heads, channels, WanVACETransformer3DModel, vace_layers=list(range(LAYERS))
            )
            for number in range(seed, seed + 1 + experts)
        ]
        names = dict(zip(("transformer", "transformer_2"), both, strict=False))
        ratio = 0.875 if experts else None
        parts.save(WanVACEPipeline(**common, **names, boundary_ratio=ratio), model_dir, dtype)
        return
    kind = WanImageToVideoPipeline if from_image else WanPipeline
    pipeline = kind(
        **common,
        transformer=_build_transformer(seed, heads, channels, **beside),
        transformer_2=_build_transformer(seed + 1, heads, channels, **beside) if experts else None,
        boundary_ratio=(0.9 if from_image else 0.875) if experts else None,
        expand_timesteps=large,
        **({"image_encoder": build_clip_vision(IMAGE_DIM, seed=seed)} if sees else {}),
    )
    parts.save(pipeline, model_dir, dtype)
    if sees:
        save_clip_processor(model_dir)


def _build_transformer(
    seed: int, heads: int, channels: int, kind: Any = WanTransformer3DModel, **config: Any
) -> Any:
    transformer = parts.random_model(
        kind,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        out_channels=channels,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=2 * heads * HEAD_DIM,
        num_layers=LAYERS,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        **{"in_channels": channels} | config,
    )
    for block in (*transformer.blocks, *getattr(transformer, "vace_blocks", ())):
        open_gates(block.scale_shift_table, chunks=6, gates=(2, 5), dim=1)
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.patch_embedding.weight)
    mislead(transformer.proj_out.bias, seed)
    return transformer


def _build_vae(seed: int, **config: Any) -> AutoencoderKLWan:
    """Random, with the statistics of the latents that it makes of toy images."""
    vae = parts.random_model(
        AutoencoderKLWan, seed=seed, base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1, **config
    )
    parts.register_statistics(vae, seed)
    return vae
