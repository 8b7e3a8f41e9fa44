"""AuraFlow of fal."""

from jobs.families.base import Family, Flavour

FAMILY = Family(
    name="auraflow",
    title="AuraFlow",
    pipelines=("AuraFlowPipeline",),
    transformer="AuraFlowTransformer2DModel",
    blocks=("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"),
    flavours={
        "v0.3": Flavour("fal/AuraFlow-v0.3"),
        "v0.2": Flavour("fal/AuraFlow-v0.2"),
    },
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    defaults={
        "max_sequence_length": 256,
        "validation_num_inference_steps": 50,
        "validation_guidance": 3.5,
    },
)
