"""Ideogram 4 of Ideogram."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="ideogram4",
    title="Ideogram 4",
    pipelines=("Ideogram4Pipeline",),
    transformer="Ideogram4Transformer2DModel",
    blocks=("Ideogram4TransformerBlock",),
    not_routed="its blocks are given one sequence that does not say where the image begins",
    # The authors publish quantized weights only (fp8 and nf4), which are no base here. OneTrainer's
    # presets train this copy in bf16.
    flavours={
        "4.0": Flavour(
            "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers", note="a copy in bf16, of 9.3B"
        )
    },
    text_negatives=False,
    attention="masked_batches",
    shifts_by_tokens=True,
    latent_step=16,  # the VAE shrinks by 8, and 2x2 latents make a token
    # Noise as in the pipeline, which diffusers' script and musubi-tuner draw too: the logit of
    # sigma has a deviation of 1.5.
    defaults={
        "max_sequence_length": 2048,
        "timestep_sampling": "shift",
        "logit_std": 1.5,
        "validation_num_inference_steps": 48,
        "validation_guidance": 7.0,
    },
)
