"""FLUX.2 of Black Forest Labs."""

from jobs.spec.families.base import FLUX_LINE, Family, Flavour
from jobs.spec.families.references import References, to_area_at_most

_DISTILLED = {"validation_num_inference_steps": 4, "validation_guidance": 1.0}
_BASE = {"validation_num_inference_steps": 50}
_KLEIN = {"_class_name": "Flux2KleinPipeline"}

FAMILY = Family(
    name="flux2",
    title="FLUX.2",
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline"),
    transformer="Flux2Transformer2DModel",
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    routed_blocks={
        "transformer_blocks": "num_layers",
        "single_transformer_blocks": "num_single_layers",
    },
    flavours={
        "dev": Flavour(
            "black-forest-labs/FLUX.2-dev",
            note="guidance-distilled",
            marks={"_class_name": "Flux2Pipeline"},
        ),
        "klein-base-4b": Flavour(
            "black-forest-labs/FLUX.2-klein-base-4B",
            defaults=_BASE,
            note="not distilled",
            guidance="classifier_free",
            marks=_KLEIN | {"is_distilled": False},
        ),
        "klein-base-9b": Flavour(
            "black-forest-labs/FLUX.2-klein-base-9B",
            defaults=_BASE,
            note="not distilled",
            guidance="classifier_free",
            marks=_KLEIN | {"is_distilled": False},
        ),
        "klein-4b": Flavour(
            "black-forest-labs/FLUX.2-klein-4B",
            defaults=_DISTILLED,
            undistilled="klein-base-4b",
            note="4 steps, takes no guidance",
            guidance="none",
            marks=_KLEIN | {"is_distilled": True},
        ),
        "klein-9b": Flavour(
            "black-forest-labs/FLUX.2-klein-9B",
            defaults=_DISTILLED,
            undistilled="klein-base-9b",
            note="4 steps, takes no guidance",
            guidance="none",
            marks=_KLEIN | {"is_distilled": True},
        ),
    },
    guidance="embedded",
    true_cfg=False,
    context_parallel=True,
    latent_step=16,  # the VAE shrinks by 8, and 2x2 latents make a token
    # OneTrainer's pull request 1516 reports Black Forest Labs' word that FLUX.2 was trained with
    # this line. The pipeline's own formula is for sampling: 7.6 at 1024x1024.
    trained_shift=FLUX_LINE,
    defaults={
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 28,
        "validation_guidance": 4.0,
    },
    references=References(to_area_at_most, most=10, least=64, widest=8.0),
)
