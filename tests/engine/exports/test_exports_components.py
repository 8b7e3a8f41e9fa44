"""An export takes over what pipelines load, and no other copies of it that the hub has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from engine.exports.stock import files_of, read_index
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "vae": ["diffusers", "AutoencoderKL"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "image_encoder": [None, None],
}


def published(root: Path, files: dict[str, str]) -> Path:
    """A model's directory with these files in its parts, separated by spaces."""
    root.mkdir()
    (root / "model_index.json").write_text(json.dumps(INDEX))
    for part, names in files.items():
        (root / part).mkdir()
        for name in names.split():
            (root / part / name).write_bytes(b"{}")
    return root


def taken(root: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for copy in files_of(root, read_index(root), {"unet"}):
        part, slash, name = copy.name.partition("/")
        if slash:
            found.setdefault(part, set()).add(name)
    return found


def test_other_copies_of_the_weights_are_left_out(tmp_path: Path) -> None:
    """As Stable Diffusion XL is published."""
    root = published(
        tmp_path / "sdxl",
        {
            "text_encoder": "config.json flax_model.msgpack model.fp16.safetensors model.onnx "
            "model.safetensors openvino_model.bin openvino_model.xml pytorch_model.bin",
            "text_encoder_2": "config.json model.onnx model.onnx_data model.safetensors.index.json "
            "model-00001-of-00002.safetensors model-00002-of-00002.safetensors "
            "model.safetensors.index.fp16.json model.fp16-00001-of-00001.safetensors",
            "vae": "config.json diffusion_pytorch_model.safetensors "
            "diffusion_pytorch_model.fp16.safetensors",
            "unet": "config.json model.onnx_data openvino_model.xml "
            "diffusion_pytorch_model.safetensors diffusion_pytorch_model.fp16.safetensors",
        },
    )
    assert taken(root) == {
        "text_encoder": {"config.json", "model.safetensors"},
        "text_encoder_2": {
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        },
        "vae": {"config.json", "diffusion_pytorch_model.safetensors"},
        "unet": {"config.json"},
    }


def test_what_has_no_other_copy_stays(tmp_path: Path) -> None:
    """Pickled weights are what is loaded where safetensors are there as a variant only."""
    root = published(
        tmp_path / "older",
        {
            "text_encoder": "config.json pytorch_model.bin model.fp16.safetensors",
            "text_encoder_2": "config.json pytorch_model.bin",
            "vae": "config.json diffusion_pytorch_model.safetensors notes.fp16.txt",
            "unet": "config.json diffusion_pytorch_model.safetensors",
        },
    )
    found = taken(root)
    assert "pytorch_model.bin" in found["text_encoder"] & found["text_encoder_2"]
    assert found["vae"] == {"config.json", "diffusion_pytorch_model.safetensors", "notes.fp16.txt"}


@pytest.mark.parametrize("name", ["..", "../other", "/etc", ""])
def test_nothing_is_taken_from_outside_of_the_model(name: str, tmp_path: Path) -> None:
    root = published(tmp_path / "model", {})
    (root / "model_index.json").write_text(json.dumps({name: ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(UserError, match="is no folder of the model"):
        read_index(root)
