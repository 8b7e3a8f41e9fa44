"""Z-Image of Alibaba's Tongyi."""

from jobs.spec.families.base import FLUX_LINE, Family, Flavour

FAMILY = Family(
    name="z_image",
    title="Z-Image",
    pipelines=("ZImagePipeline",),
    transformer="ZImageTransformer2DModel",
    blocks=("ZImageTransformerBlock",),
    routed_blocks={"layers": "n_layers"},
    flavours={
        "base": Flavour("Tongyi-MAI/Z-Image", note="not distilled"),
        "turbo": Flavour(
            "Tongyi-MAI/Z-Image-Turbo",
            defaults={"validation_num_inference_steps": 9, "validation_guidance": 0.0},
            undistilled="base",
            note="9 steps without guidance",
        ),
    },
    attention="masked_samples",
    guided_above=0.0,  # its scale says how much is added to the prediction: 4 is 5 elsewhere
    # Issue 14 of Tongyi-MAI/Z-Image: latents of NaN. Pull request 795 of kohya-ss/musubi-tuner: a
    # loss of NaN.
    overflows_fp16="its transformer",
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    # Nobody knows what it was trained with. Peers draw around 2 to 3, and the scheduler's 6 is for
    # sampling.
    trained_shift=FLUX_LINE,
    defaults={
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 50,
        "validation_guidance": 4.0,
    },
)
