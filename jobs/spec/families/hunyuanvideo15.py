"""HunyuanVideo 1.5 of Tencent, text or first frame to video."""

from jobs.spec.families.base import Family, Flavour

_T2V = {"_class_name": "HunyuanVideo15Pipeline"}
_I2V = {"_class_name": "HunyuanVideo15ImageToVideoPipeline"}
_DISTILLED = {"validation_guidance": 1.0}


def _from_image(size: str, distilled: str = "", **defaults: float) -> Flavour:
    """Return image-to-video of 480p or 720p; `distilled` says how, as its published name ends."""
    kind = distilled and ("8 or 12 steps, " if "step" in distilled else "") + "takes no guidance"
    return Flavour(
        f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{size}_i2v{distilled}",
        defaults=defaults | (_DISTILLED if distilled else {}),
        undistilled=f"{size}-i2v" if distilled else None,
        note=f"{size}, first frame to video" + (kind and f", {kind}"),
        marks=_I2V,
        first_frame=True,
        needs_first_frame=True,
        sees_first_frame=True,
        gray_frames=False,
    )


FAMILY = Family(
    name="hunyuanvideo15",
    title="HunyuanVideo 1.5",
    pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    transformer="HunyuanVideo15Transformer3DModel",
    blocks=("HunyuanVideo15TransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    flavours={
        "480p-t2v": Flavour(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", note="480p", marks=_T2V
        ),
        "720p-t2v": Flavour(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
            defaults={"resolution": 960},
            note="720p",
            marks=_T2V,
        ),
        "480p-i2v": _from_image("480p"),
        "720p-i2v": _from_image("720p", resolution=960),
        # Guidance and steps of the distilled ones: "Optimal Inference Configurations" in the
        # authors' README.
        "480p-t2v-distilled": Flavour(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled",
            defaults=_DISTILLED,
            undistilled="480p-t2v",
            note="480p, takes no guidance",
            marks=_T2V,
        ),
        "480p-i2v-distilled": _from_image("480p", "_distilled"),
        "720p-i2v-distilled": _from_image("720p", "_distilled", resolution=960),
        "480p-i2v-step-distilled": _from_image(
            "480p", "_step_distilled", validation_num_inference_steps=12
        ),
    },
    attention="masked_batches",
    latent_step=16,  # the VAE shrinks by 16, and each latent is a token
    frame_step=4,
    # The default of the authors' trainer (train_timestep_shift in its train.py). Its samplers have
    # 5, 7 and 9.
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
