"""A small Qwen-Image: every class, file and setting of the published one, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen2_5_vl, save_qwen_processor
from engine.toy.components.parts import open_gates, quieten
from engine.toy.components.tokenizers import QWEN_IMAGE_TEMPLATE, build_qwen_tokenizer
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
HEADS, HEAD_DIM = 4, 32
LAYERS = 2
LATENT_CHANNELS = 16

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "img_in.weight"),
    (0.03, "*to_out.0.weight", "*to_add_out.weight", "*net.2.weight"),
    (0.3, "*img_mod.1.weight", "*txt_mod.1.weight"),
    (0.1, "norm_out.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: those that take images have pipelines of their own, and a processor."""
    kind = _pipeline_of(flavour)
    edits, layered = kind is not QwenImagePipeline, flavour == "layered"
    config = {"zero_cond_t": True} if "2511" in flavour else {}
    if layered:
        config = {"use_layer3d_rope": True, "use_additional_t_cond": True}
    # The pipelines set their templates when they are made.
    template = kind(*[None] * 6).prompt_template_encode if edits else QWEN_IMAGE_TEMPLATE
    tokenizer = build_qwen_tokenizer(parts.captions(), template)
    pipeline = QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=build_video_vae(seed, channels=4 if layered else 3),
        text_encoder=build_qwen2_5_vl(tokenizer, TEXT_DIM, seed=seed),
        tokenizer=tokenizer,
        transformer=_build_transformer(seed, HEADS * hidden_scale, **config),
    )
    parts.save(pipeline, model_dir, dtype)
    if edits:
        save_qwen_processor(model_dir, kind.__name__, tokenizer)


def _pipeline_of(flavour: str) -> type[Any]:
    if flavour == "layered":
        return QwenImageLayeredPipeline
    if not flavour.startswith("edit"):
        return QwenImagePipeline
    return QwenImageEditPipeline if flavour == "edit" else QwenImageEditPlusPipeline


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of Qwen-Image."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _build_transformer(seed: int, heads: int, **config: Any) -> QwenImageTransformer2DModel:
    transformer = parts.random_model(
        QwenImageTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        guidance_embeds=False,
        axes_dims_rope=(4, 14, 14),
        **config,
    )
    for block in transformer.transformer_blocks:
        for modulation in (block.img_mod, block.txt_mod):
            open_gates(modulation[1].bias, chunks=6, gates=(2, 5))
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.img_in.weight)
    return transformer


def build_video_vae(seed: int, channels: int = 3) -> AutoencoderKLQwenImage:
    """Random, with the statistics of the latents that it makes of toy images."""
    vae = parts.random_model(
        AutoencoderKLQwenImage,
        seed=seed,
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        num_res_blocks=1,
        input_channels=channels,
    )
    parts.register_statistics(vae, seed)
    return vae
