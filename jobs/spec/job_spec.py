"""Define a job. YAML, flags, the form and the documentation are all derived from this.

Each field is defined once, in `jobs.spec.keys`, with all facts about it: see
`jobs.spec.values.field.KeyFacts`. `jobs.spec.file.load` reads jobs from YAML and flags;
`jobs.spec.rules.conflicts` finds combinations that cannot run.
"""

from __future__ import annotations

import hashlib
import json
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, model_validator

from jobs.spec.families import FAMILIES, default_values, flavour_of
from jobs.spec.keys.data import DataKeys
from jobs.spec.keys.devices import DeviceKeys, FsdpKeys
from jobs.spec.keys.job import JobKeys
from jobs.spec.keys.lora import LoraKeys
from jobs.spec.keys.noise import NoiseKeys
from jobs.spec.keys.output import ExportKeys, HubKeys, OutputKeys
from jobs.spec.keys.running import RunningKeys, SlurmKeys
from jobs.spec.keys.tracking import TrackingKeys
from jobs.spec.keys.training import TrainingKeys
from jobs.spec.keys.validation import ValidationKeys
from jobs.spec.noise_levels import SHIFTED
from jobs.spec.values.field import KeyFacts, facts_of
from jobs.spec.values.spellings import as_bool, as_none, unquoted

_WHOLE: Final = 100  # minimum number of keys in a complete job
_UNSET: Final = "deepspeed_config"  # a key without a value that only complete jobs contain

FOLLOWS: Final = {
    "gradient_accumulation_steps": "global_batch_size",
    "max_train_steps": "num_train_epochs",
}
"""Keys that have no value, instead of their default, where the other one decides."""


class InputKeys(DataKeys, JobKeys):
    """What a job reads: the model and the data."""


class DataPlanKeys(ValidationKeys, InputKeys, TrainingKeys, JobKeys):
    """What determines the samples of a step and of the validation loss."""


# Pydantic orders fields from the last base class to the first.
class RecipeKeys(FsdpKeys, DeviceKeys, LoraKeys, NoiseKeys, TrainingKeys, JobKeys):
    """How the model is trained and split over ranks; not data, files, or where it runs."""


class JobSpec(
    SlurmKeys,
    RunningKeys,
    TrackingKeys,
    HubKeys,
    ExportKeys,
    DataPlanKeys,
    OutputKeys,
    InputKeys,
    RecipeKeys,
):
    """A valid job.

    Raises `pydantic.ValidationError`, which `jobs.spec.file.load` puts into words.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_unset(cls, data: Any) -> Any:
        """Give keys without a value (`lora_alpha:`) their default, which may depend on the family.

        A missing `model_flavour` may be derived from the model's name. An empty one stays empty, so
        that every job can be written and read back. The words for no are the number 0, in YAML
        as in flags; those for yes are no number.
        """
        if not isinstance(data, dict):
            return data
        data = upgraded(data)
        given = {
            key: _unworded(value) if _is_number(key) else value
            for key, value in data.items()
            if value is not None
        }
        family = given.get("model_family", cls.model_fields["model_family"].default)
        for key, other in FOLLOWS.items():
            if as_none(given.get(key)) is None:
                given.pop(key, None)
                given |= {key: None} if as_none(given.get(other)) is not None else {}
        if "model_flavour" not in data:
            named = flavour_of(family, given.get("pretrained_model_name_or_path", ""))
            given |= {"model_flavour": named} if named else {}
        return default_values(family, given.get("model_flavour")) | given

    def to_dict(self, *, only_set: bool = False) -> dict[str, Any]:
        """Return plain values in field order; with `only_set`, those that differ from defaults."""
        values = self.model_dump(mode="json")
        if not only_set:
            return values
        fields = {"model_family", "model_flavour", *FOLLOWS.values()}
        usual = type(self)(**self.model_dump(include=fields)).model_dump(mode="json")
        usual |= {name: type(self).model_fields[name].default for name in fields}
        # a flavour that follows from the model's name need not be written
        if self.model_flavour is None:
            usual["model_flavour"] = flavour_of(
                self.model_family, self.pretrained_model_name_or_path
            )
        return {key: value for key, value in values.items() if value != usual[key]}

    def public_values(self) -> dict[str, Any]:
        """Return the public values that differ from their defaults."""
        return {key: value for key, value in self.to_dict(only_set=True).items() if is_public(key)}

    def digest(self) -> str:
        """Return a hash of the values that determine the result.

        A resume uses it to detect changes.
        """
        # -0.0 equals the default 0.0, so files without defaults cannot preserve its sign.
        values = {
            key: value + 0.0 if isinstance(value, float) else value
            for key, value in self.to_dict().items()
        }
        payload = json.dumps(values, sort_keys=True).encode()
        return hashlib.sha256(payload).hexdigest()[:16]


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Return a complete job of an earlier version such that it trains the same today.

    Apply this once, before overrides; it returns a current job unchanged.
    """
    if _is_earlier(data, "lora_experts"):
        data = data | {"lora_experts": True, "size_conditioning": "target"}
    if _is_earlier(data, "max_aspect_ratio"):
        data = data | {"max_aspect_ratio": 0}
    if _is_earlier(data, "bucket_step"):
        data = data | {"bucket_step": 0}
    if _is_earlier(data, "modulation_precision"):
        data = data | {"modulation_precision": "none"}
    if _is_earlier(data, "huber_schedule"):
        constant = data.get("loss_type") in ("huber", "smooth_l1")
        data = data | {"huber_schedule": "constant" if constant else None} | _shift_before(data)
    return data


def _is_earlier(data: dict[str, Any], key: str) -> bool:
    """Return whether a complete job was written before a key existed.

    Users' files lack most keys, and all without a value; jobs in run directories and checkpoints
    are complete.
    """
    whole = _UNSET in data and len(data.keys() & set(field_names())) >= _WHOLE
    return whole and key not in data


def _shift_before(data: dict[str, Any]) -> dict[str, Any]:
    """Return the shift of an old job that drew with its sampler's shift, the only one at that time.

    This applies to every family, since only the model's scheduler knows whether the two differ.
    """
    family = FAMILIES.get(str(data.get("model_family")))
    drew = data.get("timestep_sampling") in SHIFTED and as_none(data.get("flow_shift")) is None
    shifts = drew and family is not None and family.objective == "flow"
    return {"flow_shift": "sampler"} if shifts else {}


def field_names() -> list[str]:
    """Return every key that a job file may have."""
    return list(JobSpec.model_fields)


def key_facts(name: str) -> KeyFacts:
    """Return the facts from a key's definition."""
    return facts_of(JobSpec)[name]


def is_public(name: str) -> bool:
    """Return whether a field's value may be published; see `KeyFacts`."""
    answer = key_facts(name).public
    return _is_plain(JobSpec.model_fields[name].annotation) if answer is None else answer


def _is_plain(kind: Any) -> bool:
    """Return whether a type allows only numbers, switches and fixed words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _is_plain(get_args(kind)[0])
    if origin is Literal or kind in (bool, int, float, type(None)):
        return True
    return origin in (Union, UnionType, list) and all(map(_is_plain, get_args(kind)))


def field_group(name: str) -> str:
    """Return the heading under which a field is documented and shown in the form."""
    return key_facts(name).group.name


def field_choices(name: str) -> tuple[str, ...]:
    """Return the words a field allows, or an empty tuple when it is not a choice."""
    annotation = JobSpec.model_fields[name].annotation
    choices = get_args(annotation)
    return choices if choices and all(isinstance(c, str) for c in choices) else ()


def field_words(name: str) -> tuple[str, ...]:
    """Return the words to suggest for a field.

    These are the allowed words, or the usual ones if others are allowed, too.
    """
    if name == "model_family":
        return tuple(FAMILIES)
    usual = key_facts(name).words
    return field_choices(name) or usual or (("true", "false") if is_switch(name) else ())


def takes_none(name: str) -> bool:
    """Return whether a field may have no value."""
    field = JobSpec.model_fields.get(name)
    return field is not None and type(None) in get_args(field.annotation)


def is_switch(name: str) -> bool:
    """Return whether a field is a switch, so that a bare flag turns it on."""
    field = JobSpec.model_fields.get(name)
    return field is not None and field.annotation in (bool, bool | None, bool | int)


def takes_number(name: str) -> bool:
    """Return whether a switch may also be a number."""
    field = JobSpec.model_fields.get(name)
    return field is not None and field.annotation == bool | int


def _is_number(name: str) -> bool:
    """Return whether a field holds a number and nothing else, except perhaps no value."""
    field = JobSpec.model_fields.get(name)
    return field is not None and field.annotation in (int, float, int | None, float | None)


def _unworded(value: Any) -> Any:
    """Return False, which pydantic reads as 0, for the words for no; what it refuses for True."""
    if isinstance(value, str) and as_bool(value) is False and not unquoted(value).isdecimal():
        return False
    return "true" if value is True else value


def takes_many(name: str) -> bool:
    """Return whether a field holds a list."""
    field = JobSpec.model_fields.get(name)
    return field is not None and "list[" in str(field.annotation)
