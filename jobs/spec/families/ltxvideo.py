"""LTX-Video of Lightricks."""

from jobs.spec.families.base import Family, Flavour, ShiftLine

_DISTILLED = {
    "max_sequence_length": 256,
    "validation_guidance": 1.0,
    "validation_num_inference_steps": 8,
}

FAMILY = Family(
    name="ltxvideo",
    title="LTX-Video",
    # They know the time of a frame in different ways, and call the model alike otherwise.
    pipelines=("LTXPipeline", "LTXConditionPipeline"),
    transformer="LTXVideoTransformer3DModel",
    blocks=("LTXVideoTransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    attention="masked_samples",
    context_parallel=True,
    splits_text=False,
    flavours={
        "2b-0.9": Flavour(
            "Lightricks/LTX-Video", note="text or first frame to video", first_frame=True
        ),
        "13b-0.9.7-dev": Flavour(
            "Lightricks/LTX-Video-0.9.7-dev",
            defaults={"max_sequence_length": 256},
            note="text or first frame to video",
            first_frame=True,
        ),
        "13b-0.9.7-distilled": Flavour(
            "Lightricks/LTX-Video-0.9.7-distilled",
            defaults=_DISTILLED,
            undistilled="13b-0.9.7-dev",
            note="8 steps, takes no guidance",
            first_frame=True,
        ),
        "13b-0.9.8-distilled": Flavour(
            "Lightricks/LTX-Video-0.9.8-13B-distilled",
            defaults=_DISTILLED,
            undistilled="13b-0.9.7-dev",
            note="8 steps, takes no guidance",
            first_frame=True,
        ),
    },
    latent_step=32,
    frame_step=8,
    # Lightricks' trainer has this line, and so have the schedulers; it extrapolates it.
    trained_shift=ShiftLine(few=1024, low=0.95, many=4096, high=2.05),
    defaults={
        "resolution": 640,  # 768x512
        "fps": 25.0,
        "max_sequence_length": 128,
        "timestep_sampling": "stretched",
        "validation_guidance": 3.0,
        "validation_num_inference_steps": 40,
    },
)
