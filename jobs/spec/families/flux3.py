"""FLUX.3 of Black Forest Labs: the open models that make images."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="flux3",
    title="FLUX.3",
    pipelines=("Flux3ModularPipeline",),
    transformer="Flux3Transformer2DModel",
    blocks=("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock"),
    routed_blocks={"single_transformer_blocks": "num_single_layers"},
    flavours={
        # Its name in diffusers (`single_file_utils.py`), which also names the distilled model,
        # flux-3-image-klein. How that one is trained is not published.
        "image-klein-base": Flavour("black-forest-labs/flux-3-image-klein-base"),
    },
    attention="masked_batches",
    keeps_fp32=True,
    latent_step=16,  # the VAE shrinks by 8, and 2x2 latents make a token
    unused=("prompt_upsampler", "prompt_upsampler_processor"),
    # Texts are padded to a multiple of 80 tokens that the transformer sees; a caption of its prompt
    # upsampler has 100 to 350 words. Steps and guidance are those of its blocks.
    defaults={
        "timestep_sampling": "shift",
        "max_sequence_length": 640,
        "validation_num_inference_steps": 50,
        "validation_guidance": 3.5,
    },
)
