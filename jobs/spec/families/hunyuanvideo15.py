"""HunyuanVideo 1.5 of Tencent, text to video."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="hunyuanvideo15",
    title="HunyuanVideo 1.5",
    pipelines=("HunyuanVideo15Pipeline",),
    transformer="HunyuanVideo15Transformer3DModel",
    blocks=("HunyuanVideo15TransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    flavours={
        "480p-t2v": Flavour(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", note="480p"
        ),
        "720p-t2v": Flavour(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
            defaults={"resolution": 960},
            note="720p",
        ),
    },
    attention="masked_batches",
    latent_step=16,  # the VAE shrinks by 16, and each latent is a token
    frame_step=4,
    # The default of the authors' trainer (train_timestep_shift in its train.py). Its samplers have
    # 5 and 9.
    trained_shift=3.0,
    defaults={
        "resolution": 640,
        "fps": 24.0,
        "max_sequence_length": 1000,
        "timestep_sampling": "shift",
        "validation_guidance": 6.0,
        "validation_num_inference_steps": 50,
    },
)
