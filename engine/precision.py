"""Which numbers are stored and computed in which precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jobs.spec import JobSpec

_COMPUTE: Final = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(spec: JobSpec) -> torch.dtype:
    """The precision of matrix products."""
    return _COMPUTE[spec.mixed_precision]


def storage_dtype(spec: JobSpec, in_file: torch.dtype, *, keep_fp32: bool) -> torch.dtype:
    """The precision in which a base parameter is kept.

    Full training keeps fp32 masters. A frozen base is kept in the compute precision, or in the
    file's where that is narrower; it is never cast up, with two exceptions: fp8, in which nothing
    computes here, and what the model itself lists as in need of fp32 (`from_pretrained` casts
    that up too).

    Args:
        spec: The job.
        in_file: The file's precision.
        keep_fp32: The model lists this module as one that needs fp32.
    """
    if spec.model_type == "full" or keep_fp32:
        return torch.float32
    wanted = compute_dtype(spec)
    if in_file.itemsize == 1 or in_file.itemsize >= wanted.itemsize:
        return wanted
    return in_file


def autocast(spec: JobSpec, device: torch.device) -> AbstractContextManager[object]:
    """Compute in the job's precision; nothing to do in fp32."""
    if compute_dtype(spec) is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute_dtype(spec))
