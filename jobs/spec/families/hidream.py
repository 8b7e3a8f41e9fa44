"""HiDream-I1 of HiDream.ai."""

from jobs.spec.families.base import Family, Flavour

_DISTILLED = {"validation_guidance": 0.0}

FAMILY = Family(
    name="hidream",
    title="HiDream-I1",
    pipelines=("HiDreamImagePipeline",),
    transformer="HiDreamImageTransformer2DModel",
    blocks=("HiDreamBlock",),
    not_routed="it routes tokens to experts, and fills images that are not square up with tokens",
    attention="fixed",
    flavours={
        "full": Flavour("HiDream-ai/HiDream-I1-Full", note="four experts"),
        "dev": Flavour(
            "HiDream-ai/HiDream-I1-Dev",
            defaults={"validation_num_inference_steps": 28, **_DISTILLED},
            undistilled="full",
            note="28 steps without guidance",
        ),
        "fast": Flavour(
            "HiDream-ai/HiDream-I1-Fast",
            defaults={"validation_num_inference_steps": 16, **_DISTILLED},
            undistilled="full",
            note="16 steps without guidance",
        ),
    },
    experts=True,
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    tokenizer="tokenizer_3",
    # Under a licence that each person has to agree to.
    supplied={
        "text_encoder_4": "config.json and the weights of meta-llama/Llama-3.1-8B-Instruct",
        "tokenizer_4": "its tokenizer.json, tokenizer_config.json and special_tokens_map.json",
    },
    # ai-toolkit's and diffusers' for all of its models; dev's scheduler samples with 6.
    trained_shift=3.0,
    defaults={
        "max_sequence_length": 128,
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 50,
        "validation_guidance": 5.0,
    },
)
