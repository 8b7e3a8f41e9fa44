"""Stable Diffusion XL of Stability AI, and what was trained from it."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="sdxl",
    title="Stable Diffusion XL",
    pipelines=("StableDiffusionXLPipeline",),
    transformer="UNet2DConditionModel",
    blocks=("BasicTransformerBlock", "ResnetBlock2D"),
    not_routed="its UNet has blocks of several resolutions",
    attention="fixed",
    flavours={"base-1.0": Flavour("stabilityai/stable-diffusion-xl-base-1.0")},
    objective="denoising",
    component="unet",
    text_lora={"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
    told_sizes=True,
    latent_step=32,  # the VAE shrinks by 8, and the UNet halves latents twice
    defaults={
        "max_sequence_length": 77,  # CLIP's
        "validation_num_inference_steps": 30,
        "validation_guidance": 5.0,
    },
)
