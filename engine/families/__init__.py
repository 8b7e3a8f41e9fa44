"""Model families: one small module each, with what is particular to it. See README.md here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from engine.families.shared.base import Family
from engine.families.shared.lora_names import LoraStyle
from jobs.spec.families import get_family

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Family", "LoraStyle", "load"]


def load(
    name: str, flavour: str | None = None, root: Path | None = None, fps: float | None = None
) -> Family:
    """Return a family, around one of its models.

    Args:
        name: The family's.
        flavour: Which of its published models; None if the job does not set it.
        root: The model's directory; None where only facts are needed.
        fps: Frames per second of its videos; None for the family's default.

    Raises:
        SpecError: Unknown family or flavour.
    """
    module = import_module(f"engine.families.{get_family(name, flavour).name}")
    _disable_progress_bars()
    family: Family = module.FAMILY(name, flavour, root, fps)
    return family


def _disable_progress_bars() -> None:
    """Keep the libraries' bars out of logs: whatever loads or samples has loaded a family first."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()  # and those of huggingface_hub
