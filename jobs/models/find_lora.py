"""Where a LoRA lies that a job names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.paths import expand

if TYPE_CHECKING:
    from pathlib import Path

# Diffusers' name, and peft's.
_USUAL: Final = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")


def find_lora(place: str) -> Path | None:
    """Return the file that a path names: itself, or what a directory has.

    Of a directory, that is the file that diffusers or peft would read; else its only one.
    """
    path = expand(place)
    if not path.is_dir():
        return path if path.is_file() else None
    files = {file.name: file for file in path.glob("*.safetensors") if file.is_file()}
    usual = next((files[name] for name in _USUAL if name in files), None)
    return usual or (next(iter(files.values())) if len(files) == 1 else None)
