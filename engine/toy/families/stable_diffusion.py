"""A small Stable Diffusion: the published classes and settings, tiny sizes.

Its schedulers are the published ones too: PNDM, which takes one forward more than it has steps,
and DDIM for v-prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers import (
    DDIMScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_clip
from engine.toy.components.parts import VAE_CHANNELS, build_four_channel_vae
from engine.toy.components.tokenizers import build_clip_tokenizer, save_clip_vocabulary
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

CLIP_DIM = 32
WIDTHS = (32, 32, 64, 64)
HEADS = (2, 2, 4, 4)

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (1.5, "conv_out.weight"),
    (0.3, "*conv1.weight", "*conv2.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `StableDiffusionPipeline.save_pretrained`."""
    clip = build_clip_tokenizer(parts.captions())
    pipeline = StableDiffusionPipeline(
        vae=build_four_channel_vae(seed),
        text_encoder=build_clip(clip, CLIP_DIM, seed=seed),
        tokenizer=clip,
        unet=_build_unet(seed, hidden_scale, first=flavour == "1.5"),
        scheduler=build_scheduler(flavour),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    parts.save(pipeline, model_dir, dtype)
    save_clip_vocabulary(clip, model_dir / "tokenizer")


def build_scheduler(flavour: str) -> PNDMScheduler | DDIMScheduler:
    """Build the published scheduler."""
    words: dict[str, Any] = {
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }
    if flavour == "2.1":
        return DDIMScheduler(**words, clip_sample=False, prediction_type="v_prediction")
    return PNDMScheduler(**words, skip_prk_steps=True)


def _build_unet(seed: int, scale: int, *, first: bool) -> UNet2DConditionModel:
    """Return the UNet of Stable Diffusion 1, or of 2."""
    own: dict[str, Any] = {"attention_head_dim": 2 * scale}  # the number of heads
    if not first:
        own = {
            "attention_head_dim": tuple(scale * heads for heads in HEADS),
            "use_linear_projection": True,
        }
    return parts.random_model(
        UNet2DConditionModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        sample_size=64,
        in_channels=VAE_CHANNELS,
        out_channels=VAE_CHANNELS,
        down_block_types=(*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        up_block_types=("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
        block_out_channels=tuple(scale * width for width in WIDTHS),
        layers_per_block=2,
        cross_attention_dim=CLIP_DIM,
        **own,
    )
