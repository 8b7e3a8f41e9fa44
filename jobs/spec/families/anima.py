"""Anima of CircleStone Labs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.spec.families.base import Family, Flavour

if TYPE_CHECKING:
    from collections.abc import Mapping


def _longest_side(config: Mapping[str, Any]) -> int | None:
    """Return the pixels to which the positions of any axis reach, of 8 a latent.

    Diffusers computes them once for all axes, up to the longest (CosmosRotaryPosEmbed).
    """
    sizes, patch = config.get("max_size"), config.get("patch_size")
    if not isinstance(sizes, list) or not isinstance(patch, list):
        return None
    return int(8 * patch[-1] * max(size // part for size, part in zip(sizes, patch, strict=True)))


FAMILY = Family(
    name="anima",
    title="Anima",
    pipelines=("AnimaModularPipeline",),
    transformer="CosmosTransformer3DModel",
    blocks=("CosmosTransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    flavours={
        "base-1.0": Flavour("circlestone-labs/Anima-Base-v1.0-Diffusers", note="of 2B parameters")
    },
    attention="fixed",
    keeps_fp32=True,  # by the class: positions that these models do not have
    # Losses of NaN: pull request 2274 of kohya-ss/sd-scripts. ComfyUI keeps the stream between
    # blocks in fp32 (pull request 12249).
    overflows_fp16="its transformer",
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    longest_side=_longest_side,
    # Its trainers shift nothing by default (sd-scripts: discrete_flow_shift 1.0; diffusion-pipe:
    # no shift). The scheduler's 3 is for sampling.
    trained_shift=1.0,
    defaults={
        "validation_num_inference_steps": 50,
        "validation_guidance": 4.0,
    },
)
