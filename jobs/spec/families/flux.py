"""FLUX.1 of Black Forest Labs."""

from jobs.spec.families.base import Family, Flavour
from jobs.spec.families.references import References, to_preferred

_TEXT = {"_class_name": ("FluxPipeline", "FluxKontextPipeline")}
_FILL = {"_class_name": "FluxFillPipeline"}
_CONTROL = {"_class_name": "FluxControlPipeline"}
_BESIDE = References(None, required=True)

FAMILY = Family(
    name="flux",
    title="FLUX.1",
    pipelines=("FluxPipeline", "FluxKontextPipeline", "FluxControlPipeline", "FluxFillPipeline"),
    transformer="FluxTransformer2DModel",
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    routed_blocks={
        "transformer_blocks": "num_layers",
        "single_transformer_blocks": "num_single_layers",
    },
    flavours={
        "dev": Flavour("black-forest-labs/FLUX.1-dev", note="guidance-distilled", marks=_TEXT),
        "schnell": Flavour(
            "black-forest-labs/FLUX.1-schnell",
            defaults={
                "max_sequence_length": 256,
                "validation_num_inference_steps": 4,
                "validation_guidance": 0.0,
            },
            undistilled="dev",
            marks=_TEXT,
            note="4 steps, takes no guidance",
        ),
        "krea": Flavour(
            "black-forest-labs/FLUX.1-Krea-dev", note="guidance-distilled", marks=_TEXT
        ),
        "kontext": Flavour(
            "black-forest-labs/FLUX.1-Kontext-dev",
            defaults={"validation_guidance": 2.5},
            note="edits a conditioning image",
            marks=_TEXT,
            references=References(to_preferred),
        ),
        "control": Flavour(
            "black-forest-labs/FLUX.1-dev",
            note="a new control LoRA: follows a conditioning image, in channels of its own",
            marks={"_class_name": "FluxPipeline"},
            references=_BESIDE,
            widened="x_embedder",
        ),
        "canny": Flavour(
            "black-forest-labs/FLUX.1-Canny-dev",
            defaults={"validation_guidance": 30.0, "validation_num_inference_steps": 50},
            note="follows the edges in a conditioning image",
            marks=_CONTROL,
            references=_BESIDE,
        ),
        "depth": Flavour(
            "black-forest-labs/FLUX.1-Depth-dev",
            defaults={"validation_guidance": 10.0, "validation_num_inference_steps": 30},
            note="follows the depths in a conditioning image",
            marks=_CONTROL,
            references=_BESIDE,
        ),
        "fill": Flavour(
            "black-forest-labs/FLUX.1-Fill-dev",
            defaults={"validation_guidance": 30.0, "validation_num_inference_steps": 50},
            note="fills in the masked part of an image",
            marks=_FILL,
            references=References(None, required=True, masks=True),
        ),
    },
    guidance="embedded",
    context_parallel=True,
    latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
    tokenizer="tokenizer_2",
    shifts_by_tokens=True,
)
