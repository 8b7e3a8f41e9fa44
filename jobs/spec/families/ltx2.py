"""LTX-2 of Lightricks, which makes videos with their sound.

`Lightricks/LTX-2.5-Diffusers` holds a distilled transformer in `transformer/`, and the one that is
trained in `transformer_full/`; its scheduler is the former's. So says diffusers' documentation
(`docs/source/en/api/pipelines/ltx2.md`), which also has the latter's settings. Lightricks' trainer
trains the latter too, `ltx-2.5-22b-dev-transformer`.
"""

from jobs.spec.families.base import Family, Flavour, ShiftLine

_GEMMA_3 = {"text_encoder": ["transformers", "Gemma3ForConditionalGeneration"]}
_GEMMA_4 = {"text_encoder": ["transformers", "Gemma4UnifiedForConditionalGeneration"]}
_NOTE = "text or first frame to video, with or without sound"

FAMILY = Family(
    name="ltx2",
    title="LTX-2",
    pipelines=("LTX2Pipeline",),
    transformer="LTX2VideoTransformer3DModel",
    blocks=("LTX2VideoTransformerBlock",),
    not_routed="its video and sound attend to each other by the position of each token",
    flavours={
        "2-19b": Flavour("Lightricks/LTX-2", note=_NOTE, marks=_GEMMA_3, first_frame=True),
        "2.3-22b": Flavour(
            "diffusers/LTX-2.3-Diffusers", note=_NOTE, marks=_GEMMA_3, first_frame=True
        ),
        "2.5-22b": Flavour(
            "Lightricks/LTX-2.5-Diffusers",
            note=_NOTE,
            marks=_GEMMA_4,
            first_frame=True,
            folder="transformer_full",
            schedule={"use_dynamic_shifting": True, "shift_terminal": 0.1},
        ),
    },
    context_parallel=True,
    splits_text=False,
    latent_step=32,
    frame_step=8,
    sound=True,
    sound_layers=True,
    # `ShiftedLogitNormalTimestepSampler` of Lightricks' trainer.
    trained_shift=ShiftLine(few=1024, low=0.95, many=4096, high=2.05, endless=True),
    uniform_draws=0.1,
    defaults={
        "resolution": 704,  # 960x544, which that trainer's configs have
        "fps": 24.0,
        "max_sequence_length": 1024,
        "timestep_sampling": "stretched",
        "validation_guidance": 3.0,
        "validation_num_inference_steps": 30,
    },
)
