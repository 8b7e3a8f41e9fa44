"""Which numbers are stored and computed in which precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jobs.spec import JobSpec


def compute_dtype(spec: JobSpec) -> torch.dtype:
    """The precision of matrix products."""
    return torch.bfloat16 if spec.mixed_precision == "bf16" else torch.float32


def storage_dtype(spec: JobSpec, in_file: torch.dtype, *, keep_fp32: bool) -> torch.dtype:
    """The precision in which a base parameter is kept.

    Full training keeps fp32 masters. A frozen base keeps what the file has, and is only ever cast
    down, to the compute precision, never up.

    Args:
        spec: The job.
        in_file: The file's precision.
        keep_fp32: The model lists this module as one that needs fp32.
    """
    if spec.model_type == "full":
        return torch.float32
    wanted = compute_dtype(spec)
    if keep_fp32 or in_file.itemsize <= wanted.itemsize:
        return in_file
    return wanted


def autocast(spec: JobSpec, device: torch.device) -> AbstractContextManager[object]:
    """Compute in the job's precision; nothing to do in fp32."""
    if compute_dtype(spec) is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute_dtype(spec))
