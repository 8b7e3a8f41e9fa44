"""What is exported at the end, or from a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator

from jobs.spec.keys.groups import EXPORT
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_choice, as_list, as_none

ExportFormat = Literal["diffusers", "kohya", "comfyui"]
ExportDtype = Literal["auto", "fp32", "bf16", "fp16"]

_SPELLINGS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def read_formats(value: Any) -> Any:
    """One format or several; none means the default."""
    value = as_list(as_none(value))
    if isinstance(value, list | tuple):
        return [
            as_choice(word, get_args(ExportFormat)) for word in dict.fromkeys(map(str, value))
        ] or None
    return value


def read_dtype(value: Any) -> Any:
    """Return a precision, also as torch calls it."""
    value = as_choice(value, get_args(ExportDtype))
    return _SPELLINGS.get(value.strip().lower(), value) if isinstance(value, str) else value


class ExportKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    export_formats: Annotated[list[ExportFormat] | None, BeforeValidator(read_formats)] = field(
        None,
        EXPORT,
        "Key names of an exported LoRA: diffusers, kohya (for its scripts, mostly ComfyUI too), "
        "comfyui, or several (default: all that the family has).",
        resume="same",
        blank="all that the family has",
    )
    export_dtype: Annotated[ExportDtype, BeforeValidator(read_dtype)] = field(
        "auto",
        EXPORT,
        "Precision of exports; auto: the base model's for a full model, fp32 for a LoRA.",
        resume="same",
    )
