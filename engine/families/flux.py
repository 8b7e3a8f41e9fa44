"""FLUX.1: packed 2×2 latents, CLIP + T5 text, guidance as an input, rectified flow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

from engine.families import flux_kohya

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

    from jobs.prompts import SampleRequest

# Every linear layer of the blocks: attention of both streams, and both feed-forwards.
LORA_TARGETS: Final = (
    r"(transformer_blocks|single_transformer_blocks)\.\d+\."
    r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
)

KOHYA: Final = flux_kohya


def pipeline_class() -> type[FluxPipeline]:
    return FluxPipeline


def transformer_class() -> type[FluxTransformer2DModel]:
    return FluxTransformer2DModel


def load_text_pipeline(root: Path, dtype: torch.dtype, **components: Any) -> FluxPipeline:
    return FluxPipeline.from_pretrained(root, transformer=None, vae=None, dtype=dtype, **components)


def encode(
    pipeline: FluxPipeline, prompt: str, max_sequence_length: int
) -> dict[str, torch.Tensor]:
    """`prompt_embeds (L, D)` of T5 and `pooled_prompt_embeds (P,)` of CLIP."""
    embeds, pooled, _ = pipeline.encode_prompt(
        prompt=prompt, prompt_2=None, max_sequence_length=max_sequence_length
    )
    return {
        "prompt_embeds": embeds[0].contiguous(),
        "pooled_prompt_embeds": pooled[0].contiguous(),
    }


def load_vae(root: Path, dtype: torch.dtype) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(root, subfolder="vae", dtype=dtype)


def encode_pictures(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    latents = vae.encode(pixels).latent_dist.mode()
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def predict(
    transformer: FluxTransformer2DModel,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    condition: dict[str, torch.Tensor],
    guidance: float,
) -> torch.Tensor:
    batch, channels, height, width = noisy.shape
    # The packing helpers are the pipeline's own; they use no pipeline state.
    packed = FluxPipeline._pack_latents(noisy, batch, channels, height, width)
    image_ids = FluxPipeline._prepare_latent_image_ids(
        batch, height // 2, width // 2, noisy.device, noisy.dtype
    )
    embeds = condition["prompt_embeds"]
    text_ids = torch.zeros(embeds.shape[1], 3, device=noisy.device, dtype=noisy.dtype)
    strength = None
    if transformer.config.guidance_embeds:
        strength = torch.full((batch,), guidance, device=noisy.device, dtype=torch.float32)
    velocity = transformer(
        hidden_states=packed,
        timestep=sigma,
        guidance=strength,
        pooled_projections=condition["pooled_prompt_embeds"],
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]
    # (B, h/2·w/2, C·4) → (B, C, h, w): the inverse of the packing above.
    grid = velocity.view(batch, height // 2, width // 2, channels, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)


def shift_of(height: int, width: int) -> float:
    """exp(mu) with mu linear in the number of packed tokens, as FLUX.1 samples.

    0.5 at 256 tokens, 1.15 at 4096 (`calculate_shift` of the pipeline).
    """
    tokens = (height // 2) * (width // 2)
    mu = 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
    return math.exp(mu)


def sampling_pipeline(
    root: Path, transformer: FluxTransformer2DModel, vae: AutoencoderKL
) -> FluxPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(root, subfolder="scheduler")
    return FluxPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )


def sample_arguments(
    request: SampleRequest,
    condition: dict[str, torch.Tensor],
    negative: dict[str, torch.Tensor] | None,
) -> dict[str, Any]:
    """`guidance` is the strength that distilled models take as an input."""
    arguments: dict[str, Any] = {name: tensor.unsqueeze(0) for name, tensor in condition.items()}
    arguments["guidance_scale"] = request.guidance
    if negative is not None:
        arguments |= {f"negative_{name}": text.unsqueeze(0) for name, text in negative.items()}
        arguments["true_cfg_scale"] = request.true_cfg_scale
    return arguments


def forwards_per_step(request: SampleRequest) -> int:
    return 2 if request.guided else 1


def decode(pipeline: FluxPipeline, latents: torch.Tensor, height: int, width: int) -> Image.Image:
    """The picture of the pipeline's packed latents `(1, tokens, C·4)`."""
    vae = pipeline.vae
    unpacked = FluxPipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    unpacked = unpacked / vae.config.scaling_factor + vae.config.shift_factor
    pixels = vae.decode(unpacked, return_dict=False)[0]
    return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]
