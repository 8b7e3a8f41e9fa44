"""SimpleTuner's families and flavours, and the published models that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import models
from jobs.spec.families import FAMILIES
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_MODEL: Final = "pretrained_model_name_or_path"

# Names of published models there and here.
_FLAVOURS: Final = {
    "auraflow": {"v0.3": "v0.3", "v0.2": "v0.2"},
    "chroma": {"base": "base", "hd": "hd"},
    "flux": {name: name for name in ("dev", "schnell", "krea", "kontext")},
    "flux2": {"dev": "dev", "klein-4b": "klein-base-4b", "klein-9b": "klein-base-9b"},
    "hidream": {name: name for name in ("full", "dev", "fast")},
    "hunyuanvideo15": {"t2v-480p": "480p-t2v", "t2v-720p": "720p-t2v"},
    "lumina2": {"2.0": "2.0"},
    "ltxvideo": {"0.9.0": "2b-0.9"},
    "pixart_sigma": {"600M-512": "512", "600M-1024": "1024"},
    "qwen_image": {
        "v1.0": "base",
        "edit-v1": "edit",
        **dict.fromkeys(("edit-v2", "edit-v2+"), "edit-2509"),
        "edit-v3": "edit-2511",
    },
    "sana": {
        "sana1.5-1.6b-1024": "1.5-1.6b",
        "sana1.0-1.6b-1024": "1.6b-bf16",
        "sana1.0-600m-1024": "600m",
    },
    "sd3": {"medium": "3.5-medium", "large": "3.5-large"},
    "sdxl": {"base-1.0": "base-1.0"},
    "stable_diffusion": {"1.5": "1.5", "2.1": "2.1"},
    "wan": {
        "t2v-480p-1.3b-2.1": "2.1-t2v-1.3b",
        "t2v-480p-14b-2.1": "2.1-t2v-14b",
        "i2v-14b-2.1": "2.1-i2v-14b-480p",
        "i2v-14b-2.1-720p": "2.1-i2v-14b-720p",
        "i2v-14b-2.2-high": "2.2-i2v-a14b-high",
        "i2v-14b-2.2-low": "2.2-i2v-a14b-low",
        "ti2v-5b-2.2": "2.2-ti2v-5b",
    },
    "z_image": {"base": "base", "turbo": "turbo", "turbo-ostris-v2": "turbo"},
}

# Published models that are no flavours here, but of a family that is.
_OTHER_MODELS: Final = {
    "auraflow": {"pony": "purplesmartai/pony-v7-base", "v0.1": "fal/AuraFlow"},
    "chroma": {"flash": "lodestones/Chroma1-Flash"},
    "flux": {"fluxbooru": "terminusresearch/fluxbooru-v0.3"},
    "ltxvideo": {"0.9.5": "Lightricks/LTX-Video-0.9.5"},
    "lumina2": {"neta-lumina": "terminusresearch/neta-lumina-v1"},
    "pixart_sigma": {
        "600M-2048": "PixArt-alpha/PixArt-Sigma-XL-2-2K-MS",
        "900M-1024-v0.6": "terminusresearch/pixart-900m-1024-ft-v0.6",
        "900M-1024-v0.7-stage1": "terminusresearch/pixart-900m-1024-ft-v0.7-stage1",
        "900M-1024-v0.7-stage2": "terminusresearch/pixart-900m-1024-ft-v0.7-stage2",
    },
    "qwen_image": {"v2.0": "Qwen/Qwen-Image-2512"},
    "sana": {
        "sana1.5-4.8b-1024": "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
        "sana1.0-1.6b-2048": "Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers",
        "sana1.0-600m-512": "Efficient-Large-Model/Sana_600M_512px_diffusers",
    },
    "stable_diffusion": {
        "1.4": "CompVis/stable-diffusion-v1-4",
        "2.0": "stabilityai/stable-diffusion-2-0",
        "digitaldiffusion": "Junglerally/Digital-Diffusion",
        "dreamshaper": "Lykon/dreamshaper-8",
        "pseudoflex-v2": "bghira/pseudo-flex-v2",
        "pseudojourney": "bghira/pseudo-journey-v2",
    },
}

# What it takes where no flavour is named, by its own names of families.
_USUAL: Final = {
    "auraflow": "v0.3",
    "chroma": "base",
    "flux": "krea",
    "flux2": "klein-9b",
    "hidream": "full",
    "hunyuanvideo": "t2v-480p",
    "ltxvideo": "0.9.5",
    "lumina2": "2.0",
    "pixart_sigma": "900M-1024-v0.6",
    "qwen_image": "v2.0",
    "sana": "sana1.5-4.8b-1024",
    "sd1x": "dreamshaper",
    "sd2x": "pseudoflex-v2",
    "sd3": "medium",
    "sdxl": "base-1.0",
    "wan": "t2v-480p-1.3b-2.1",
    "z_image": "turbo",
}

_OTHER_NAMES: Final = {
    "hunyuanvideo": "hunyuanvideo15",
    "sd1x": "stable_diffusion",
    "sd2x": "stable_diffusion",
}


def family(draft: Draft, key: str, value: Any) -> None:
    word = normal_key(str(value))
    word = _OTHER_NAMES.get(word, word)
    models.set_family(draft, key, word if word in FAMILIES else None)


def flavour(draft: Draft, key: str, value: Any) -> None:
    family, name = draft.values.get("model_family", ""), str(value).strip()
    flavour = _FLAVOURS.get(family, {}).get(name)
    if flavour is None and name in getattr(FAMILIES.get(family), "flavours", {}):
        flavour = name
    published = _OTHER_MODELS.get(family, {}).get(name)
    if flavour is not None:
        draft.take(key, "model_flavour", flavour, "" if flavour == value else "its name here")
    elif published is None:
        draft.unsupported(key, "not a published model here; `fsdp-tui families` lists them")
    elif draft.get(_MODEL) is None:
        draft.take(key, _MODEL, published, "its published model")
    else:
        draft.unneeded(key, f"{_MODEL} is used")


def use_published_model(draft: Draft) -> None:
    """Where no model is named, the tool takes the published one of the flavour."""
    family = draft.values.get("model_family")
    unknown = draft.get("model_flavour") is not None and "model_flavour" not in draft.values
    if family is None or draft.get(_MODEL) is not None or unknown:
        return
    flavour = draft.values.get("model_flavour")
    hub_id = ""
    if draft.get("model_flavour") is None:
        usual = _USUAL.get(normal_key(str(draft.get("model_family"))), "")
        flavour = _FLAVOURS.get(family, {}).get(usual)
        hub_id = _OTHER_MODELS.get(family, {}).get(usual, "")
        if flavour is not None:
            draft.values["model_flavour"] = flavour
            draft.assume("model_flavour", "", model_flavour=flavour)
    if flavour is not None:
        hub_id = FAMILIES[family].flavours[flavour].hub_id
    if hub_id:
        draft.values[_MODEL] = hub_id
        draft.assume(_MODEL, "the flavour's published model", **{_MODEL: hub_id})
