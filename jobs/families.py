"""Facts about model families that need no torch: names, classes, flavours.

The engine's side of a family (how it is encoded, packed and called) is `engine/families/<name>.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jobs.errors import SpecError
from jobs.spellings import did_you_mean

if TYPE_CHECKING:
    from jobs.spec import JobSpec

Objective = Literal["flow", "epsilon", "v_prediction"]


@dataclass(frozen=True)
class Family:
    """What is known of a family without its weights.

    Attributes:
        name: The `model_family` key.
        title: What people call it.
        pipelines: `_class_name`s of `model_index.json` that this family trains.
        transformer: Class of the denoiser.
        blocks: Its repeated block classes, wrapped by default.
        flavours: Flavour → hub id; the first is the default.
        objective: What it learns to predict: flow, epsilon or v_prediction.
        context_parallel: Whether diffusers has a context-parallel plan for its transformer.
        latent_step: Sides of pictures are multiples of so many pixels.
        frame_step: Videos have a multiple of this many frames, plus one; 0 for pictures.
        tokenizer: The tokenizer whose tokens `max_sequence_length` counts.
    """

    name: str
    title: str
    pipelines: tuple[str, ...]
    transformer: str
    blocks: tuple[str, ...]
    flavours: dict[str, str] = field(default_factory=dict)
    objective: Objective = "flow"
    context_parallel: bool = False
    latent_step: int = 16
    frame_step: int = 0
    tokenizer: str = "tokenizer"


FAMILIES: dict[str, Family] = {
    "flux": Family(
        name="flux",
        title="FLUX.1",
        pipelines=("FluxPipeline",),
        transformer="FluxTransformer2DModel",
        blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        flavours={
            "dev": "black-forest-labs/FLUX.1-dev",
            "schnell": "black-forest-labs/FLUX.1-schnell",
            "krea": "black-forest-labs/FLUX.1-Krea-dev",
        },
        context_parallel=True,
        latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
        tokenizer="tokenizer_2",
    ),
}


def get_family(name: str, flavour: str | None = None) -> Family:
    """Look a family up, and check that it has the flavour.

    Raises:
        SpecError: Unknown family or flavour; the message lists all and names the nearest.
    """
    key = name.strip().lower()
    if key not in FAMILIES:
        raise SpecError(
            f'unknown model_family "{name}"{did_you_mean(name, FAMILIES)}; '
            f"known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[key]
    if flavour and flavour not in family.flavours:
        raise SpecError(
            f'unknown model_flavour "{flavour}" of {family.name}'
            f"{did_you_mean(flavour, family.flavours)}; known: {', '.join(family.flavours)}"
        )
    return family


def wrapped_classes(spec: JobSpec) -> list[str]:
    """The block classes that become FSDP units of their own: the job's, else the family's."""
    return spec.fsdp_transformer_layer_cls_to_wrap or list(get_family(spec.model_family).blocks)
