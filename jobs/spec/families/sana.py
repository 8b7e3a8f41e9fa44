"""Sana of NVIDIA."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="sana",
    title="Sana",
    pipelines=("SanaPipeline",),
    transformer="SanaTransformer2DModel",
    blocks=("SanaTransformerBlock",),
    not_routed="its blocks mix neighboring tokens by convolution",
    attention="fixed",
    flavours={
        "1.5-1.6b": Flavour(
            "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
            note="with normalized queries and keys",
        ),
        "1.5-4.8b": Flavour(
            "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers", note="60 layers instead of 20"
        ),
        "1.6b": Flavour("Efficient-Large-Model/Sana_1600M_1024px_diffusers"),
        "1.6b-bf16": Flavour(
            "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
            note="finished in bf16",
        ),
        "600m": Flavour("Efficient-Large-Model/Sana_600M_1024px_diffusers"),
        "600m-512": Flavour(
            "Efficient-Large-Model/Sana_600M_512px_diffusers",
            defaults={"resolution": 512},
            note="trained on at 512 pixels",
        ),
    },
    # vLLM refuses Gemma 2 in fp16 ("numerical instability", vllm/config/model.py), and diffusers'
    # example of Sana's fp16 variant loads it in bf16 (SanaControlNetPipeline).
    overflows_fp16="its text encoder, Gemma 2",
    latent_step=32,  # the VAE's; each latent is a token
    defaults={
        "max_sequence_length": 300,
        "timestep_sampling": "shift",
        "validation_guidance": 4.5,
    },
)
