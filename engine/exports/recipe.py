"""Describe an export: job, step, precision, and the metadata in its header."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Final, Literal

import torch

from jobs.run.rundir import read_json
from jobs.spec.families import flavour_of, widened_of
from jobs.spec.keys.output import ExportDtype
from jobs.spec.values.resolutions import largest_resolution

if TYPE_CHECKING:
    from pathlib import Path

    from engine.families import Family
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.output import ExportFormat


# -- modelspec ------------------------------------------------------------------------------
# Metadata of exported files for other tools: ModelSpec 1.0.1.
#
# The standard is Stability-AI/ModelSpec's README at fe8dc60. Captions and prompts may be private,
# so nothing derived from them is written: no trigger phrase, no tags.


PREFIX: Final = "modelspec."
HASH: Final = f"{PREFIX}hash_sha256"
UNKNOWN_HASH: Final = "0x" + 64 * "0"
"""Placeholder in the header until the tensors are written; as long as the final hash."""
DIFFUSERS: Final = "diffusers"
"""The implementation value of files with diffusers' and peft's names."""

# Family → flavour → architecture name, with "" for jobs without a flavour. Finetunes that run the
# same way share a name. The names of flux, chroma, flux2, qwen_image, z_image, sd3, sdxl,
# stable_diffusion, lumina2, hunyuanvideo and hunyuanvideo15 come from sd-scripts and musubi-tuner
# (`sai_model_spec.py` of both).
_ARCHITECTURES: Final[dict[str, dict[str, str]]] = {
    "flux": {
        "": "flux-1",
        "dev": "flux-1-dev",
        "schnell": "flux-1-schnell",
        "krea": "flux-1-dev",
        "kontext": "flux-1-kontext-dev",
        "control": "flux-1-dev",
        "canny": "flux-1-canny-dev",
        "depth": "flux-1-depth-dev",
        "fill": "flux-1-fill-dev",
    },
    "flux2": {
        "": "Flux.2",
        "dev": "Flux.2-dev",
        "klein-base-4b": "Flux.2-klein-base-4b",
        "klein-base-9b": "Flux.2-klein-base-9b",
        "klein-4b": "Flux.2-klein-4b",
        "klein-9b": "Flux.2-klein-9b",
    },
    "flux3": {"": "flux-3-image-klein-base", "image-klein-base": "flux-3-image-klein-base"},
    "qwen_image": {
        "": "Qwen-Image",
        "base": "Qwen-Image",
        "2512": "Qwen-Image",
        "edit": "Qwen-Image-Edit",
        "edit-2509": "Qwen-Image-Edit-Plus",
        "edit-2511": "Qwen-Image-Edit-2511",
        "layered": "Qwen-Image-Layered",
    },
    "z_image": {"": "Z-Image", "base": "Z-Image", "turbo": "Z-Image-Turbo"},
    "sd3": {
        "": "stable-diffusion-3",
        "3.5-medium": "stable-diffusion-3-5-medium",
        "3.5-large": "stable-diffusion-3-5-large",
        "3.5-large-turbo": "stable-diffusion-3-5-large-turbo",
        "3-medium": "stable-diffusion-3-medium",
    },
    "sdxl": {
        "": "stable-diffusion-xl-v1-base",
        "base-1.0": "stable-diffusion-xl-v1-base",
    },
    "stable_diffusion": {
        "": "stable-diffusion",
        "1.5": "stable-diffusion-v1",
        "2.1": "stable-diffusion-v2-768-v",
        "2.1-base": "stable-diffusion-v2-512",
    },
    "chroma": {"": "chroma", "hd": "chroma", "base": "chroma", "flash": "chroma"},
    "lumina2": {"": "lumina-2", "2.0": "lumina-2"},
    "anima": {"": "anima", "base-1.0": "anima-base-1.0"},
    "ideogram4": {"": "ideogram-4", "4.0": "ideogram-4"},
    "krea2": {"": "krea-2", "raw": "krea-2-raw", "turbo": "krea-2-turbo"},
    "sana": {
        "": "sana",
        "1.5-1.6b": "sana-1.5-1.6b",
        "1.5-4.8b": "sana-1.5-4.8b",
        "1.6b": "sana-1.6b",
        "1.6b-bf16": "sana-1.6b",
        "600m": "sana-600m",
        "600m-512": "sana-600m",
    },
    "auraflow": {"": "auraflow", "v0.3": "auraflow", "v0.2": "auraflow"},
    "pixart_sigma": {
        "": "pixart-sigma-xl-2",
        "1024": "pixart-sigma-xl-2-1024",
        "512": "pixart-sigma-xl-2-512",
    },
    "hidream": {
        "": "hidream-i1",
        "full": "hidream-i1-full",
        "dev": "hidream-i1-dev",
        "fast": "hidream-i1-fast",
    },
    "wan": {
        "": "wan",
        "2.1-t2v-1.3b": "wan2.1-t2v-1.3b",
        "2.1-t2v-14b": "wan2.1-t2v-14b",
        "2.1-i2v-14b-480p": "wan2.1-i2v-14b-480p",
        "2.1-i2v-14b-720p": "wan2.1-i2v-14b-720p",
        "2.1-flf2v-14b-720p": "wan2.1-flf2v-14b-720p",
        "2.1-vace-1.3b": "wan2.1-vace-1.3b",
        "2.1-vace-14b": "wan2.1-vace-14b",
        "2.2-ti2v-5b": "wan2.2-ti2v-5b",
        # Both experts belong to one model; `timestep_range` tells them apart.
        "2.2-vace-fun-a14b-high": "wan2.2-vace-fun-a14b",
        "2.2-vace-fun-a14b-low": "wan2.2-vace-fun-a14b",
        "2.2-t2v-a14b-high": "wan2.2-t2v-a14b",
        "2.2-t2v-a14b-low": "wan2.2-t2v-a14b",
        "2.2-i2v-a14b-high": "wan2.2-i2v-a14b",
        "2.2-i2v-a14b-low": "wan2.2-i2v-a14b",
        "2.2-flf2v-a14b-high": "wan2.2-i2v-a14b",
        "2.2-flf2v-a14b-low": "wan2.2-i2v-a14b",
    },
    "ltxvideo": {
        "": "ltx-video",
        "2b-0.9": "ltx-video-2b-0.9",
        "13b-0.9.7-dev": "ltx-video-13b-0.9.7",
        "13b-0.9.7-distilled": "ltx-video-13b-0.9.7-distilled",
        "13b-0.9.8-distilled": "ltx-video-13b-0.9.8-distilled",
    },
    "ltx2": {"": "ltx-2", "2-19b": "ltx-2-19b", "2.3-22b": "ltx-2.3-22b", "2.5-22b": "ltx-2.5-22b"},
    "minimax_h3": {"": "minimax-h3", "fl2va": "minimax-h3"},
    "hunyuanvideo": {"": "hunyuan-video", "t2v": "hunyuan-video"},
    "hunyuanvideo15": {
        "": "hunyuan-video-1.5",
        "480p-t2v": "hunyuan-video-1.5",
        "720p-t2v": "hunyuan-video-1.5",
        "480p-i2v": "hunyuan-video-1.5-i2v",
        "720p-i2v": "hunyuan-video-1.5-i2v",
        "480p-t2v-distilled": "hunyuan-video-1.5",
        "480p-i2v-distilled": "hunyuan-video-1.5-i2v",
        "720p-i2v-distilled": "hunyuan-video-1.5-i2v",
        "480p-i2v-step-distilled": "hunyuan-video-1.5-i2v",
    },
}
# The code base that defines the names used in kohya's and ComfyUI's files.
_IMPLEMENTATIONS: Final = {
    "flux": "https://github.com/black-forest-labs/flux",
    "flux2": "https://github.com/black-forest-labs/flux2",
    "flux3": "https://github.com/black-forest-labs/flux-3-image-klein",
    "qwen_image": "https://github.com/QwenLM/Qwen-Image",
    "z_image": "https://github.com/Tongyi-MAI/Z-Image",
    "sd3": "https://github.com/Stability-AI/sd3.5",
    "sdxl": "https://github.com/Stability-AI/generative-models",
    "stable_diffusion": "https://github.com/Stability-AI/generative-models",
    "chroma": "https://huggingface.co/lodestones/Chroma",
    "lumina2": "https://github.com/Alpha-VLLM/Lumina-Image-2.0",
    "anima": "https://huggingface.co/circlestone-labs/Anima",
    "ideogram4": "https://github.com/ideogram-oss/ideogram4",
    "krea2": "https://github.com/krea-ai/krea-2",
    "auraflow": "https://github.com/cloneofsimo/minRF",
    "pixart_sigma": "https://github.com/PixArt-alpha/PixArt-sigma",
    "hidream": "https://github.com/HiDream-ai/HiDream-I1",
    "wan": "https://github.com/Wan-Video/Wan2.1",
    "ltxvideo": "https://github.com/Lightricks/LTX-Video",
    "ltx2": "https://github.com/Lightricks/LTX-2",
    "minimax_h3": "https://github.com/MiniMax-AI/MiniMax-H3",
    "hunyuanvideo": "https://github.com/Tencent/HunyuanVideo",
    "hunyuanvideo15": "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5",
}
_PREDICTIONS: Final = {"epsilon": "epsilon", "v_prediction": "v"}
_STEPS: Final = 1000  # timesteps of the schedules that `timestep_range` refers to


def model_spec(recipe: Recipe, style: str = DIFFUSERS) -> dict[str, str]:
    """Return the standard's keys for an exported file.

    Args:
        recipe: Describes the export.
        style: Naming of the tensors: `diffusers`, `kohya` or `comfyui`.

    Returns:
        Header strings; the hash is `UNKNOWN_HASH` until `VerifiedFile.check` replaces it.
    """
    spec, side = recipe.spec, largest_resolution(recipe.spec)
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": architecture_of(recipe),
        "implementation": implementation_of(spec.model_family, style),
        "title": spec.name,
        "resolution": f"{side}x{side}",
        "date": date_of(recipe.time),
        "hash_sha256": UNKNOWN_HASH,
        "prediction_type": _prediction(recipe),
        "timestep_range": _range(recipe),
    }
    return {PREFIX + name: text for name, text in values.items() if text}


def architecture_of(recipe: Recipe) -> str:
    """Return the architecture name of a job's model, with a suffix for adapters."""
    spec = recipe.spec
    family, model = spec.model_family, spec.pretrained_model_name_or_path
    name = _ARCHITECTURES[family][spec.model_flavour or flavour_of(family, model) or ""]
    if spec.model_type != "lora":
        return name
    return f"{name}/control-lora" if widened_of(spec) else f"{name}/lora"


def lora_spec(family: str, style: str, title: str, seconds: float) -> dict[str, str]:
    """Return the standard's keys for a LoRA of which only the family is known.

    Args:
        family: The model's family.
        style: Naming of the tensors: `diffusers`, `kohya` or `comfyui`.
        title: The title of the LoRA.
        seconds: When it was made, in Unix seconds.
    """
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{_ARCHITECTURES[family]['']}/lora",
        "implementation": implementation_of(family, style),
        "title": title,
        "date": date_of(seconds),
        "hash_sha256": UNKNOWN_HASH,
    }
    return {PREFIX + name: text for name, text in values.items()}


def families_called(architecture: str) -> frozenset[str]:
    """Return the families with a model of this architecture name, or of an adapter for it."""
    name = architecture.partition("/")[0]
    return frozenset(f for f, names in _ARCHITECTURES.items() if name in names.values())


def implementation_of(family: str, style: str) -> str:
    """Return the implementation whose module names a file uses.

    Args:
        family: The model's family.
        style: `diffusers`, `kohya` or `comfyui`.
    """
    # Kohya's scripts train diffusers' own U-Net of Stable Diffusion 1 and 2.
    theirs = style != DIFFUSERS and (family, style) != ("stable_diffusion", "kohya")
    return _IMPLEMENTATIONS[family] if theirs else DIFFUSERS


def date_of(seconds: float) -> str:
    """Return the UTC date of a Unix time in ISO 8601; "" for 0."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat() if seconds else ""


def _prediction(recipe: Recipe) -> str:
    """Return a denoising model's prediction type; "" for flow matching."""
    if recipe.family.facts.objective != "denoising":
        return ""
    schedule = read_json(recipe.root / "scheduler" / "scheduler_config.json") or {}
    return _PREDICTIONS.get(schedule.get("prediction_type", "epsilon"), "")


def _range(recipe: Recipe) -> str:
    """Return the timesteps that this expert of a model covers; "" if it covers all."""
    low, high = (round(sigma * _STEPS) for sigma in recipe.family.sigma_range())
    return "" if (low, high) == (0, _STEPS) else f"{low},{high}"


# -- recipe ---------------------------------------------------------------------------------


FileDtype = ExportDtype | Literal["fp8"]
"""Precisions of an export; fp8 is for single files only."""
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """What to export, and how.

    Attributes:
        spec: The job that trained it.
        family: Its model family.
        root: The base model's directory.
        step: Optimizer steps done.
        ema: Whether the weights are the moving average.
        dtype: The precision to store; the job's own by default.
        formats: The naming formats to export a LoRA in; None means all that the family has.
        time: When it was trained, in Unix seconds; 0 if unknown.
        single_file: Whether to write a full model as one file with its authors' layer names.
        partner: The component that another recipe of the same export describes: the model's other
            expert; "" if this one is alone.
        leads: Whether this recipe of a pair writes what is not trained.
    """

    spec: JobSpec
    family: Family
    root: Path
    step: int
    ema: bool
    dtype: FileDtype = "auto"
    formats: list[ExportFormat] | None = None
    time: float = 0.0
    single_file: bool = False
    partner: str = ""
    leads: bool = True

    def model_dtype(
        self, trained: torch.dtype, base: torch.dtype, *, keep_fp32: bool
    ) -> torch.dtype:
        """Return the precision in which a full model's tensor is stored.

        Args:
            trained: The precision it was trained in.
            base: The precision in the base model's file.
            keep_fp32: Whether the model lists its module as one that needs fp32.
        """
        if not trained.is_floating_point:
            return base
        if self.dtype == "auto":
            # Nothing here computes in fp8, and storing trained weights in fp8 would need scales.
            return base if base.itemsize > 1 else torch.bfloat16
        return torch.float32 if keep_fp32 else _DTYPES[self.dtype]

    def lora_dtype(self, trained: torch.dtype) -> torch.dtype:
        """Return the precision in which a tensor of an adapter is stored."""
        return trained if self.dtype == "auto" else _DTYPES[self.dtype]


def describe(recipe: Recipe, style: str = DIFFUSERS) -> dict[str, str]:
    """Return the header of an exported file, with string values as the format requires.

    It depends only on the training, so that exporting the same step gives identical bytes at any
    time and on any machine.

    Args:
        recipe: Describes the export.
        style: Naming of the tensors: `diffusers`, `kohya` or `comfyui`.
    """
    spec = recipe.spec
    facts = {
        "version": _version(),
        "base_model": _last_part(spec.pretrained_model_name_or_path),
        "model_family": spec.model_family,
        "model_flavour": spec.model_flavour or "",
        "model_type": spec.model_type,
        "step": str(recipe.step),
        "ema": str(recipe.ema).lower(),
        "trigger_word": trigger_word(spec) or "",
        "job": json.dumps(spec.public_values(), sort_keys=True),
    }
    own = {f"fsdp_tui.{name}": text for name, text in facts.items() if text}
    return {"format": "pt"} | own | model_spec(recipe, style)


def trigger_word(spec: DataKeys) -> str | None:
    """Return the job's trigger word or, if only its datasets have some, all of theirs."""
    words = [dataset.trigger_word for dataset in spec.datasets or []]
    return spec.trigger_word or ", ".join(dict.fromkeys(filter(None, words))) or None


def _version() -> str:
    try:
        return f"fsdp-tui {metadata.version('fsdp-tui')}"
    except metadata.PackageNotFoundError:  # run from a checkout
        return "fsdp-tui"


def _last_part(text: str) -> str:
    """Return the last part of a path; a hub id is returned unchanged.

    Exports get published, and home directories must not be part of them.
    """
    return os.path.basename(text.rstrip("/")) if text.startswith(("/", "~", ".")) else text
