"""Qwen-Image of Alibaba."""

from jobs.spec.families.base import Family, Flavour
from jobs.spec.families.references import References, to_area, to_small_area

_WIDEST = 200.0  # of what Qwen2.5-VL resizes
_EDIT = References(to_area, required=True, widest=_WIDEST, seen=to_area, fixed=True)
_EDIT_PLUS = References(
    to_area, most=3, required=True, widest=_WIDEST, seen=to_small_area, fixed=True
)
_LAYERS = References(None, most=20, required=True, layers=True)
_TEXT = {"_class_name": "QwenImagePipeline"}
_PLUS = {"_class_name": "QwenImageEditPlusPipeline"}

FAMILY = Family(
    name="qwen_image",
    title="Qwen-Image",
    pipelines=(
        "QwenImagePipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImageLayeredPipeline",
    ),
    transformer="QwenImageTransformer2DModel",
    blocks=("QwenImageTransformerBlock",),
    routed_blocks={"transformer_blocks": "num_layers"},
    flavours={
        "base": Flavour("Qwen/Qwen-Image", marks=_TEXT),
        "2512": Flavour("Qwen/Qwen-Image-2512", marks=_TEXT, note="of December 2025"),
        "edit": Flavour(
            "Qwen/Qwen-Image-Edit",
            note="edits a conditioning image",
            marks={"_class_name": "QwenImageEditPipeline"},
            references=_EDIT,
        ),
        "edit-2509": Flavour(
            "Qwen/Qwen-Image-Edit-2509",
            note="edits one to three conditioning images",
            marks=_PLUS,
            references=_EDIT_PLUS,
        ),
        "edit-2511": Flavour(
            "Qwen/Qwen-Image-Edit-2511",
            note="edits one to three conditioning images",
            marks=_PLUS,
            references=_EDIT_PLUS,
        ),
        "layered": Flavour(
            "Qwen/Qwen-Image-Layered",
            defaults={"resolution": 640},  # its pipeline makes images of 640² or 1024² pixels
            note="splits an image into layers",
            marks={"_class_name": "QwenImageLayeredPipeline"},
            latent_step=32,  # of its pipeline
            references=_LAYERS,
        ),
    },
    context_parallel=True,
    attention="masked_batches",
    # Qwen's authors say that models trained in bf16 may overflow in fp16 (issues 670 and 868 of
    # QwenLM/Qwen3), and vLLM clamps Qwen2.5-VL's image encoder (pull request 13968). Latents are
    # NaN in ComfyUI's issue 10751; diffusers clips the blocks' outputs, but not what is within.
    overflows_fp16="its text encoder, Qwen2.5-VL, and its transformer",
    shifts_by_tokens=True,
    latent_step=16,  # the VAE shrinks by 8, and the transformer packs 2x2 latents
    defaults={
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 50,
        "validation_guidance": 4.0,
    },
)
