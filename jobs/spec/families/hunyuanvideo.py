"""HunyuanVideo of Tencent."""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="hunyuanvideo",
    title="HunyuanVideo",
    pipelines=("HunyuanVideoPipeline",),
    transformer="HunyuanVideoTransformer3DModel",
    blocks=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
    routed_blocks={
        "transformer_blocks": "num_layers",
        "single_transformer_blocks": "num_single_layers",
    },
    flavours={
        "t2v": Flavour("hunyuanvideo-community/HunyuanVideo", note="guidance-distilled"),
    },
    guidance="embedded",
    attention="masked_batches",
    latent_step=16,  # the VAE shrinks by 8, and 2x2 latents make a token
    frame_step=4,
    # Its scheduler's 7 is for sampling in 50 steps; musubi-tuner's docs lower it to 3 for detail.
    trained_shift=3.0,
    defaults={
        "resolution": 640,
        "fps": 24.0,
        "max_sequence_length": 256,
        "timestep_sampling": "shift",
        "validation_guidance": 6.0,
        "validation_num_inference_steps": 30,
    },
)
