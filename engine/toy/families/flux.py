"""A small FLUX.1: every class, every file and every setting of the published one, tiny sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from engine.toy.components import parts, tokenizers
from engine.toy.components.clip_and_t5 import build_clip, build_t5
from engine.toy.components.parts import open_gates, quieten
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import fill_random, gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "x_embedder.weight"),
    (0.03, "*to_out.0.weight", "*to_add_out.weight", "*net.2.weight"),
    (0.03, "*single_transformer_blocks*proj_out.weight"),
    (0.1, "norm_out.linear.weight"),
    (0.3, "*norm.linear.weight", "*norm1.linear.weight", "*norm1_context.linear.weight"),
    # Training and sampling at different guidance should not be far apart.
    (0.3, "time_text_embed.guidance*"),
)


@dataclass(frozen=True)
class FluxSizes:
    """Sizes of the transformer and of the text encoders it listens to.

    Attributes:
        layers: Double-stream blocks (19 in the published model).
        single_layers: Single-stream blocks (38).
        heads: Attention heads (24); width is heads * head_dim.
        head_dim: Width of a head (128); a multiple of 32.
        clip_dim: Width of CLIP's pooled embedding (768); a multiple of 32.
        t5_dim: Width of T5's embeddings (4096); a multiple of 32.
        guidance: Whether it takes a guidance scale (FLUX.1-schnell does not).
        images: Images whose latents are in its channels (FLUX.1-Canny and Fill: 2).
        masks: Whether a mask of 8x8 pixels for each latent is there too (Fill).
    """

    layers: int = 2
    single_layers: int = 4
    heads: int = 4
    head_dim: int = 32
    clip_dim: int = 64
    t5_dim: int = 64
    guidance: bool = True
    images: int = 1
    masks: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dim", "clip_dim", "t5_dim"):
            if getattr(self, name) % 32:
                raise ValueError(f"{name} must be a multiple of 32, not {getattr(self, name)}")

    def scaled(self, factor: int) -> FluxSizes:
        """`factor` times as wide: about factor squared as many parameters."""
        return replace(self, heads=self.heads * factor)

    @property
    def rotary_axes(self) -> tuple[int, int, int]:
        """Widths of the rotary embedding's three axes, in the published 16 : 56 : 56."""
        first = self.head_dim // 8
        return first, (self.head_dim - first) // 2, (self.head_dim - first) // 2


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: `schnell` takes no guidance, some have a pipeline of their own."""
    kinds = {
        "kontext": FluxKontextPipeline,
        "canny": FluxControlPipeline,
        "depth": FluxControlPipeline,
        "fill": FluxFillPipeline,
    }
    kind: Any = kinds.get(flavour, FluxPipeline)
    images, masks = 2 if kind in (FluxControlPipeline, FluxFillPipeline) else 1, flavour == "fill"
    sizes = FluxSizes(guidance=flavour != "schnell", images=images, masks=masks)
    sizes = sizes.scaled(hidden_scale)
    write_flux(model_dir, seed=seed, dtype=dtype, sizes=sizes, pipeline_class=kind)


def write_flux(
    model_dir: Path,
    *,
    seed: int,
    dtype: str = "float32",
    sizes: FluxSizes | None = None,
    max_shard_size: int | str | None = None,
    pipeline_class: type[Any] = FluxPipeline,
) -> None:
    """Write the model in the layout of the pipeline's `save_pretrained`.

    Args:
        model_dir: Created if it is missing.
        seed: Same seed, same bytes (on one machine: the autoencoder is fitted).
        dtype: Of all weights: float32, bfloat16 or float16.
        sizes: Of the transformer; the defaults make about 2 million parameters.
        max_shard_size: Split larger weights over several files, such as "500KB".
        pipeline_class: Named in `model_index.json`.
    """
    sizes = sizes or FluxSizes()
    captions = parts.captions()
    clip_tokenizer = tokenizers.build_clip_tokenizer(captions)
    t5_tokenizer = tokenizers.build_t5_tokenizer(captions)
    torch_dtype = getattr(torch, dtype)
    vae = parts.picture_vae(seed)
    pipeline = pipeline_class(
        scheduler=build_scheduler() if sizes.guidance else build_fixed_scheduler(),
        vae=parts.cast(vae, torch_dtype),
        text_encoder=parts.cast(build_clip(clip_tokenizer, sizes.clip_dim, seed=seed), torch_dtype),
        tokenizer=clip_tokenizer,
        text_encoder_2=parts.cast(build_t5(t5_tokenizer, sizes.t5_dim, seed=seed), torch_dtype),
        tokenizer_2=t5_tokenizer,
        transformer=build_transformer(sizes, seed=seed, dtype=torch_dtype),
    )
    pipeline.save_pretrained(model_dir, safe_serialization=True, max_shard_size=max_shard_size)
    tokenizers.save_clip_vocabulary(clip_tokenizer, model_dir / "tokenizer")


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of FLUX.1-dev."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def build_fixed_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of FLUX.1-schnell."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)


def shape_transformer(sizes: FluxSizes) -> FluxTransformer2DModel:
    """Return the transformer on the meta device: shapes without numbers."""
    with torch.device("meta"):
        return FluxTransformer2DModel(
            # A token is 2x2 latent cells.
            in_channels=4 * (LATENT_CHANNELS * sizes.images + 64 * sizes.masks),
            out_channels=4 * LATENT_CHANNELS if sizes.images > 1 else None,
            num_layers=sizes.layers,
            num_single_layers=sizes.single_layers,
            attention_head_dim=sizes.head_dim,
            num_attention_heads=sizes.heads,
            joint_attention_dim=sizes.t5_dim,
            pooled_projection_dim=sizes.clip_dim,
            guidance_embeds=sizes.guidance,
            axes_dims_rope=sizes.rotary_axes,
        )


def build_transformer(
    sizes: FluxSizes, *, seed: int, dtype: torch.dtype = torch.float32
) -> FluxTransformer2DModel:
    """Return the transformer: random, its gates open, its output of size 0.5.

    A new LoRA adds nothing at first, and what it adds after a few steps is small. It counts
    from the start because the stream between the blocks is small too (size 0.1; the last norm
    makes it 1 again), and because the output is read mostly where the embedded latents are not:
    what a block writes there is not mixed with them.
    """
    # A large one is filled once, and in its own dtype.
    transformer = parts.cast(shape_transformer(sizes), dtype).to_empty(device="cpu")
    fill_random(transformer, seed, gain=GAIN, bias=0.005)
    with torch.no_grad(), one_thread():
        for block in transformer.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                open_gates(norm.linear.bias, chunks=6, gates=(2, 5))
        for block in transformer.single_transformer_blocks:
            open_gates(block.norm.linear.bias, chunks=3, gates=(2,))
        own = transformer.x_embedder.weight[:, : 4 * LATENT_CHANNELS]
        quieten(transformer.proj_out.weight, own)
    return transformer.eval()
