"""Datasets of other tools, which say for each what a job here says once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.imports.common.draft import Draft, as_number, in_words, is_off, read
from jobs.imports.common.import_report import Kind
from jobs.imports.common.models import family_of, references_of, takes_first_frame
from jobs.imports.common.places import find_beside
from jobs.spec.job_spec import JobSpec
from jobs.spec.keys.prompts import ValidationPrompt, frames_of
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES
from jobs.spec.values.datasets import Dataset
from jobs.spec.values.resolutions import read_resolutions, sides_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jobs.imports.common.table import Table

_LARGEST: Final = ("num_frames", "max_upscale", "caption_dropout_probability")
_ONLY_CAPTION: Final = (
    "with missing_captions: empty it is the full caption of images without one; move any .txt "
    "files away"
)
_HUB: Final = "a dataset of the hub"


class Part(Draft):
    """One dataset. Its values are keys of a `Dataset`, and keys of the job that it asks for."""

    def __init__(self, above: Draft, prefix: str, theirs: Mapping[str, Any]) -> None:
        super().__init__(theirs, above.folder, prefix=prefix, above=above)

    def take(self, key: str, ours: str, value: Any, why: str = "") -> bool:
        """Set a key of the dataset, or one of the job that all datasets share."""
        if ours not in Dataset.model_fields:
            return super().take(key, ours, value, why)
        try:
            whole = Dataset.model_validate({"path": "a", ours: value})
        except ValidationError as error:
            self.unreadable(key, f"{ours}: {in_words(error)}")
            return False
        self.values[ours] = getattr(whole, ours)
        same = key == ours and not why
        kind = Kind.TAKEN if same else Kind.TRANSLATED
        self.record(kind, key, why=why, **{ours: self.values[ours]})
        return True


def read_part(above: Draft, place: str, theirs: Mapping[str, Any], table: Table) -> Part:
    """Read a dataset by the rules of a table."""
    part = Part(above, f"{place}.", theirs)
    part.defaults = table.defaults_of(part)
    table.apply(part)
    return part


def prompts(draft: Draft, given: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """Return the prompts that can be read, as JSON has them.

    Args:
        draft: The job; its report names the others.
        given: Prompts by what they are called there, as settings of a `ValidationPrompt`.
    """
    made = []
    for place, settings in given:
        try:
            made.append(ValidationPrompt.model_validate(settings).model_dump(mode="json"))
        except ValidationError as error:
            draft.unreadable(place, error.errors()[0]["msg"])
    return made


def folder(draft: Draft, key: str, value: Any) -> None:
    """Take a dataset's folder, which may be beside the configuration."""
    place = find_beside(draft.folder, str(value))
    draft.take(key, "path", str(place) if place else str(value))


def hub_id(draft: Draft, key: str, value: Any) -> None:
    """Take a dataset of the hub, or a directory of that name."""
    place = find_beside(draft.folder, str(value))
    draft.take(key, "path", str(place) if place else str(value), "" if place else _HUB)


def caption_suffix(part: Draft, key: str, value: Any) -> None:
    suffix = "." + str(value).strip().lstrip(".")
    if suffix in CAPTION_SUFFIXES:
        part.unneeded(key, f"{suffix} caption files are read by default")
    else:
        part.unsupported(key, "captions must be in .txt or .caption files; rename these")


def conditioning_folder(part: Draft, key: str, value: Any) -> None:
    """Folders with conditioning images, for models that take them."""
    takes = references_of(part)
    before = part.values.get("conditioning_path") or []
    given = value if isinstance(value, list) else [value]
    paths = [*before, *(str(find_beside(part.folder, str(name)) or name) for name in given)]
    if takes is None:
        part.unsupported(key, f"{family_of(part).title} trains without conditioning images here")
    elif len(paths) > takes.most:
        several = f"at most {takes.most} conditioning images"
        most = several if takes.most > 1 else "one conditioning image"
        part.unsupported(key, f"the model takes {most}")
    else:
        part.take(key, "conditioning_path", paths, "conditioning images have the samples' names")


def first_frame(part: Draft, key: str, value: Any) -> None:
    """Videos from their first frame, always or with a probability, for models that take it."""
    if family_of(part).needs_first_frame(part.job.get("model_flavour")):
        part.unneeded(key, "the model trains from nothing else")
    elif is_off(value):
        part.unneeded(key, "off is the default")
    elif takes_first_frame(part):
        part.take(key, "first_frame", value)
    else:
        part.unsupported(key, f"{family_of(part).title} trains from text only here")


def conditioning_column(part: Draft, key: str, value: Any) -> None:
    """Take a column of conditioning images."""
    if references_of(part) is None:
        part.unsupported(key, f"{family_of(part).title} trains without conditioning images here")
    else:
        part.take(key, "conditioning_column", value)


def only_caption(draft: Draft, key: str, value: Any) -> None:
    """One caption for all pictures: a trigger word, where captions are missing."""
    if draft.take(key, "trigger_word", value, _ONLY_CAPTION):
        draft.values["missing_captions"] = "empty"


def frames(draft: Draft, key: str, value: Any) -> None:
    """Frames of a sample, of which families take a multiple and one."""
    number, family = as_number(value), family_of(draft)
    if number is None or number < 1:
        draft.unreadable(key, "not a number of frames")
    elif number == 1:
        draft.unneeded(key, "images are videos of one frame")
    elif not family.frame_step:
        draft.unneeded(key, f"{family.title} trains on images")
    else:
        fits = frames_of(int(number), family.name)
        why = "" if fits == number else f"{family.title} takes {family.lengths}"
        draft.take(key, "num_frames", fits, why)


def masks(part: Draft, key: str, value: Any) -> None:
    """Take a folder of masks named like their images."""
    place = find_beside(part.folder, str(value))
    if part.take(key, "mask_path", str(place) if place else str(value)):
        part.values["masked_loss"] = "file"


def to_base(part: Draft, key: str, value: Any) -> None:
    """Train a LoRA towards the base's own prediction on a dataset's samples."""
    if is_off(value):
        part.unneeded(key, "off is the default")
    elif part.job.get("model_type", "lora") != "lora":
        part.take(key, "regularization", True, "trained on its images: there is no adapter")
    elif part.take(key, "regularization", True, "with regularization_target: base"):
        part.job["regularization_target"] = "base"


def whole_repeats(part: Draft, key: str, value: Any) -> None:
    """Take a number of repeats, which may be a part of one in other tools."""
    number = as_number(value)
    if number is None or number != int(number) or number < 1:
        part.unsupported(key, "repeats are whole numbers; set weight in datasets for others")
    else:
        part.take(key, "repeats", int(number))


def settle(draft: Draft, parts: Sequence[Part]) -> None:
    """Put the datasets into the job, and what they ask of it."""
    entries = _merge(draft, [part for part in parts if part.values.get("path")])
    if not entries:
        return
    _share_resolution(draft, entries)
    for name in dict.fromkeys(key for part in parts for key in part.values):
        if name not in Dataset.model_fields:
            values = [part.values[name] for part in parts if name in part.values]
            _agree(draft, name, values, missing=len(parts) - len(values))
    triggers = {entry.get("trigger_word") for entry in entries}
    if len(triggers) == 1 and "trigger_word" not in draft.values and (trigger := triggers.pop()):
        draft.values["trigger_word"] = trigger
        for entry in entries:
            del entry["trigger_word"]
    if len(entries) == 1 and list(entries[0]) == ["path"]:
        draft.values["dataset"] = entries[0]["path"]
    else:
        draft.values["datasets"] = read("datasets", entries)


def _merge(draft: Draft, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Entries of `datasets`: a folder that is named for several resolutions is one of them."""
    entries: dict[tuple[str, str | None], dict[str, Any]] = {}
    for part in parts:
        entry = {key: part.values[key] for key in Dataset.model_fields if key in part.values}
        if entry.get("repeats") == 1:
            del entry["repeats"]
        key = (entry["path"], entry.get("split"))
        if key not in entries:
            entries[key] = entry
            continue
        if bool(entries[key].get("regularization")) != bool(entry.get("regularization")):
            draft.report.warnings.append(
                f"datasets: {entry['path']} is listed for training and for regularization; a "
                "folder is one dataset, so add a copy of it for the second"
            )
            continue
        if _join_resolutions(entries[key], entry):
            continue
        entries[key]["repeats"] = entries[key].get("repeats", 1) + entry.get("repeats", 1)
        draft.report.warnings.append(
            f"datasets: {entry['path']} is listed more than once; it becomes one dataset with "
            f"repeats: {entries[key]['repeats']}"
        )
    return list(entries.values())


def _join_resolutions(entry: dict[str, Any], again: dict[str, Any]) -> bool:
    """Make a folder that comes again at another resolution one dataset of both."""
    first, second = (dataset.get("resolution") for dataset in (entry, again))
    if not first or not second or set(sides_of(first)) & set(sides_of(second)):
        return False
    if entry.get("repeats") != again.get("repeats"):
        return False
    entry["resolution"] = read_resolutions([*sides_of(first), *sides_of(second)])
    return True


def _share_resolution(draft: Draft, entries: Sequence[dict[str, Any]]) -> None:
    """One resolution of all datasets is the job's; else samples are as large as the largest."""
    asked = [entry.get("resolution") for entry in entries]
    if all(asked) and all(resolution == asked[0] for resolution in asked):
        draft.values["resolution"] = asked[0]
        for entry in entries:
            del entry["resolution"]
    elif any(asked):
        largest = max(side for resolution in asked if resolution for side in sides_of(resolution))
        draft.values["resolution"] = largest
        for entry in entries:
            if entry.get("resolution") == largest:
                del entry["resolution"]


def _agree(draft: Draft, name: str, values: list[Any], missing: int) -> None:
    """One value for all datasets: the same, or the largest, or the first.

    Args:
        draft: The job.
        name: A key of the job.
        values: Its values, of the datasets that have one.
        missing: How many datasets have none.
    """
    chosen = max(values) if name in _LARGEST else values[0]
    draft.values[name] = chosen
    if any(value != chosen for value in values):
        which = "largest" if name in _LARGEST else "first"
        asked = ", ".join(dict.fromkeys(str(value) for value in values))
        draft.report.warnings.append(
            f"{name}: the datasets ask for {asked}; a job has only one, so it uses the {which}"
        )
    elif missing and chosen != JobSpec.model_fields[name].default:
        draft.report.warnings.append(
            f"{name}: {missing} of {missing + len(values)} datasets do not set it; a job has only "
            f"one, so all use {chosen}"
        )
