"""What a job will take on the disk, roughly. Pure, but for the headers of the model's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.memory.host_memory import STATE_BYTES
from jobs.models.adapter_size import count_adapter
from jobs.models.find_model import count_parameters, find_model, read_shapes
from jobs.spec.families import component_of
from jobs.spec.rules.averages import has_average
from jobs.spec.rules.steps import periodic_saves

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec

_WEIGHT: Final = 4  # bytes of a parameter in a checkpoint, fp32


def checkpoint_bytes(spec: JobSpec) -> int | None:
    """About how large a checkpoint is; None when the model cannot be read."""
    try:
        component = find_model(spec.pretrained_model_name_or_path) / component_of(spec)
    except UserError:
        return None
    if spec.model_type == "full":
        parameters = count_parameters(component)
    else:
        parameters = count_adapter(spec, read_shapes(component) or {})
    if not parameters:
        return None
    each = _WEIGHT * (2 if has_average(spec) else 1) + STATE_BYTES[spec.optimizer]
    return parameters * each


def checkpoints_kept(spec: JobSpec) -> int:
    """Count the checkpoints there will be at once: one more than the limit while one is written."""
    limit = spec.checkpoints_total_limit
    count = periodic_saves(spec) or (1 if limit is None else limit + 1)
    return count if limit is None else min(count, limit + 1)
