"""Krea 2 of Krea AI."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="krea2",
    title="Krea 2",
    pipelines=("Krea2Pipeline",),
    transformer="Krea2Transformer2DModel",
    blocks=("Krea2TransformerBlock", "Krea2TextFusionBlock"),
    routed_blocks={"transformer_blocks": "num_layers"},
    flavours={
        "raw": Flavour(
            "krea/Krea-2-Raw",
            note="not distilled; its LoRAs work on Turbo",
            marks={"is_distilled": False},
        ),
        "turbo": Flavour(
            "krea/Krea-2-Turbo",
            defaults={"validation_num_inference_steps": 8, "validation_guidance": 0.0},
            undistilled="raw",
            note="8 steps without guidance",
            marks={"is_distilled": True},
        ),
    },
    attention="masked_batches",
    keeps_fp32=True,
    guided_above=0.0,  # its scale says how much is added to the prediction: 3.5 is 4.5 elsewhere
    shifts_by_tokens=True,
    latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
    # Steps and guidance as the authors recommend (README of krea-ai/krea-2).
    defaults={
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 52,
        "validation_guidance": 3.5,
    },
)
