"""Jobs that belong together: what the jobs of a sweep differ in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.run.judging import LOSS, winner
from jobs.spec.families import compares_losses
from jobs.spec.file.diff import differences
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import field_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs.queue.job import Job
    from jobs.run.judging import Measurements
    from jobs.spec.job_spec import JobSpec

    Values = dict[str, Any]

NOT_SWEPT: Final = ("name", "sweep", "both_experts", "other_expert")
"""Keys that say nothing of what a job of a sweep does."""

_LEAST_PLAIN: Final = 1e-2  # numbers below are written as 1e-3
_MOST_PLAIN: Final = 1e6
_SHORT: Final = {
    "learning_rate": "lr",
    "text_encoder_learning_rate": "te-lr",
    "lora_rank": "r",
    "lora_alpha": "a",
    "max_train_steps": "steps",
    "num_train_epochs": "epochs",
    "train_batch_size": "b",
    "global_batch_size": "gb",
    "resolution": "res",
    "weight_decay": "wd",
    "lr_warmup_steps": "warmup",
    "lr_scheduler": "sched",
    "caption_dropout": "drop",
    "model_flavour": "",
    "optimizer": "",
    "loss_type": "",
    "lora_variant": "",
}
"""What names of jobs call keys; "" where the value says it. Others keep their own name."""


# -- names ----------------------------------------------------------------------------------


def short_text(key: str, value: Any, *, between: str = " ") -> str:
    """Write a key and its value in a few characters: `lr 3e-5`."""
    short = _SHORT.get(key, key.replace("_", "-") if not between else key.replace("_", " "))
    text = short_value(value)
    if not short:
        return text
    numeric = text[:1].isdigit()
    return f"{short}{between or ('' if numeric else '-')}{text}"


def short_value(value: Any) -> str:
    """Write a value in a few characters: 3e-5, yes, 512+768, the last part of a path."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            if value and not _LEAST_PLAIN <= abs(value) < _MOST_PLAIN:
                mantissa, _, exponent = f"{value:.4e}".partition("e")
                return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
            return f"{value:g}"
        case None:
            return "none"
        case list():
            return "+".join(map(short_value, value))
        case str():
            return value.rstrip("/").rpartition("/")[2] or value
    return str(value)


# -- groups ---------------------------------------------------------------------------------


@dataclass
class Groups:
    """What the jobs of each sweep differ in, read from their job files again only when they change.

    Use it from one thread at a time.
    """

    _specs: dict[int, tuple[int, JobSpec]] = field(default_factory=dict)
    _differing: dict[str, tuple[tuple[tuple[int, int], ...], dict[int, Values]]] = field(
        default_factory=dict
    )

    def differing(self, jobs: Iterable[Job], sweeps: Mapping[int, str]) -> dict[int, Values]:
        """Return the values of the keys in which a job differs from others of its sweep, by job.

        Args:
            jobs: All jobs.
            sweeps: Job → its sweep.
        """
        groups: dict[str, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: job.id) if sweeps else ():
            if job.id in sweeps:
                groups.setdefault(sweeps[job.id], []).append(job)
        values: dict[int, Values] = {}
        for name, group in groups.items():
            state = tuple((job.id, _changed(job)) for job in group)
            kept = self._differing.get(name)
            if kept is None or kept[0] != state:
                kept = self._differing[name] = state, _differing(self._read(group, dict(state)))
            values |= kept[1]
        return values

    def _read(self, jobs: Iterable[Job], changed: Mapping[int, int]) -> dict[int, JobSpec]:
        for job in jobs:
            kept = self._specs.get(job.id)
            if kept is None or kept[0] != changed[job.id]:
                try:
                    self._specs[job.id] = changed[job.id], load_spec(job.run_dir.job_file)
                except UserError:  # gone, or of another version: it differs in nothing known
                    self._specs.pop(job.id, None)
        return {job.id: self._specs[job.id][1] for job in jobs if job.id in self._specs}


def _changed(job: Job) -> int:
    try:
        return job.run_dir.job_file.stat().st_mtime_ns
    except OSError:
        return 0


def _differing(specs: Mapping[int, JobSpec]) -> dict[int, Values]:
    """Return the values of all keys in which any two jobs differ, in the order of a job file."""
    first = next(iter(specs.values()), None)
    if first is None:
        return {}
    differ = {each.key for spec in specs.values() for each in differences(first, spec)}
    keys = [key for key in field_names() if key in differ and key not in NOT_SWEPT]
    by_job = {}
    for job, spec in specs.items():
        values = spec.to_dict()
        by_job[job] = {key: values[key] for key in keys}
    return by_job


def best_job(
    measured: Mapping[int, Measurements], differ: Mapping[int, Mapping[str, Any]]
) -> int | None:
    """Return the best job by what its checkpoints are judged by; None if nothing was measured.

    Of losses of jobs for different noise levels, none is the best: the levels decide the loss.

    Args:
        measured: Job → its measurements.
        differ: Job → its values of the keys in which the jobs differ.
    """
    by_loss = any(values.by == LOSS for values in measured.values() if values)
    flavours = (values.get("model_flavour") for values in differ.values())
    if by_loss and not compares_losses(flavours):
        return None
    return winner(measured)
