"""Values of a job as texts that people type, and back; what stands beside them."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec, field_choices, key_facts, takes_many
from tui.form.fields.pages import BLOCKS, PATHS

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def model_hint(family: object, flavour: object) -> str:
    """Return the placeholder of the model's input: the id under which this one is published."""
    flavours = FAMILIES[str(family)].flavours if family in FAMILIES else {}
    shown = flavours.get(str(flavour)) or next(iter(flavours.values()), None)
    return f"folder, or {shown.hub_id}" if shown is not None else "folder, or hub id"


def choices(name: str) -> tuple[str, ...]:
    """Return the words a field allows; families and flavours included."""
    if name == "model_family":
        return tuple(FAMILIES)
    return field_choices(name)


def as_text(name: str, value: Any) -> str:
    """Return a value as it stands in an input; `from_text` and the job's reader bring it back."""
    if value is None or value == "" == JobSpec.model_fields[name].default:
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
    """Format a list of words as people write it."""
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
    return text if text.isprintable() else json.dumps(value)  # an input would drop what is not


def _dataset(dataset: Any) -> str:
    """One of several datasets, as far as a path and repeats say it."""
    if not isinstance(dataset, dict):
        return str(dataset)
    repeats = dataset.get("repeats") or 1
    return f"{dataset.get('path')} x{repeats}" if repeats != 1 else str(dataset.get("path"))


def _prompt(entry: str | Mapping[str, Any]) -> str:
    """Format a prompt as one line, without the separator.

    With its settings, or if plain text would not be read back the same, it is a mapping.
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
    if name == "validation_prompts":  # a prompt may hold commas
        return [part.strip() for part in text.split("|") if part.strip()]
    if name in PATHS:
        return os.path.expandvars(text)
    if text[0] == text[-1] == '"' and len(text) > 1 and not takes_many(name):
        try:
            return json.loads(text)  # an empty text, or one with spaces around it
        except ValueError:
            return text
    return text


def leaving(queueing: bool) -> str:
    """Describe what happens to unsaved input if the form is left."""
    if queueing:
        return "The job is being queued; leaving does not stop that."
    return "Your changes will be lost. ^s saves a job file, ^t a template."
