"""What the form holds, without widgets: texts of fields ↔ values of a job, and what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import ValidationError

from jobs import preflight
from jobs.conflicts import find_conflicts, find_warnings
from jobs.errors import SpecError, UserError
from jobs.families import FAMILIES
from jobs.spec import JobSpec, field_choices, field_names
from jobs.specfile import dump_spec, load_spec
from jobs.strategy import chosen_strategy, depends_on_memory
from tui.detect.words import Model

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

BLOCKS: Final = "fsdp_transformer_layer_cls_to_wrap"

# The fields that the form always shows, by heading. All others are carried along unchanged.
ESSENTIAL: Final[dict[str, tuple[str, ...]]] = {
    "job": ("name", "model_type", "model_family", "model_flavour"),
    "model and data": ("pretrained_model_name_or_path", "dataset"),
    "training": (
        "max_train_steps", "learning_rate", "resolution", "train_batch_size",
        "gradient_accumulation_steps", "lora_rank", "mixed_precision",
    ),
    "devices": ("gpus", "num_processes", "strategy", "fsdp_reshard_after_forward", BLOCKS),
    "output": ("checkpointing_steps", "validation_prompts"),
}  # fmt: skip
SHOWN: Final = tuple(name for names in ESSENTIAL.values() for name in names)
PATHS: Final = ("pretrained_model_name_or_path", "dataset")
_LABELS: Final = {
    "pretrained_model_name_or_path": "model",
    "train_batch_size": "batch per rank",
    "gradient_accumulation_steps": "accumulation",
    "max_train_steps": "steps",
    "model_type": "type",
    "model_family": "family",
    "model_flavour": "flavour",
    "mixed_precision": "precision",
    "num_processes": "ranks",
    "fsdp_reshard_after_forward": "reshard",
    BLOCKS: "blocks",
    "checkpointing_steps": "save every",
    "validation_prompts": "prompts",
}
_SEPARATOR: Final = " | "


def label(name: str) -> str:
    """The field's short label in the form."""
    return _LABELS.get(name, name.replace("_", " "))


def help_text(name: str) -> str:
    """The field's own help, with its key as job files spell it."""
    text = JobSpec.model_fields[name].description or ""
    if name == "validation_prompts":
        text += " Separate several with |, settings as in {prompt: a cat, seed: 3}."
    if name == BLOCKS:
        text += " ^b or F2 lists them."
    return f"{name}: {text}"


def placeholder(name: str) -> str:
    """What stands in an input while it is blank: the default."""
    if name == BLOCKS:
        return "the family's own; ^b chooses"
    return as_text(name, JobSpec.model_fields[name].default)


def choices(name: str) -> tuple[str, ...]:
    """The words a field allows; families and flavours included."""
    if name == "model_family":
        return tuple(FAMILIES)
    return field_choices(name)


def as_text(name: str, value: Any) -> str:
    """A value as it stands in an input."""
    if value is None:
        return ""
    if name == "datasets":
        return ", ".join(map(_dataset, value))
    if name == "validation_prompts" and isinstance(value, list):
        return _SEPARATOR.join(map(_prompt, value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _dataset(dataset: Mapping[str, Any]) -> str:
    repeats = dataset.get("repeats") or 1
    return f"{dataset['path']} x{repeats}" if repeats > 1 else str(dataset["path"])


def _prompt(entry: str | Mapping[str, Any]) -> str:
    """A prompt as one line, without the separator; with its settings, or where a text would not
    come back as it is, as a mapping.
    """
    if isinstance(entry, str):
        if entry.isprintable() and entry == entry.strip() != "" and "|" not in entry:
            return entry
        entry = {"prompt": entry}
    text = json.dumps(entry, ensure_ascii=False)
    if not text.isprintable():  # an input would drop what is not
        text = json.dumps(entry)
    return text.replace("|", "\\u007c")


def from_text(name: str, text: str) -> Any:
    """What an input says; None when it is blank, which means the default."""
    text = text.strip()
    if not text:
        return None
    if name == "validation_prompts":  # a prompt may hold commas
        return [part.strip() for part in text.split("|") if part.strip()]
    return text


def starting_values(template: Path | None) -> dict[str, Any]:
    """Values of an earlier job's file, or the defaults when there is none that can be read."""
    try:
        return load_spec(template).to_dict() if template else JobSpec().to_dict()
    except UserError:
        return JobSpec().to_dict()


def merge(base: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """What the form says over what it carries along; blank fields fall to their default."""
    values = {key: value for key, value in base.items() if key not in shown} | dict(shown)
    if base.get("fsdp_enable") is not None and shown.get("strategy") != base.get("strategy"):
        values.pop("fsdp_enable", None)  # the person just chose the strategy by its name
    if values.get("gpus"):
        values.pop("num_processes", None)  # as many as there are gpus
    return {key: value for key, value in values.items() if value is not None}


def defaults_of(family: object, flavour: object) -> dict[str, Any]:
    """What a job of this family and flavour has where it says nothing else."""
    return JobSpec(model_family=family, model_flavour=flavour).to_dict()


def flavours_of(family: object) -> tuple[str, ...]:
    """The published flavours of a family, if it is one."""
    return tuple(FAMILIES[str(family)].flavours) if family in FAMILIES else ()


def adopt(
    values: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """What changes with another model: values that were the old one's defaults become its own.

    Args:
        values: By key.
        before: The defaults so far.
        after: The defaults of the new model.
    """
    return {
        key: after[key]
        for key in after
        if key not in ("model_family", "model_flavour")
        and after[key] != before[key]
        and as_text(key, values.get(key)) in ("", as_text(key, before[key]))
    }


def carried(base: Mapping[str, Any]) -> dict[str, Any]:
    """Values that differ from the defaults and have no field in the form."""
    defaults = defaults_of(base.get("model_family", "flux"), base.get("model_flavour"))
    return {
        key: value for key, value in base.items() if key not in SHOWN and value != defaults[key]
    }


def find_problems(values: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with the values, by field; the key is empty for what belongs to none."""
    try:
        load_spec(None, values)
    except SpecError as error:
        return _by_field(values, str(error).removeprefix("flags: "))
    return {}


def _by_field(values: Mapping[str, Any], message: str) -> dict[str, str]:
    try:
        spec = JobSpec.model_validate(dict(values))
    except ValidationError:
        # One sentence per field, each beginning with its key.
        names = "|".join(field_names())
        parts = re.split(rf"; (?=(?:{names}|unknown key)\b)", message)
        return {
            key if key in field_names() else "": text
            for part in parts
            for key, _, text in [part.partition(": ")]
        }
    conflicts = find_conflicts(spec)
    if conflicts:
        return {conflict.key: conflict.message for conflict in conflicts}
    key = next((name for name in ("model_flavour", "model_family") if name in message), "")
    return {key: message}


def warnings(values: Mapping[str, Any]) -> list[str]:
    """What runs, but not as the person may think; nothing while the values are wrong."""
    try:
        return find_warnings(JobSpec.model_validate(dict(values)))
    except ValidationError:
        return []


def strategy_note(values: Mapping[str, Any]) -> tuple[str, str]:
    """What `strategy: auto` will come to, as far as it is known before the job starts.

    Returns:
        In a few characters, and as a sentence; both empty where there is nothing to tell.
    """
    try:
        spec = JobSpec.model_validate(dict(values))
    except ValidationError:
        return "", ""
    if spec.strategy != "auto":
        return "", ""
    if depends_on_memory(spec):
        return "→ what fits", "On GPUs: ddp if a whole copy fits, else fsdp2."
    strategy, reason = chosen_strategy(spec)
    return f"→ {strategy}", f"Now {strategy}: {reason}."


def check_path(name: str, values: Mapping[str, Any]) -> tuple[bool, str]:
    """Look whether the model or the dataset is there; reads the disk.

    Returns:
        Whether it can be used, and what was found or what is wrong.
    """
    text = str(values.get(name) or "")
    if not text:
        return True, ""
    try:
        spec = JobSpec.model_validate({
            "pretrained_model_name_or_path": text, "dataset": str(Path(text).expanduser()),
            "model_family": values.get("model_family") or "flux",
            "missing_captions": values.get("missing_captions") or "skip",
        })  # fmt: skip
        if name == "dataset":
            count = preflight.check_dataset(spec)
            return True, f"{count} pictures" if count else "a table of pictures"
        preflight.check_model(spec)
        return True, f"a {spec.model_family} model"
    except UserError as error:
        return False, str(error)


def model_of(values: Mapping[str, Any]) -> Model:
    """The model that the values name, there or not."""
    family, flavour, path = (
        str(values.get(name) or "").strip() or None
        for name in ("model_family", "model_flavour", "pretrained_model_name_or_path")
    )
    return Model(family, flavour, path)


def ranks_of(values: Mapping[str, Any]) -> int:
    """How many ranks the values ask for; 1 while they do not say it in numbers."""
    gpus = values.get("gpus")
    count = len(gpus) if isinstance(gpus, list) else gpus or values.get("num_processes")
    text = str(count).strip()
    return max(1, int(text)) if text.isdecimal() else 1


def spec_of(values: Mapping[str, Any], *, ignoring: Collection[str] = ()) -> JobSpec:
    """The job that the values describe.

    Args:
        values: By key.
        ignoring: Keys whose conflicts do not matter.

    Raises:
        SpecError: Something is wrong with them.
    """
    return load_spec(None, values, ignoring=ignoring)


def as_yaml(values: Mapping[str, Any]) -> str:
    """The values as a job file, without what is the default anyway."""
    try:
        return dump_spec(load_spec(None, values), only_set=True)
    except SpecError:
        defaults = defaults_of(values.get("model_family", "flux"), values.get("model_flavour"))
        kept = {
            key: value
            for key, value in values.items()
            if as_text(key, value) != as_text(key, defaults.get(key))
        }
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True) if kept else ""


def save_yaml(values: Mapping[str, Any], path: Path) -> Path:
    """Write the values as a job file, complete or not, so that nothing typed is lost.

    Raises:
        UserError: It cannot be written.
    """
    path = path.expanduser()
    try:
        path.write_text(as_yaml(values), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error})") from error
    return path
