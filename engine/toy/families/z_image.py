"""A small Z-Image: every class, every file and every setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen3
from engine.toy.components.parts import open_gates, quieten
from engine.toy.components.tokenizers import build_qwen_tokenizer
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
HEADS, HEAD_DIM = 4, 32
LAYERS, REFINER_LAYERS = 2, 1

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "all_x_embedder*"),
    (0.3, "*adaLN_modulation.0.weight"),
    (0.1, "*adaLN_modulation.1.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model; the flavours differ in the scheduler's shift."""
    tokenizer = build_qwen_tokenizer(parts.captions())
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=1000, shift=3.0 if flavour == "turbo" else 6.0
        ),
        vae=parts.picture_vae(seed),
        text_encoder=build_qwen3(tokenizer, TEXT_DIM, seed=seed),
        tokenizer=tokenizer,
        transformer=_build_transformer(seed, HEADS * hidden_scale),
    )
    parts.save(pipeline, model_dir, dtype)


def _build_transformer(seed: int, heads: int) -> ZImageTransformer2DModel:
    transformer = parts.random_model(
        ZImageTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=LATENT_CHANNELS,
        dim=heads * HEAD_DIM,
        n_layers=LAYERS,
        n_refiner_layers=REFINER_LAYERS,
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[8, 12, 12],
        axes_lens=[1536, 512, 512],
    )
    for block in (*transformer.noise_refiner, *transformer.layers):
        open_gates(block.adaLN_modulation[0].bias, chunks=4, gates=(1, 3))
    with one_thread():
        quieten(
            transformer.all_final_layer["2-1"].linear.weight,
            transformer.all_x_embedder["2-1"].weight,
        )
    return transformer
