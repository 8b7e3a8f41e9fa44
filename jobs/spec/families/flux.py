"""FLUX.1 of Black Forest Labs."""

from jobs.spec.families.base import Family, Flavour
from jobs.spec.families.references import References, to_preferred

FAMILY = Family(
    name="flux",
    title="FLUX.1",
    pipelines=("FluxPipeline", "FluxKontextPipeline"),
    transformer="FluxTransformer2DModel",
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    flavours={
        "dev": Flavour("black-forest-labs/FLUX.1-dev", note="guidance-distilled"),
        "schnell": Flavour(
            "black-forest-labs/FLUX.1-schnell",
            defaults={
                "max_sequence_length": 256,
                "validation_num_inference_steps": 4,
                "validation_guidance": 0.0,
            },
            undistilled="dev",
            note="4 steps, takes no guidance",
        ),
        "krea": Flavour("black-forest-labs/FLUX.1-Krea-dev", note="guidance-distilled"),
        "kontext": Flavour(
            "black-forest-labs/FLUX.1-Kontext-dev",
            note="edits a conditioning image",
            references=References(to_preferred),
        ),
    },
    guidance="embedded",
    context_parallel=True,
    latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
    tokenizer="tokenizer_2",
)
