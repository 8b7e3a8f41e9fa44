"""Which attention kernels a job can use; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.spec.families import FAMILIES
from jobs.spec.rules.data_conflicts import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.families import Family
    from jobs.spec.job_spec import JobSpec

GPU_KERNELS: Final = ("flash", "flash3", "efficient", "cudnn")
_FLASH: Final = ("flash", "flash3")


def is_masked(family: Family) -> bool:
    """Whether its attention may have a mask, which no flash attention supports."""
    return family.attention.startswith("masked")


def kernel_conflict(
    family: Family | None, kernel: str, batch: int, *, samples: bool
) -> Conflict | None:
    """Say why a job cannot use an attention kernel with its model.

    Args:
        family: The model's; None where it is not known.
        kernel: `attention_backend`.
        batch: Samples of a micro-batch.
        samples: Whether the job makes samples.
    """
    if family is None or kernel == "auto":
        return None
    if family.attention == "fixed":
        return Conflict(
            "attention_backend",
            f"{family.title} has no choice of kernel in diffusers; use auto",
            named=True,
        )
    if kernel not in _FLASH or not is_masked(family):
        return None
    if batch > 1:
        return Conflict(
            "attention_backend",
            f"{kernel} supports no masks, and {family.title} masks captions of different lengths; "
            "use auto, or train_batch_size: 1",
            named=True,
        )
    if samples and family.attention == "masked_samples":
        return Conflict(
            "attention_backend",
            f"{kernel} supports no masks, and samples of {family.title} have one; use auto",
            named=True,
        )
    return None


def _kernel(spec: JobSpec) -> Conflict | None:
    kernel = spec.attention_backend
    if spec.device == "cpu" and kernel in GPU_KERNELS:
        return Conflict("attention_backend", f"{kernel} needs a GPU; use auto or math", named=True)
    if kernel in (*_FLASH, "cudnn") and spec.mixed_precision == "no":
        return Conflict(
            "attention_backend",
            f"{kernel} does not support fp32; set mixed_precision: bf16",
            named=True,
        )
    family = FAMILIES.get(spec.model_family)
    samples = bool(spec.validation_prompts or spec.num_class_images)
    return kernel_conflict(family, kernel, spec.train_batch_size, samples=samples)


KERNEL_RULES: Final[tuple[Callable[[JobSpec], Conflict | None], ...]] = (_kernel,)
