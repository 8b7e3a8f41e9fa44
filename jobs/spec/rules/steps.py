"""What one optimizer step sees: how many samples, over how many forwards. Pure.

Everyone who needs these numbers asks here; of the keys alone, some follow from others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.strategy import data_parallel_size, world_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import JobSpec

_MOST: Final = 2  # times as many ranks as the job has, at most, are suggested


def accumulation_steps(spec: JobSpec, ranks: int | None = None) -> int:
    """Return the forwards of each rank in one optimizer step.

    Args:
        spec: The job. If its `global_batch_size` does not divide, which `find_conflicts` refuses,
            the number is rounded up.
        ranks: World size; default: the job's.
    """
    if spec.global_batch_size is None:
        return spec.gradient_accumulation_steps or 1
    return -(-spec.global_batch_size // _one_forward(spec, ranks))


def global_batch_size(spec: JobSpec) -> int:
    """Return the samples of one optimizer step, over all ranks."""
    return spec.global_batch_size or _one_forward(spec) * accumulation_steps(spec)


def _one_forward(spec: JobSpec, ranks: int | None = None) -> int:
    """Return the samples that all ranks together compute in one forward."""
    return data_parallel_size(spec, ranks) * spec.train_batch_size


# -- combinations that cannot run ----------------------------------------------------------------


def _global_batch(spec: JobSpec) -> Conflict | None:
    size, key = spec.global_batch_size, "global_batch_size"
    if size is None or world_size(spec) % spec.context_parallel_size:
        return None  # or another rule says it
    at_once, forwards = _one_forward(spec), spec.gradient_accumulation_steps
    product = f"{_ranks(spec)} x train_batch_size {spec.train_batch_size}"
    if size % at_once:
        return Conflict(
            key,
            f"{key} {size} is not a multiple of {at_once} ({product}); use {_fitting(spec, size)}",
        )
    if forwards is not None and forwards * at_once != size:
        return Conflict(
            "gradient_accumulation_steps",
            f"gradient_accumulation_steps {forwards} contradicts {key} {size} ({product} x "
            f"{forwards} = {forwards * at_once}); remove gradient_accumulation_steps",
        )
    return None


def _ranks(spec: JobSpec) -> str:
    ranks, size = world_size(spec), spec.context_parallel_size
    named = f"{ranks} rank{'s' * (ranks != 1)}"
    return f"{named} / context_parallel_size {size}" if size > 1 else named


def _fitting(spec: JobSpec, size: int) -> str:
    """Say which global batch, batch per rank or number of ranks would do, the nearest of each."""
    at_once, batch = _one_forward(spec), spec.train_batch_size
    groups, split = data_parallel_size(spec), spec.context_parallel_size
    below, above = size // at_once * at_once, (size // at_once + 1) * at_once
    choices = [f"global_batch_size: {_either([below, above] if below else [above])}"]
    if size % groups == 0:
        largest = max(n for n in range(1, batch) if size // groups % n == 0)
        choices.append(f"train_batch_size: {largest}")
    fits = [n for n in range(1, _MOST * groups + 1) if size % (n * batch) == 0]
    near = [*[n for n in fits if n < groups][-1:], *[n for n in fits if n > groups][:1]]
    if near:
        choices.append(f"{_either([n * split for n in near])} ranks")
    return ", or ".join(choices)


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


STEP_RULES: Final = (_global_batch,)
