"""A small LTX-2: every class, file and setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from engine.toy.components import parts
from engine.toy.components.language_models import build_gemma3, build_gemma4
from engine.toy.components.parts import mislead, open_gates, quieten
from engine.toy.components.tokenizers import build_gemma_tokenizer
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM, TEXT_LAYERS = 32, 2
HEADS, HEAD_DIM, SOUND_HEAD_DIM = 4, 24, 8
LATENT_CHANNELS: Final = 32
SOUND_CHANNELS, MEL_BINS = 2, 16
PACKED_SOUND: Final = SOUND_CHANNELS * MEL_BINS // 4  # what the transformer gets
REGISTERS: Final = 16

# The autoencoders of LTX-2 and of LTX-2.3.
FIRST_VAE: Final[dict[str, Any]] = {
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True, True),
    "decoder_inject_noise": (False, False, False, False),
    "upsample_type": ("spatiotemporal", "spatiotemporal", "spatiotemporal"),
    "upsample_residual": (True, True, True),
    "upsample_factor": (2, 2, 2),
    "decoder_spatial_padding_mode": "reflect",
}
LATER_VAE: Final[dict[str, Any]] = {
    "decoder_block_out_channels": (8, 16, 16, 32),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True, True, True),
    "decoder_inject_noise": (False, False, False, False, False),
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_residual": (False, False, False, False),
    "upsample_factor": (2, 2, 1, 2),
    "decoder_spatial_padding_mode": "zeros",
}
# Vocoders with one kernel size instead of three.
VOCODER: Final[dict[str, Any]] = {
    "in_channels": 2 * MEL_BINS,
    "hidden_channels": 64,
    "resnet_kernel_sizes": [3],
    "resnet_dilations": [[1, 3, 5]],
}
LATER_VOCODER: Final[dict[str, Any]] = {
    **VOCODER,
    "bwe_in_channels": 2 * MEL_BINS,
    "bwe_hidden_channels": 32,
    "bwe_resnet_kernel_sizes": [3],
    "bwe_resnet_dilations": [[1, 3, 5]],
    "num_mel_channels": MEL_BINS,
}

# Factors on the scale that keeps sizes, by parameter.
GAIN: Final = gains(
    (0.3, "proj_in.weight", "audio_proj_in.weight"),
    (0.1, "*to_out.0.weight", "*net.2.weight"),
    (0.3, "*time_embed.linear.weight", "av_cross_attn*.linear.weight"),
    (0.3, "*prompt_adaln.linear.weight", "*prompt_scale_shift_table"),
    (0.5, "*a2v_cross_attn_scale_shift_table"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: LTX-2, LTX-2.3, or LTX-2.5, which has a distilled transformer too."""
    first, last = flavour == "2-19b", flavour == "2.5-22b"
    build_encoder = build_gemma4 if last else build_gemma3
    tokenizer = build_gemma_tokenizer(parts.captions())
    tokenizer.model_max_length = 1024
    widths = [HEADS * hidden_scale * size for size in (HEAD_DIM, SOUND_HEAD_DIM)]
    sound = parts.random_model(
        AutoencoderKLLTX2Audio,
        seed=seed,
        base_channels=PACKED_SOUND,  # as many as its latents have statistics
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=SOUND_CHANNELS,
        mel_bins=MEL_BINS,
    )
    vocoder: Any = LTX2Vocoder if first else LTX2VocoderWithBWE
    pipeline = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=not last,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=None if last else 0.1,
        ),
        vae=_build_vae(seed, **(FIRST_VAE if first else LATER_VAE)),
        audio_vae=sound,
        text_encoder=build_encoder(tokenizer, TEXT_DIM, seed=seed, layers=TEXT_LAYERS),
        tokenizer=tokenizer,
        connectors=_build_connectors(seed, None if first else widths),
        transformer=_build_transformer(seed, HEADS * hidden_scale, flavour),
        vocoder=parts.random_model(vocoder, seed=seed, **(VOCODER if first else LATER_VOCODER)),
        duration_head=_build_duration_head(seed, widths) if last else None,
    )
    parts.save(pipeline, model_dir, dtype)
    if last:
        trained = pipeline.transformer
        trained.save_pretrained(model_dir / "transformer_full")
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.neg_()
        trained.save_pretrained(model_dir / "transformer")


def _build_transformer(seed: int, heads: int, flavour: str) -> LTX2VideoTransformer3DModel:
    """Random, with open gates; published: 32 heads of 128 and 64, 48 layers."""
    first, last = flavour == "2-19b", flavour == "2.5-22b"
    later: dict[str, Any] = dict.fromkeys(
        ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), not first
    )
    transformer = parts.random_model(
        LTX2VideoTransformer3DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=heads * HEAD_DIM,
        audio_in_channels=PACKED_SOUND,
        audio_out_channels=PACKED_SOUND,
        audio_num_attention_heads=heads,
        audio_attention_head_dim=SOUND_HEAD_DIM,
        audio_cross_attention_dim=heads * SOUND_HEAD_DIM,
        num_layers=2,
        caption_channels=TEXT_DIM,
        rope_type="split",
        use_prompt_embeddings=first,
        perturbed_attn=not first,
        ff_bias=not last,
        use_keyframes_abs_pos_embedding=last,
        **later,
    )
    for block in transformer.transformer_blocks:
        gates = (2, 5) if first else (2, 5, 8)
        for table in (block.scale_shift_table, block.audio_scale_shift_table):
            open_gates(table, chunks=len(table), gates=gates)
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.proj_in.weight)
    mislead(transformer.proj_out.bias, seed)
    return transformer


def _build_connectors(seed: int, widths: list[int] | None) -> LTX2TextConnectors:
    """Random; published: 2 layers as wide as the text, or 8 of the transformer's widths.

    Args:
        seed: The same seed gives the same bytes.
        widths: For the video and for the sound, where each has a projection of its own.
    """
    video, sound = widths or (TEXT_DIM, TEXT_DIM)
    head = 8 if widths else 16
    later: dict[str, Any] = {}
    if widths:
        later = {
            "video_gated_attn": True,
            "audio_gated_attn": True,
            "per_modality_projections": True,
            "video_hidden_dim": video,
            "audio_hidden_dim": sound,
            "proj_bias": True,
        }
    return parts.random_model(
        LTX2TextConnectors,
        seed=seed,
        caption_channels=TEXT_DIM,
        text_proj_in_factor=TEXT_LAYERS + 1,
        video_connector_num_attention_heads=video // head,
        video_connector_attention_head_dim=head,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=REGISTERS,
        audio_connector_num_attention_heads=sound // head,
        audio_connector_attention_head_dim=head,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=REGISTERS,
        rope_type="split",
        **later,
    )


def _build_duration_head(seed: int, widths: list[int]) -> LTX2DurationHead:
    """Random; it says how long a video of a text is, which jobs do."""
    return parts.random_model(
        LTX2DurationHead,
        seed=seed,
        video_cross_attention_dim=widths[0],
        audio_cross_attention_dim=widths[1],
        pooler_hidden_dim=8,
        mlp_hidden_dim=8,
    )


def _build_vae(seed: int, **config: Any) -> AutoencoderKLLTX2Video:
    """Random, with the statistics of the latents that it makes of toy images."""
    vae = parts.random_model(
        AutoencoderKLLTX2Video,
        seed=seed,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
        **config,
    )
    with torch.no_grad(), one_thread():
        latents = parts.video_latents(vae, seed)
        vae.latents_mean.copy_(latents.mean((0, 2, 3, 4)))
        vae.latents_std.copy_(latents.std((0, 2, 3, 4)))
    return vae
