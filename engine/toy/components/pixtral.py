"""The processor of FLUX.2-dev, as files: Mistral's tokenizer, and how pictures become its input.

`PixtralProcessor` itself needs torchvision, which nothing else here does, so its settings are
written as it would write them. What it makes of a prompt, the tokenizer alone makes too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.toy.components.language_models import PATCH

if TYPE_CHECKING:
    from pathlib import Path

PROCESSOR = "PixtralProcessor"
IMAGE_SETTINGS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "PixtralImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": PATCH,
    "processor_class": PROCESSOR,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 1540},
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


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
