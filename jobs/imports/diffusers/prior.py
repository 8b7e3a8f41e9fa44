"""Prior preservation of diffusers' DreamBooth scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common.draft import is_off, plain, read
from jobs.imports.common.places import find_beside
from jobs.spec.values.dataset_files import list_files

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_COUNT: Final = 100  # class images, where the command does not say
_OFF: Final = "with_prior_preservation is off"


def _is_on(draft: Draft) -> bool:
    switched = not is_off(draft.theirs.get("with_prior_preservation"))
    return switched and bool(draft.theirs.get("class_prompt"))


def switch(draft: Draft, key: str, value: Any) -> None:
    """Class images: those of the folder that is named, or as many as are to be made."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
        return
    if not draft.theirs.get("class_prompt"):
        draft.unsupported(key, "it needs class_prompt")
        return
    draft.values["class_prompt"] = draft.theirs["class_prompt"]
    named = draft.theirs.get("class_data_dir")
    folder = find_beside(draft.folder, str(named)) if named else None
    if folder is not None and folder.is_dir() and list_files(folder).pictures:
        entries = [plain(entry) for entry in draft.values.pop("datasets", [])]
        entries = entries or [{"path": draft.values.pop("dataset", "")}]
        entries.append({"path": str(folder), "regularization": True})
        if draft.take(key, "datasets", [entry for entry in entries if entry["path"]]):
            draft.values["datasets"] = read("datasets", draft.values["datasets"])
        return
    draft.take(
        key,
        "num_class_images",
        draft.theirs.get("num_class_images") or _COUNT,
        "class images are half of each train_batch_size here, and come on top of it there",
    )


def part(draft: Draft, key: str, value: Any) -> None:
    """Record a flag that `switch` has already read."""
    draft.unneeded(key, "set by with_prior_preservation" if _is_on(draft) else _OFF)


def weight(draft: Draft, key: str, value: Any) -> None:
    if _is_on(draft):
        draft.take(key, "prior_loss_weight", value)
    else:
        draft.unneeded(key, _OFF)


def prompt(draft: Draft, key: str, value: Any) -> None:
    if _is_on(draft):
        draft.take(key, "class_prompt", value)
    else:
        draft.unneeded(key, _OFF)
