"""MiniMax-H3 of MiniMax: videos from text, or from their first frame and their last one.

Its configs were compared with those of MiniMaxAI/MiniMax-H3, and its numbers of parameters with the
sizes in the indexes of its weights.
"""

from jobs.spec.families.base import Family, Flavour

FAMILY = Family(
    name="minimax_h3",
    title="MiniMax-H3",
    pipelines=("MiniMaxH3ModularPipeline",),
    transformer="MiniMaxH3Transformer3DModel",
    blocks=("MiniMaxH3TransformerBlock", "MiniMaxH3TokenRefinerBlock"),
    not_routed="its samples lie one behind the other in one sequence",
    flavours={
        "fl2va": Flavour(
            "MiniMaxAI/MiniMax-H3",
            note="text, or first and last frame, to video, with or without sound",
            first_frame=True,
            keyframes=True,
        )
    },
    guidance="none",  # it is distilled into the model
    true_cfg=False,
    keeps_fp32=True,
    context_parallel=True,
    splits_text=False,
    fills_up=True,
    sound=True,
    rate=24.0,
    latent_step=32,  # the VAE shrinks by 16, and the transformer takes 2x2 latents
    # The VAE makes 5n + 2 latents of 17n + 5 frames, and can decode no fewer than 7.
    frame_step=17,
    frame_rest=22,
    unused=("transformer_ref",),  # 66 GB, for videos from references
    defaults={
        "resolution": 640,  # 832x480, of DiffSynth-Studio's script; published for 1344x768
        "fps": 24.0,
        # With the scheduler's 12, as ai-toolkit's web page and AkaneTendo25/musubi-tuner draw.
        "timestep_sampling": "uniform_shift",
        "validation_num_inference_steps": 50,
        "validation_guidance": 1.0,
    },
)
