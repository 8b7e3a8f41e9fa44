"""Chroma of Lodestone Rock."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="chroma",
    title="Chroma",
    pipelines=("ChromaPipeline",),
    transformer="ChromaTransformer2DModel",
    blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    routed_blocks={
        "transformer_blocks": "num_layers",
        "single_transformer_blocks": "num_single_layers",
    },
    attention="masked_batches",
    flavours={
        "hd": Flavour("lodestones/Chroma1-HD", note="trained on at 1024 pixels"),
        "base": Flavour(
            "lodestones/Chroma1-Base",
            defaults={"resolution": 512},
            note="512 pixels, meant for training on",
        ),
        "flash": Flavour(
            "lodestones/Chroma1-Flash",
            defaults={"validation_num_inference_steps": 16, "validation_guidance": 1.0},
            undistilled="hd",
            note="16 steps, takes no guidance",
        ),
    },
    shifts_by_tokens=True,  # in one copy of Chroma1-HD's scheduler; 1 in another
    latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
    defaults={"validation_num_inference_steps": 40, "validation_guidance": 3.0},
)
