"""Processors as files: how images become the input of FLUX.2-dev, Qwen-Image-Edit and CLIP.

The classes themselves need torchvision, which nothing else here does, or have other names without
it, so their settings are written as they would write them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.toy.components.language_models import PATCH

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen2Tokenizer

_COMMON = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
PROCESSOR = "PixtralProcessor"
IMAGE_SETTINGS = {
    **_COMMON,
    "patch_size": PATCH,
    "image_processor_type": "PixtralImageProcessor",
    "processor_class": PROCESSOR,
    "size": {"longest_edge": 1540},
}
CLIP_SETTINGS = {
    **_COMMON,
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 224},
}
QWEN_SETTINGS = {
    **_COMMON,
    "image_processor_type": "Qwen2VLImageProcessor",
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": PATCH,
    "processor_class": "Qwen2_5_VLProcessor",
    "size": {"longest_edge": 12845056, "shortest_edge": 3136},
    "temporal_patch_size": 2,
}
SETTINGS = {
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "image_token": "[IMG]",
    "patch_size": PATCH,
    "processor_class": PROCESSOR,
    "spatial_merge_size": 2,
}


def save_pixtral_processor(model_dir: Path) -> None:
    """Make the saved tokenizer of a pipeline a processor, as in the published model.

    Args:
        model_dir: Written by `Flux2Pipeline.save_pretrained` with `build_mistral_tokenizer`'s
            tokenizer in it.
    """
    directory = model_dir / "tokenizer"
    _write(directory / "preprocessor_config.json", IMAGE_SETTINGS)
    _write(directory / "processor_config.json", SETTINGS)
    settings = _read(directory / "tokenizer_config.json")
    _write(directory / "tokenizer_config.json", {**settings, "processor_class": PROCESSOR})
    parts = _read(model_dir / "model_index.json")
    _write(model_dir / "model_index.json", {**parts, "tokenizer": ["transformers", PROCESSOR]})


def save_qwen_processor(model_dir: Path, pipeline: str, tokenizer: Qwen2Tokenizer) -> None:
    """Make a saved Qwen-Image one of the pipelines that edit, as the published models are.

    Args:
        model_dir: Written by `QwenImagePipeline.save_pretrained`.
        pipeline: The class of the other pipeline.
        tokenizer: Its tokenizer.
    """
    directory = model_dir / "processor"
    tokenizer.save_pretrained(directory)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        _write(directory / name, QWEN_SETTINGS)
    parts = _read(model_dir / "model_index.json")
    named = {"_class_name": pipeline, "processor": ["transformers", "Qwen2VLProcessor"]}
    _write(model_dir / "model_index.json", {**parts, **named})


def save_clip_processor(model_dir: Path) -> None:
    """Give a saved pipeline the image processor of CLIP, by the name that published models have."""
    _write(model_dir / "image_processor" / "preprocessor_config.json", CLIP_SETTINGS)
    parts = _read(model_dir / "model_index.json")
    named = {"image_processor": ["transformers", "CLIPImageProcessor"]}
    _write(model_dir / "model_index.json", {**parts, **named})


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
