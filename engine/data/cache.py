"""Content-addressed files of tensors: written atomically, verified, shared by jobs and ranks.

The name of a file is a hash of everything that decides its content, so two jobs that need the
same latents find each other's, a killed run leaves only whole files, and a changed picture or
caption simply has another name.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_SCHEMA: Final = 1
_SAMPLED_BLOCKS: Final = 64
_BLOCK: Final = 64 << 10


class TensorCache:
    """One kind of cached tensors (`latents` or `text`) below the cache directory."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root / kind
        self.root.mkdir(parents=True, exist_ok=True)

    def key(self, **facts: Any) -> str:
        """The name for content that these facts decide; they must be JSON values."""
        text = json.dumps({"schema": _SCHEMA, **facts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether a whole, readable file is there; a damaged one is removed."""
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                return bool(list(file.keys()))
        except FileNotFoundError:
            return False
        except (SafetensorError, OSError, ValueError):
            path.unlink(missing_ok=True)
            return False

    def write(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write aside, then rename; whoever else writes the same key writes the same content."""
        path = self.path(key)
        path.parent.mkdir(exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        save_file(tensors, aside)
        os.replace(aside, path)

    def read(self, key: str) -> dict[str, torch.Tensor]:
        return load_file(self.path(key))


def fingerprint(directory: Path) -> str:
    """Identity of a model component: its JSON files whole, its weights by size and samples.

    Reading 64 blocks of a 9 GB encoder takes milliseconds; reading all of it, seconds per rank.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)}:{size}".encode())
        with open(path, "rb") as file:
            if size <= _SAMPLED_BLOCKS * _BLOCK:
                digest.update(file.read())
                continue
            for block in range(_SAMPLED_BLOCKS):
                file.seek((size - _BLOCK) * block // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:24]
