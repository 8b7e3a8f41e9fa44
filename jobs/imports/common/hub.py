"""Rules for other tools' Hugging Face hub keys: revisions and uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common.draft import is_off, named, when
from jobs.paths import exists, expand
from jobs.spec.values.hub_names import HubName

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft, Rule

_MODEL: Final = "pretrained_model_name_or_path"


def push(draft: Draft, key: str, value: Any) -> None:
    """Take the switch for uploads; the other upload settings follow it."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
    else:
        draft.take(key, "push_to_hub", True)


def of_push(ours: str) -> Rule:
    """Make a rule for a key that has an effect only if something is pushed."""
    return when(lambda draft: draft.values.get("push_to_hub"), named(ours), "nothing is pushed")


def revision(draft: Draft, key: str, value: Any) -> None:
    """Append the revision to the model's name; runs after the model is set."""
    text = str(draft.values.get(_MODEL) or "")
    name = HubName.read("model", text)
    if is_off(value) or str(value) == "main":
        draft.unneeded(key, "the main revision is the default")
    elif name is None or exists(expand(text)):
        draft.unneeded(key, "the model is a directory")
    else:
        draft.take(key, _MODEL, f"{name.repo}@{value}", "a part of the model's name")
