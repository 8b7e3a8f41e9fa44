"""Wan 2.1 and 2.2 of Alibaba, text to video."""

from jobs.spec.families.base import Family, Flavour

_EXPERTS = {"validation_guidance": 4.0}  # of Wan 2.2's experts, as published

FAMILY = Family(
    name="wan",
    title="Wan",
    pipelines=("WanPipeline",),
    transformer="WanTransformer3DModel",
    blocks=("WanTransformerBlock",),
    flavours={
        "2.1-t2v-1.3b": Flavour("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", note="480p"),
        "2.1-t2v-14b": Flavour("Wan-AI/Wan2.1-T2V-14B-Diffusers", note="480p and 720p"),
        "2.2-ti2v-5b": Flavour(
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            defaults={"fps": 24.0, "resolution": 960},
            latent_step=32,
            note="720p, text or first frame to video; its VAE shrinks by 16",
            first_frame=True,
        ),
        "2.2-t2v-a14b-high": Flavour(
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            defaults=_EXPERTS,
            note="the expert for high noise",
        ),
        "2.2-t2v-a14b-low": Flavour(
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            component="transformer_2",
            defaults=_EXPERTS,
            note="the expert for low noise",
        ),
    },
    context_parallel=True,
    splits_text=False,
    keeps_fp32=True,
    latent_step=16,  # 2x2 latents make a token; the VAE shrinks by 8, of TI2V-5B by 16
    frame_step=4,
    defaults={
        "resolution": 640,  # 832x480
        "fps": 16.0,
        "timestep_sampling": "shift",
        "validation_guidance": 5.0,
        "validation_num_inference_steps": 30,
    },
)
