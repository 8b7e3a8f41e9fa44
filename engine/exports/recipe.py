"""What is exported: of which job and step, in which precision, and what it says of itself."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final, Literal

import torch

from engine.exports.modelspec import DIFFUSERS, model_spec
from jobs.spec.keys.export import ExportDtype

if TYPE_CHECKING:
    from pathlib import Path

    from engine.families import Family
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.export import ExportFormat

FileDtype = ExportDtype | Literal["fp8"]
"""Precisions of an export; fp8 of a single file alone."""
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """What is exported, and how.

    Attributes:
        spec: The job that trained it.
        family: Its model family.
        root: The base model's directory.
        step: Optimizer steps done.
        ema: Whether it is an average of the weights.
        dtype: The precision to store; the job's own by default.
        formats: The names to export a LoRA under; None: all that the family has.
        time: When it was trained, in Unix seconds; 0 where that is not known.
        single_file: Whether a full model becomes one file with its authors' layers.
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

    def model_dtype(
        self, trained: torch.dtype, base: torch.dtype, *, keep_fp32: bool
    ) -> torch.dtype:
        """Return the precision in which a full model's tensor is stored.

        Args:
            trained: What it was trained in.
            base: What the base model's file has.
            keep_fp32: The model lists its module as one that needs fp32.
        """
        if not trained.is_floating_point:
            return base
        if self.dtype == "auto":
            # Nothing computes in fp8 here, and fp8 of what was trained would need scales.
            return base if base.itemsize > 1 else torch.bfloat16
        return torch.float32 if keep_fp32 else _DTYPES[self.dtype]

    def lora_dtype(self, trained: torch.dtype) -> torch.dtype:
        """Return the precision in which a tensor of an adapter is stored."""
        return trained if self.dtype == "auto" else _DTYPES[self.dtype]


def describe(recipe: Recipe, style: str = DIFFUSERS) -> dict[str, str]:
    """Make the header of an exported file; strings, as the format requires.

    Depends on nothing but the training, so that the same step is the same bytes whenever and
    wherever it is exported.

    Args:
        recipe: What is exported.
        style: `diffusers`, `kohya` or `comfyui`: whose names the tensors have.
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
    """Return the job's trigger word; where every dataset has its own, all of them."""
    words = [dataset.trigger_word for dataset in spec.datasets or []]
    return spec.trigger_word or ", ".join(dict.fromkeys(filter(None, words))) or None


def _version() -> str:
    try:
        return f"fsdp-tui {metadata.version('fsdp-tui')}"
    except metadata.PackageNotFoundError:  # run from a checkout
        return "fsdp-tui"


def _last_part(text: str) -> str:
    """Return the last part of a path.

    Exports are published; home directories must not be. A hub id is unchanged.
    """
    return os.path.basename(text.rstrip("/")) if text.startswith(("/", "~", ".")) else text
