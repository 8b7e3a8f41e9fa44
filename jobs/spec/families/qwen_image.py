"""Qwen-Image of Alibaba."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="qwen_image",
    title="Qwen-Image",
    pipelines=("QwenImagePipeline",),
    transformer="QwenImageTransformer2DModel",
    blocks=("QwenImageTransformerBlock",),
    flavours={"base": Flavour("Qwen/Qwen-Image")},
    context_parallel=True,
    masks_text=True,
    latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
    defaults={
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 50,
        "validation_guidance": 4.0,
    },
)
