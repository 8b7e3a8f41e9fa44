"""Names of weight files: hub repositories keep copies in other precisions beside the plain ones."""

from __future__ import annotations

import re
from typing import Final

# What `save_pretrained` of diffusers and of transformers calls them.
_STEMS: Final = ("diffusion_pytorch_model", "model", "pytorch_model")
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}")
_USUAL: Final = ("safetensors", "bin", "index", "json")


def variant_of(name: str) -> str | None:
    """`fp16` of `model.fp16.safetensors`; None of a plain file, and of one that is no weights.

    `from_pretrained` loads such a file only when asked to (`variant="fp16"`). Shards, and
    indices of shards, have it in other places of their names.
    """
    stem, *words = _SHARD.sub("", name).split(".")
    if stem not in _STEMS or not {"safetensors", "bin"} & set(words):
        return None
    return next((word for word in words if word not in _USUAL), None)
