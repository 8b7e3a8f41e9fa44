"""Repositories as people publish them: a pipeline among copies of its weights, a dataset."""

from __future__ import annotations

import json
import random
import struct
from typing import Final

_PARTS: Final = {
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "image_encoder": [None, None],
}
CHOSEN: Final = (
    "LICENSE.md",
    "README.md",
    "model_index.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
)
"""What a job reads of `flux_like`."""


def safetensors(count: int, seed: int = 0) -> bytes:
    """A file with one tensor of this many bytes."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}})
    return struct.pack("<Q", len(header)) + header.encode() + random.Random(seed).randbytes(count)


def clip_like(kind: str = "clip", count: int = 3000) -> dict[str, bytes]:
    """A model of transformers, with its copies for other libraries."""
    return {
        "README.md": b"",
        "config.json": json.dumps({"model_type": kind}).encode(),
        "preprocessor_config.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model.safetensors": safetensors(count),
        "pytorch_model.bin": b"pickled",
        "tf_model.h5": b"h5",
        "flax_model.msgpack": b"flax",
    }


def flux_like(count: int = 3000) -> dict[str, bytes]:
    """A pipeline, with what the hub has beside it; `count` bytes a weights file."""
    shards = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"metadata": {}, "weight_map": {"a": shards[0], "b": shards[1]}}
    files = {
        "model_index.json": json.dumps({"_class_name": "FluxPipeline", **_PARTS}).encode(),
        "README.md": b"---\nlicense: apache-2.0\n---\n",
        "LICENSE.md": b"do as you like\n",
        ".gitattributes": b"",
        "flux1.safetensors": safetensors(count, 9),
        "preview.png": b"\x89PNG",
        "transformer/config.json": b'{"_class_name": "FluxTransformer2DModel"}',
        "transformer/diffusion_pytorch_model.safetensors.index.json": json.dumps(index).encode(),
        "transformer/diffusion_pytorch_model.fp16.safetensors": safetensors(count, 8),
        "vae/config.json": b'{"_class_name": "AutoencoderKL"}',
        "vae/diffusion_pytorch_model.safetensors": safetensors(count, 3),
        "vae/diffusion_pytorch_model.bin": b"pickled",
        "text_encoder/config.json": b'{"architectures": ["CLIPTextModel"]}',
        "text_encoder/model.safetensors": safetensors(count, 4),
        "text_encoder/model.fp16.safetensors": safetensors(count, 5),
        "text_encoder/pytorch_model.bin": b"pickled",
        "text_encoder/model.onnx": b"onnx",
        "text_encoder/flax_model.msgpack": b"flax",
        "tokenizer/vocab.json": b"{}",
        "tokenizer/merges.txt": b"",
        "safety_checker/config.json": b"{}",
        "vae_encoder/model.onnx": b"onnx",
    }
    return files | {
        f"transformer/{name}": safetensors(count, seed) for seed, name in enumerate(shards)
    }
