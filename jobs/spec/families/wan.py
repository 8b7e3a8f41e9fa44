"""Wan 2.1 and 2.2 of Alibaba: text, given frames or a control video to video."""

from typing import Any, Final

from jobs.spec.families.base import Family, Flavour
from jobs.spec.families.references import References

T2V_GUIDANCE: Final = (4.0, 3.0)
"""Of Wan 2.2's text-to-video experts for high and for low noise, as published."""

WITH_FRAME: Final = 512
"""Tokens: where 2.1's image-to-video looks for the end of the text, behind CLIP's."""

_EXPERTS = {"validation_guidance": T2V_GUIDANCE[0], "validation_num_inference_steps": 40}
_T2V = {"_class_name": "WanPipeline"}
_I2V = {"_class_name": "WanImageToVideoPipeline"}

_I2V_A14B: Final[dict[str, Any]] = {
    "defaults": {"validation_guidance": 3.5, "validation_num_inference_steps": 40},
    "marks": _I2V | {"boundary_ratio": 0.9},
    "first_frame": True,
    "needs_first_frame": True,
}
_MOST: Final = 10  # conditioning images of VACE; a limit of ours, none of the model's
_VACE: Final[dict[str, Any]] = {
    "marks": {"_class_name": "WanVACEPipeline", "boundary_ratio": False},
    "references": References(fit=None, most=_MOST, required=True, videos=True),
    "transformer": "WanVACETransformer3DModel",
    "more_blocks": ("WanVACETransformerBlock",),
    "not_routed": "its control blocks add to the tokens of all layers",
}

_VACE_FUN: Final[dict[str, Any]] = _VACE | {
    "marks": {"_class_name": "WanVACEPipeline", "boundary_ratio": 0.875},
}

FAMILY = Family(
    name="wan",
    title="Wan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVACEPipeline"),
    transformer="WanTransformer3DModel",
    blocks=("WanTransformerBlock",),
    routed_blocks={"blocks": "num_layers"},
    flavours={
        "2.1-t2v-1.3b": Flavour("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", note="480p", marks=_T2V),
        "2.1-t2v-14b": Flavour("Wan-AI/Wan2.1-T2V-14B-Diffusers", note="480p and 720p", marks=_T2V),
        "2.1-i2v-14b-480p": Flavour(
            "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
            note="480p, first frame to video",
            marks=_I2V | {"boundary_ratio": False},
            first_frame=True,
            needs_first_frame=True,
            sees_first_frame=True,
            longest_text=WITH_FRAME,
        ),
        "2.1-i2v-14b-720p": Flavour(
            "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
            defaults={"resolution": 960},
            note="720p, first frame to video",
            marks=_I2V | {"boundary_ratio": False},
            first_frame=True,
            needs_first_frame=True,
            sees_first_frame=True,
            longest_text=WITH_FRAME,
        ),
        "2.1-flf2v-14b-720p": Flavour(
            "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
            defaults={"resolution": 960},
            # Its scheduler's 16 is for few steps of sampling; DiffSynth-Studio trains it with 5.
            trained_shift=5.0,
            note="720p, first and last frame to video",
            marks=_I2V | {"boundary_ratio": False},
            first_frame=True,
            needs_first_frame=True,
            last_frame=True,
            sees_first_frame=True,
            longest_text=WITH_FRAME,
        ),
        "2.1-vace-1.3b": Flavour(
            "Wan-AI/Wan2.1-VACE-1.3B-diffusers", note="480p, control video to video", **_VACE
        ),
        "2.1-vace-14b": Flavour(
            "Wan-AI/Wan2.1-VACE-14B-diffusers",
            note="480p and 720p, control video to video",
            **_VACE,
        ),
        "2.2-ti2v-5b": Flavour(
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            defaults={
                "fps": 24.0,
                "resolution": 960,
                "validation_num_inference_steps": 50,
            },
            latent_step=32,
            note="720p, text or first frame to video; its VAE shrinks by 16",
            marks=_T2V,
            first_frame=True,
        ),
        "2.2-t2v-a14b-high": Flavour(
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            defaults=_EXPERTS,
            note="the expert for high noise",
            marks=_T2V,
        ),
        "2.2-t2v-a14b-low": Flavour(
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            component="transformer_2",
            defaults=_EXPERTS,
            note="the expert for low noise",
            marks=_T2V,
        ),
        # Converted by who added it to diffusers; alibaba-pai's own files are of another layout.
        "2.2-vace-fun-a14b-high": Flavour(
            "linoyts/Wan2.2-VACE-Fun-14B-diffusers",
            note="control video to video, the expert for high noise",
            **_VACE_FUN,
        ),
        "2.2-vace-fun-a14b-low": Flavour(
            "linoyts/Wan2.2-VACE-Fun-14B-diffusers",
            component="transformer_2",
            note="control video to video, the expert for low noise",
            **_VACE_FUN,
        ),
        "2.2-i2v-a14b-high": Flavour(
            "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            note="first frame to video, the expert for high noise",
            **_I2V_A14B,
        ),
        "2.2-i2v-a14b-low": Flavour(
            "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            component="transformer_2",
            note="first frame to video, the expert for low noise",
            **_I2V_A14B,
        ),
        "2.2-flf2v-a14b-high": Flavour(
            "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            note="the same expert for high noise, first and last frame to video",
            last_frame=True,
            **_I2V_A14B,
        ),
        "2.2-flf2v-a14b-low": Flavour(
            "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            component="transformer_2",
            note="the same expert for low noise, first and last frame to video",
            last_frame=True,
            **_I2V_A14B,
        ),
    },
    context_parallel=True,
    splits_text=False,
    keeps_fp32=True,
    latent_step=16,  # 2x2 latents make a token; the VAE shrinks by 8, of TI2V-5B by 16
    frame_step=4,
    defaults={
        "resolution": 640,  # 832x480
        "fps": 16.0,
        "timestep_sampling": "shift",
        "validation_guidance": 5.0,
        "validation_num_inference_steps": 30,
    },
)
