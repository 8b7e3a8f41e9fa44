"""PixArt-Sigma of Huawei Noah's Ark Lab."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="pixart_sigma",
    title="PixArt-Sigma",
    pipelines=("PixArtSigmaPipeline",),
    transformer="PixArtTransformer2DModel",
    blocks=("BasicTransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    attention="fixed",
    flavours={
        "1024": Flavour("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS"),
        "512": Flavour("PixArt-alpha/PixArt-Sigma-XL-2-512-MS", defaults={"resolution": 512}),
    },
    objective="denoising",
    other_names=("Transformer2DModel",),
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    defaults={
        "max_sequence_length": 300,
        "validation_num_inference_steps": 20,
        "validation_guidance": 4.5,
    },
)
