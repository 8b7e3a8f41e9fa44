"""The form's contents without widgets: field texts ↔ job values, and errors."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import ValidationError

from jobs.errors import SpecError, UserError
from jobs.hub.wanted import find_missing
from jobs.preflight import check_job
from jobs.preflight.data import check_dataset, find_unusable
from jobs.queue.sweeps import short_value
from jobs.run.rundir import write_atomic
from jobs.spec.families import FAMILIES, get_family
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.file.value_errors import key_of
from jobs.spec.job_spec import FOLLOWS, JobSpec, field_choices, field_names, key_facts, takes_many
from jobs.spec.rules import no_effect
from jobs.spec.rules.cascade import FOLLOWING
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.no_effect import find_inapplicable
from jobs.spec.rules.strategy import SHARDING, chosen_strategy, depends_on_memory, world_size
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.datasets import with_folder_repeats
from jobs.spec.values.hub_names import HubName, is_offline, is_url
from tui.form.pages import BLOCKS, PATHS, SHOWN, label

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from jobs.errors import Problem


# -- field texts ----------------------------------------------------------------------------
# Job values as editable text, and back; the hints beside them.


_SEPARATOR: Final = " | "  # between prompts


def help_text(name: str) -> str:
    """Return the field's own help, with its key as job files spell it."""
    text = JobSpec.model_fields[name].description or ""
    if name == "validation_prompts":
        text += " Separate prompts with |; settings like {prompt: a cat, seed: 3}."
    if name == BLOCKS:
        text += " F2 lists them."
    return f"{name}: {text}"


def placeholder(name: str) -> str:
    """Return the placeholder of an input: the default, or a format to type."""
    return key_facts(name).blank or as_text(name, JobSpec.model_fields[name].default)


def choices(name: str) -> tuple[str, ...]:
    """Return a field's allowed words, including families and flavors."""
    if name == "model_family":
        return tuple(FAMILIES)
    return field_choices(name)


def as_text(name: str, value: Any) -> str:
    """Format a value for an input; `from_text` and the job's reader restore it."""
    if value is None or (value in ("", []) and value == JobSpec.model_fields[name].default):
        return ""
    if name == "validation_prompts" and isinstance(value, list):
        return _SEPARATOR.join(map(_prompt, value))
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, list | dict):
        nice = _nice(name, value)
        return nice if _reads_back(name, nice, value) else _json(value)
    text = str(value)
    plain = text.isprintable() and from_text(name, text) == value
    return _json(value) if isinstance(value, str) and not plain else text


def _nice(name: str, value: Any) -> str:
    """Format a list of words."""
    if name == "datasets":
        return ", ".join(map(_dataset, value))
    if name == "accelerate_extra_args":
        return shlex.join(value)
    return ", ".join(map(str, value))


def _reads_back(name: str, text: str, value: Any) -> bool:
    if not text.isprintable() or not text:
        return False
    try:
        return bool(JobSpec.model_validate({name: text}).to_dict()[name] == value)
    except ValidationError:
        return False


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # An input would drop nonprintable characters.
    return text if text.isprintable() else json.dumps(value)


def _dataset(dataset: Any) -> str:
    """Format one of several datasets by its path and repeats."""
    if not isinstance(dataset, dict):
        return str(dataset)
    repeats = dataset.get("repeats") or 1
    return f"{dataset.get('path')} x{repeats}" if repeats != 1 else str(dataset.get("path"))


def _prompt(entry: str | Mapping[str, Any]) -> str:
    """Format a prompt as one line, without the separator.

    With settings, or if plain text would be parsed differently, it is a mapping.
    """
    if isinstance(entry, str):
        if entry.isprintable() and entry == entry.strip() != "" and "|" not in entry:
            return entry
        entry = {"prompt": entry}
    return _json(entry).replace("|", "\\u007c")


def from_text(name: str, text: str) -> Any:
    """Parse the text of an input; None if it is blank, which means the default."""
    text = text.strip()
    if not text:
        return None
    if name == "validation_prompts":  # a prompt may contain commas
        return [part.strip() for part in text.split("|") if part.strip()]
    if name in PATHS:
        return os.path.expandvars(text)
    if text[0] == text[-1] == '"' and len(text) > 1 and not takes_many(name):
        try:
            return json.loads(text)  # an empty text, or one with surrounding spaces
        except ValueError:
            return text
    return text


def pasted(name: str, before: str, lines: Sequence[str], after: str) -> str:
    """Return an input's text after several lines were pasted at its cursor.

    In a list field each line becomes a value, quoted if it contains the separator; in other
    fields the lines are joined.

    Args:
        name: The key.
        before: The text before the cursor.
        lines: The pasted lines, without blank ones.
        after: The text after the cursor.
    """
    if not takes_many(name):
        return f"{before}{' '.join(lines)}{after}"
    values = [*_values(name, before), *lines, *_values(name, after)]
    with suppress(ValidationError):  # keep numbers as numbers
        values = JobSpec.model_validate({name: values}).to_dict()[name]
    return as_text(name, values)


def _values(name: str, text: str) -> list[Any]:
    """Parse the values in a part of a list's text."""
    value = from_text(name, text.strip().strip(",|"))
    with suppress(ValidationError):
        value = value and JobSpec.model_validate({name: value}).to_dict()[name]
    return value if isinstance(value, list) else [value] if value else []


def leaving(queueing: bool) -> str:
    """Describe what happens to unsaved input when the form is left."""
    if queueing:
        return "The job is being queued; leaving does not stop that."
    return "Your changes are kept as a draft: F6 restores it when the form is opened again."


# -- lists of values ------------------------------------------------------------------------
# A field as a list; each of its values becomes a job.


UNLISTED: Final = ("name", "sweep", "gpus", "datasets", "validation_prompts", "model_flavour")
"""Fields that cannot be lists of values: others say what differs, or their values have commas."""
_AROUND: Final = (0.1, 0.33, 1.0, 3.3, 10.0)
_SEEDS: Final = 5


def proposal(name: str, text: str) -> str:
    """Return a list to start from: valid values around a number."""
    value = JobSpec.model_fields[name].default if not text.strip() else text.strip()
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"{text}; " if takes_many(name) and "," in text else text
    if isinstance(value, bool) or not 0 < number < _MOST_AROUND or takes_many(name):
        return str(value)
    if name.endswith("seed"):
        near = [str(round(number) + step) for step in range(_SEEDS)]
    elif "int" in str(JobSpec.model_fields[name].annotation):
        parts = (number / 4, number / 2, number, 2 * number, 4 * number)
        near = [str(round(part)) for part in parts if part == round(part)]
    else:
        near = [short_value(float(f"{number * factor:.1g}")) for factor in _AROUND]
        near[_AROUND.index(1.0)] = short_value(number)
    return ", ".join(part for part in near if _is_valid(name, part))


_MOST_AROUND: Final = 1e9


def _is_valid(name: str, text: str) -> bool:
    try:
        JobSpec.model_validate({name: text})
    except ValidationError:
        return False
    return True


# -- draft ----------------------------------------------------------------------------------


_NOT_OF_TEMPLATES: Final = (
    "name",
    "pretrained_model_name_or_path",
    "dataset",
    "datasets",
    "device",
    "gpus",
    "num_processes",
    *FOLLOWING,
)
OF_IMAGES: Final = (
    "missing_captions",
    "resolution",
    "max_upscale",
    "max_aspect_ratio",
    "masked_loss",
)
"""Keys that decide which images are skipped."""

_MOST_DIGITS: Final = 10  # of a number of ranks; Python refuses to parse thousands of digits


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of the family and flavor.

    Invalid values are kept, so that the form shows them with their errors.
    """
    try:
        usual = defaults_of(values.get("model_family", "flux"), values.get("model_flavour"))
    except ValidationError:  # not a text
        usual = JobSpec().to_dict()
    try:
        return usual | {
            key: value
            for key, value in JobSpec.model_validate(dict(values)).to_dict().items()
            if key in values
        }
    except ValidationError:
        return usual | {k: v for k, v in values.items() if k in usual and v is not None}


def begin_with(template: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a template with those of the form's values that templates do not set."""
    kept = {key: values[key] for key in _NOT_OF_TEMPLATES if values.get(key) not in (None, "")}
    if template.get("datasets"):
        kept.pop("dataset", None)
    elif "dataset" in template:
        kept.pop("datasets", None)
    if "gpus" in template or "num_processes" in template:
        ranks = ("gpus", "num_processes", *FOLLOWING)
        kept = {key: value for key, value in kept.items() if key not in ranks}
    return complete(kept | dict(template))


def merge(base: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the shown values over the form's other values; blank fields use their default."""
    values = {key: value for key, value in base.items() if key not in shown} | dict(shown)
    if base.get("fsdp_enable") is not None and shown.get("strategy") != base.get("strategy"):
        values.pop("fsdp_enable", None)  # the user just chose the strategy by name
    if values.get("gpus"):
        values.pop("num_processes", None)  # as many as there are GPUs
    return {key: value for key, value in values.items() if value is not None}


def in_force(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that apply to the job, and why the others do not.

    A value that does not apply stays in the job while it is harmless, so that a job file is
    preserved; it is dropped if it would be rejected.

    Returns:
        The values, and the reason for each key that does not apply.
    """
    spec, unreadable = _readable(values)
    reasons = find_inapplicable(spec)
    refused = reasons.keys() & {
        *unreadable,
        *(conflict.key for conflict in find_conflicts(spec)),
        *FOLLOWS,  # defaults that the form filled in must not be fixed for another number of ranks
    }
    return {key: value for key, value in values.items() if key not in refused}, reasons


def find_unsuited(values: Mapping[str, Any]) -> set[str]:
    """Return the fields that its model or launcher leaves without effect and that are not set."""
    spec, _ = _readable(values)
    return no_effect.find_unsuited(spec, find_inapplicable(spec)) - non_default(values).keys()


def _readable(values: Mapping[str, Any]) -> tuple[JobSpec, set[str]]:
    """Read the job from the valid values; return it and the keys of the invalid ones."""
    try:
        return JobSpec.model_validate(dict(values)), set()
    except ValidationError as error:
        wrong = {key_of(problem) for problem in error.errors()}
        kept = {key: value for key, value in values.items() if key not in wrong}
        try:
            return JobSpec.model_validate(kept), wrong
        except ValidationError:
            return JobSpec(), wrong


def followed(ranks: int, changes: Mapping[str, Any], *, restored: bool) -> str:
    """Describe what a new number of ranks changed, unless the user has changed it since."""
    words = {True: "on", False: "off", None: "auto"}
    listed = ", ".join(f"{label(key)} {words.get(value, value)}" for key, value in changes.items())
    if not listed:
        return ""
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if restored:
        return f"{many}, restored: {listed}"
    shards = changes.get("strategy") in SHARDING
    return f"{many} turn FSDP on: {listed}" if shards else f"{many}: {listed}"


def defaults_of(family: object, flavour: object) -> dict[str, Any]:
    """Return the default values for a family and flavor."""
    return JobSpec(model_family=family, model_flavour=flavour).to_dict()


def flavours_of(family: object) -> tuple[str, ...]:
    """Return a family's published flavors; empty if it is unknown."""
    return tuple(FAMILIES[str(family)].flavours) if family in FAMILIES else ()


def adopt(
    values: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that change with another model.

    Values that were the old model's defaults become the new one's.

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


def carried(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that differ from the defaults and are on pages after the first."""
    return {key: value for key, value in non_default(values).items() if key not in SHOWN}


def carried_line(values: Mapping[str, Any]) -> str:
    """Summarize these values in a line; "" if there are none."""
    texts = {key: as_text(key, value) for key, value in carried(values).items()}
    words = {"True": "true", "False": "false"}
    listed = ", ".join(f"{key}={words.get(text, text)}" for key, text in texts.items())
    return f"also set: {listed}" if listed else ""


def problems_beside(problems: Mapping[str, Problem], shown: Collection[str]) -> list[str]:
    """Return the errors of fields that are not displayed, with their keys."""
    return [
        str(problem) if problem.named or key in problem.text else f"{key}: {problem.text}"
        for key, problem in problems.items()
        if key not in shown
    ]


def non_default(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that differ from the defaults of their family and flavor, valid or not."""
    usual = complete({key: values.get(key) for key in ("model_family", "model_flavour")})
    usual |= {"model_family": JobSpec.model_fields["model_family"].default, "model_flavour": None}
    return {
        key: value
        for key, value in values.items()
        if as_text(key, value) != as_text(key, usual.get(key))
    }


def give_back(
    values: Mapping[str, Any], taken: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Restore the values from before `taken`; keep what was typed since."""
    back = {key for key in taken if as_text(key, values.get(key)) == as_text(key, taken[key])}
    kept = {key: value for key, value in values.items() if key not in back}
    return kept | {key: before[key] for key in back if key in before}


def same(values: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sets of values have the same texts in the form."""
    return all(
        as_text(key, values.get(key)) == as_text(key, other.get(key)) for key in {*values, *other}
    )


def find_problems(values: Mapping[str, Any]) -> dict[str, Problem]:
    """Return the errors by field; those of no field have an empty key."""
    try:
        load_spec(None, values)
    except SpecError as error:
        return {
            problem.key if problem.key in field_names() else "": problem
            for problem in error.problems
        }
    return {}


def warnings(values: Mapping[str, Any]) -> list[str]:
    """Return warnings about the values; none while the values are wrong."""
    try:
        return find_warnings(JobSpec.model_validate(dict(values)))
    except ValidationError:
        return []


def strategy_note(values: Mapping[str, Any], predicted: str = "") -> tuple[str, str]:
    """Describe the strategy as far as it is known before the job starts.

    Args:
        values: By key.
        predicted: What `auto` resolves to by predicted memory, if known.

    Returns:
        A short form and a sentence; both empty if there is nothing to say.
    """
    try:
        spec = JobSpec.model_validate(dict(values))
    except ValidationError:
        return "", ""
    ranks = world_size(spec)
    if spec.strategy != "auto":
        # The field itself shows whether several ranks may run it.
        return {
            "ddp": ("a full copy per rank", f"Each of {ranks} ranks holds the full model."),
            "fsdp2": (f"1/{ranks} of the model", f"Each rank holds 1/{ranks} of the model."),
            "hsdp": ("shards, replicated", "Groups of ranks share a copy of the model."),
        }.get(spec.strategy if ranks > 1 else "", ("", ""))
    if depends_on_memory(spec):
        if predicted:
            return f"→ {predicted}", f"Now {predicted}, by the predicted memory."
        return "→ what fits", "On GPUs: ddp if the full model fits on each, else fsdp2."
    strategy, reason = chosen_strategy(spec)
    return f"→ {strategy}", f"Now {strategy}: {reason}."


def check_path(name: str, values: Mapping[str, Any]) -> tuple[bool, str]:
    """Check whether the model or the dataset exists; reads the disk.

    Of `datasets`, whether something must be fetched; the rest is checked when the job is queued.

    Returns:
        Whether it can be used, and a description or error.
    """
    if name == "datasets":
        absent = next(iter(_absent_datasets(values)), None)
        return absent is None, "" if absent is None else _offer("dataset", str(absent))
    text = str(values.get(name) or "")
    if not text:
        return True, ""
    try:
        spec = _of_path(text, values)
        if name == "dataset":
            count = check_dataset(with_folder_repeats(spec)[0])
            what = "sample" if get_family(spec.model_family).frame_step else "image"
            return True, f"{count} {what}{'s' * (count != 1)}" if count else f"a table of {what}s"
        check_job.check_model(spec)
        return True, f"{get_family(spec.model_family).title} model"
    except UserError as error:
        offers = names_hub(name, values) and (is_url(text) or not is_offline())
        return False, _offer(name, text) if offers else str(error)
    except ValidationError:  # reported as the field's error
        return True, ""


def _offer(name: str, text: str) -> str:
    """Return the error of a model or dataset that is not here and may be fetched."""
    if is_url(text):
        return f"{text} is not on this machine; ^r offers to fetch it"
    if name == "dataset":
        return f"no such dataset folder: {text}; if it is on the hub, ^r fetches it"
    return f"{text} is not on this machine; ^r offers to fetch it from the hub"


def _absent_datasets(values: Mapping[str, Any]) -> list[HubName]:
    """Return the entries of `datasets` that must be fetched, and can be."""
    if not values.get("datasets"):
        return []
    try:
        spec = JobSpec.model_validate({"datasets": values["datasets"]})
    except ValidationError:  # reported as the field's error
        return []
    absent = [name for name in find_missing(spec) if name.kind == "dataset"]
    return [name for name in absent if is_url(str(name)) or not is_offline()]


def names_hub(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether the model or a dataset is on the hub and not fully downloaded."""
    if name == "datasets":
        return bool(_absent_datasets(values))
    text = str(values.get(name) or "")
    try:
        hub_name = HubName.read("dataset" if name == "dataset" else "model", text)
        return hub_name is not None and hub_name in find_missing(_of_path(text, values))
    except (UserError, ValidationError):
        return False


def doubt_of(name: str, values: Mapping[str, Any]) -> str:
    """Return a question to ask before queueing a job on this path, or ""; reads the disk."""
    text = str(values.get(name) or "")
    if name != "dataset" or not text:
        return ""
    try:
        return "\n".join(find_unusable(_of_path(text, values)))
    except (OSError, ValidationError):
        return ""


def _of_path(text: str, values: Mapping[str, Any]) -> JobSpec:
    """Return a minimal job on a model or dataset path, for inspecting only that path."""
    return JobSpec.model_validate(
        {
            "pretrained_model_name_or_path": text,
            "dataset": text,
            "model_family": values.get("model_family") or "flux",
            **{key: values[key] for key in OF_IMAGES if values.get(key)},
        }
    )


def ranks_of(values: Mapping[str, Any]) -> int:
    """Return the requested number of ranks; 1 while it is not a number."""
    gpus = values.get("gpus")
    count = len(gpus) if isinstance(gpus, list) else gpus or values.get("num_processes")
    text = str(count).strip()
    return max(1, int(text)) if text.isdecimal() and len(text) < _MOST_DIGITS else 1


def spec_of(values: Mapping[str, Any], *, ignoring: Collection[str] = ()) -> JobSpec:
    """Return the job that the values describe.

    Args:
        values: By key.
        ignoring: Keys whose conflicts are ignored.

    Raises:
        SpecError: The values are invalid.
    """
    return load_spec(None, values, ignoring=ignoring)


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return the values as a job file, without defaults."""
    try:
        return dump_spec(load_spec(None, values), only_set=True)
    except SpecError:
        kept = non_default(values)
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True) if kept else ""


def save_yaml(values: Mapping[str, Any], path: Path) -> Path:
    """Write the values as a job file, even if incomplete.

    Raises:
        UserError: It cannot be written.
    """
    path = path.expanduser()
    try:
        # Keep the old file if the disk is full; write through links.
        write_atomic(path.resolve(), as_yaml(values))
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path} ({reason})") from error
    return path
