"""AuraFlow of fal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jobs.spec.families.base import Family, Flavour

if TYPE_CHECKING:
    from collections.abc import Mapping

_CELL = 8  # pixels of a latent's side


def _longest_side(config: Mapping[str, Any]) -> int | None:
    """Its positions are a square table of patches; beyond it the model reads others' rows."""
    positions, patch = config.get("pos_embed_max_size"), config.get("patch_size")
    if not isinstance(positions, int) or not isinstance(patch, int):
        return None
    return math.isqrt(positions) * patch * _CELL


FAMILY = Family(
    name="auraflow",
    title="AuraFlow",
    pipelines=("AuraFlowPipeline",),
    transformer="AuraFlowTransformer2DModel",
    blocks=("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"),
    routed_blocks={
        "joint_transformer_blocks": "num_mmdit_layers",
        "single_transformer_blocks": "num_single_dit_layers",
    },
    attention="fixed",
    flavours={
        "v0.3": Flavour("fal/AuraFlow-v0.3", note="up to 1536 pixels a side"),
        "v0.2": Flavour(
            "fal/AuraFlow-v0.2",
            # Buckets of all shapes have positions, whatever the job's bucket_step is.
            defaults={"resolution": 736},
            note="up to 1024 pixels a side",
        ),
    },
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    longest_side=_longest_side,
    defaults={
        "timestep_sampling": "shift",
        "max_sequence_length": 256,
        "validation_num_inference_steps": 50,
        "validation_guidance": 3.5,
    },
)
