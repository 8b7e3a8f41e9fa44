"""Stable Diffusion 3 and 3.5 of Stability AI."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="sd3",
    title="Stable Diffusion 3",
    pipelines=("StableDiffusion3Pipeline",),
    transformer="SD3Transformer2DModel",
    blocks=("JointTransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    attention="fixed",
    flavours={
        "3.5-medium": Flavour(
            "stabilityai/stable-diffusion-3.5-medium",
            defaults={"validation_num_inference_steps": 40, "validation_guidance": 4.5},
            note="with second attentions in its first 13 blocks",
        ),
        "3.5-large": Flavour("stabilityai/stable-diffusion-3.5-large"),
        "3.5-large-turbo": Flavour(
            "stabilityai/stable-diffusion-3.5-large-turbo",
            defaults={"validation_num_inference_steps": 4, "validation_guidance": 0.0},
            undistilled="3.5-large",
            note="4 steps without guidance",
        ),
        "3-medium": Flavour(
            "stabilityai/stable-diffusion-3-medium-diffusers",
            defaults={"validation_guidance": 7.0},
        ),
    },
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    tokenizer="tokenizer_3",
    defaults={
        "max_sequence_length": 256,
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 28,
        "validation_guidance": 3.5,
    },
)
