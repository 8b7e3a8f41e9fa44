"""A small FLUX.3: every class, file and setting that its jobs read, tiny sizes.

The published pipeline also has a prompt upsampler, which no job reads; this one has none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import Flux3AutoBlocks, Flux3Transformer2DModel

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen3_vl, save_qwen3_vl_processor
from engine.toy.components.tokenizers import build_qwen_tokenizer
from engine.toy.components.weights import gains
from engine.toy.families.flux2 import LATENT_CHANNELS, build_flux2_vae, open_modulated_gates
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM: Final = 32
TEXT_LAYERS: Final = 8
"""The transformer reads this many layers of the text encoder, side by side."""
HEADS: Final = 3
HEAD_DIM: Final = 32

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "x_embedders.*"),
    (0.5, "proj_out.weight"),
    (0.03, "*linear_out.weight", "*to_out.0.weight"),  # what blocks add to the stream
    (0.3, "*modulations*"),
    (0.1, "norm_out.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `ModularPipeline.save_pretrained`."""
    tokenizer = build_qwen_tokenizer(parts.captions())
    pipeline = Flux3AutoBlocks().init_pipeline()
    pipeline.update_components(
        transformer=_build_transformer(HEADS * hidden_scale, seed=seed),
        text_encoder=build_qwen3_vl(tokenizer, TEXT_DIM, seed=seed, layers=34),
        vae=build_flux2_vae(seed),
    )
    parts.save(pipeline, model_dir, dtype, overwrite_modular_index=True)
    save_qwen3_vl_processor(model_dir, tokenizer, "tokenizer")
    index = model_dir / "modular_model_index.json"
    entries: dict[str, Any] = json.loads(index.read_text())
    kind = ["transformers", "Qwen3VLProcessor"]
    entries["tokenizer"] = [*kind, {"type_hint": kind, "subfolder": "tokenizer"}]
    for entry in entries.values():
        if isinstance(entry, list):
            hub_id = FAMILIES["flux3"].flavours[flavour].hub_id
            entry[2]["pretrained_model_name_or_path"] = hub_id
    index.write_text(json.dumps(entries, indent=2) + "\n")


@torch.no_grad()
def _build_transformer(heads: int, *, seed: int) -> Flux3Transformer2DModel:
    """Random; by default: 24 heads of 128, 5 blocks of each kind, 28 of both."""
    transformer = parts.random_model(
        Flux3Transformer2DModel,
        seed=seed,
        gain=GAIN,
        in_channels=4 * LATENT_CHANNELS,
        cond_in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_LAYERS * TEXT_DIM,
        axes_dims_rope=(HEAD_DIM // 4,) * 4,
    )
    for modulations in (
        transformer.early_stream_modulations,
        transformer.single_stream_modulations,
    ):
        for modulation in modulations.values():
            open_modulated_gates(modulation.linear.weight, 1)
    return transformer
