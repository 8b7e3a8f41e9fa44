"""OneTrainer's concepts, which are datasets, and its samples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, models
from jobs.imports.common.draft import as_number, flatten, is_off, is_unset
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import find_beside, read_beside, read_text
from jobs.imports.common.table import read_table

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_FPS: Final = 24
_SETTINGS: Final = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "seed": "seed",
    "diffusion_steps": "steps",
    "cfg_scale": "guidance",
}


# -- concepts ----------------------------------------------------------------------------------


def concepts(draft: Draft, key: str, value: Any) -> None:
    """All concepts, each reported under its number."""
    if not isinstance(value, list):
        draft.unreadable(key, "not a list of concepts")
        return
    _read(draft, key, value)


def concept_file(draft: Draft, key: str, value: Any) -> None:
    if draft.theirs.get("concepts"):
        draft.unneeded(key, "concepts are in the configuration")
        return
    file = read_beside(draft, key, value, list, "set dataset or datasets")
    if file is not None:
        draft.record(Kind.TAKEN, key, why="its concepts follow")
        _read(draft, file[0].name, file[1])


def _read(draft: Draft, place: str, entries: list[Any]) -> None:
    parts = []
    for number, entry in enumerate(entries):
        name = f"{place}[{number}]"
        if not isinstance(entry, dict):
            draft.unreadable(name, "not a concept")
            continue
        theirs = _migrate({str(k): v for k, v in entry.items()})
        kind = str(theirs.get("type") or "STANDARD").strip().upper()
        if "enabled" in theirs and is_off(theirs["enabled"]):
            draft.unneeded(name, "enabled is off")
        elif kind == "VALIDATION" and not draft.on("validation"):
            draft.unneeded(name, "validation is off")
        elif kind == "VALIDATION":
            draft.unsupported(name, "validation_fraction holds out a part of the samples")
        elif kind not in ("STANDARD", "PRIOR_PREDICTION"):
            draft.unsupported(name, f"concepts of type {kind} are not supported")
        else:
            theirs = flatten(theirs, keep=("concept_stats",))
            parts.append(part := data.read_part(draft, name, theirs, CONCEPT))
            if kind == "PRIOR_PREDICTION":
                data.to_base(part, "type", True)
    if any("resolution" in part.values for part in parts):
        usual = draft.values.get("resolution") or _sides(draft.get("resolution"))
        for part in parts if usual else []:
            part.values.setdefault("resolution", usual)
    data.settle(draft, parts)


def _migrate(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a concept with the keys that the newest version has."""
    if "repeats" in entry and "balancing" not in entry:
        entry["balancing"] = entry.pop("repeats")
    if "validation_concept" in entry and "type" not in entry:
        entry["type"] = "STANDARD" if is_off(entry.pop("validation_concept")) else "VALIDATION"
    return entry


def below(part: Draft, key: str, value: Any) -> None:
    """Say whether there are folders in it, which belong to it here."""
    place = find_beside(part.folder, str(part.get("path")))
    try:
        inner = place is not None and any(child.is_dir() for child in place.iterdir())
    except OSError:
        inner = False
    if inner:
        part.unsupported(key, "folders below are read; move them away")
    else:
        part.unneeded(key, "there are none, or they cannot be seen")


def one_caption(part: Draft, key: str, value: Any) -> None:
    """One file with captions for all images, of which only a single one is supported."""
    path = find_beside(part.folder, str(part.get("text.prompt_path") or ""), by_name=True)
    lines: list[str] = []
    if path is not None:
        try:
            lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
        except UserError:
            lines = []
    if len(lines) == 1:
        data.only_caption(part, key, lines[0])
    else:
        why = f"{len(lines)} captions" if path else "a missing file"
        part.unsupported(key, f"{why} for all images; write .txt files beside them")


def _sides(text: Any) -> list[int] | None:
    """Return the resolutions of a text; None for a size that is no square."""
    words = str(text).strip().lower()
    if "x" in words and "," not in words:
        sides = {word.strip() for word in words.split("x")}
        return [int(side) for side in sides if side.isdigit()] if len(sides) == 1 else None
    return [int(word) for word in re.split(r"[^0-9]+", words) if word]


def resolution(draft: Draft, key: str, value: Any) -> None:
    """One resolution, or several, of which an image has a random one in each epoch there."""
    sides = _sides(value)
    if "resolution" in draft.values:
        draft.unneeded(key, "concepts have their own")
    elif sides is None:
        draft.unsupported(key, "all images of one shape: set resolution, the side of a square")
    elif not sides:
        draft.unreadable(key, "not a number, or several with commas")
    else:
        several = "each image at each of them; at a random one there"
        draft.take(key, "resolution", sides, several if len(sides) > 1 else "")


def caption_dropout(draft: Draft, key: str, value: Any) -> None:
    """Take the share of empty captions, which each text encoder draws by itself there."""
    before = draft.values.get("caption_dropout_probability")
    number = as_number(value) or 0.0
    if number == 0 and not before:
        draft.unneeded(key, "off is the default")
    elif before is not None and before != number:
        draft.unsupported(key, "all text encoders get the same captions")
    else:
        draft.take(key, "caption_dropout_probability", value)


def frames(draft: Draft, key: str, value: Any) -> None:
    number = as_number(value)
    if number is None and models.family_of(draft).frame_step:
        draft.unsupported(key, "all videos have num_frames frames")
        return
    data.frames(draft, key, value)
    if draft.values.get("num_frames"):
        draft.values["fps"] = _FPS


# -- samples -----------------------------------------------------------------------------------


def samples(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, list):
        draft.unreadable(key, "not a list of samples")
        return
    _prompts(draft, key, value, f"{len(value)} samples")


def sample_file(draft: Draft, key: str, value: Any) -> None:
    if draft.theirs.get("samples"):
        draft.unneeded(key, "samples are in the configuration")
        return
    file = read_beside(draft, key, value, list, "list prompts as validation_prompts")
    if file is not None:
        _prompts(draft, key, file[1], f"samples of {file[0].name}")


def _prompts(draft: Draft, key: str, entries: list[Any], why: str) -> None:
    """Take samples that are on, each with its settings."""
    given: list[tuple[str, dict[str, Any]]] = []
    if str(draft.get("sample_after_unit") or "MINUTE").strip().upper() == "NEVER":
        draft.unneeded(key, "sample_after_unit is NEVER")
        return
    for number, entry in enumerate(entries):
        name = f"{key}[{number}]"
        if not isinstance(entry, dict):
            draft.unreadable(name, "not a sample")
            continue
        if "enabled" in entry and is_off(entry["enabled"]):
            continue
        settings = {
            ours: entry[theirs]
            for theirs, ours in _SETTINGS.items()
            if not is_unset(entry.get(theirs)) and not (theirs == "seed" and _any_seed(entry))
        }
        width, height = entry.get("width"), entry.get("height")
        if width or height:
            settings["resolution"] = f"{width or height}x{height or width}"
        if models.family_of(draft).frame_step and (as_number(entry.get("frames")) or 1) > 1:
            settings["num_frames"] = entry["frames"]
        if not models.takes_negatives(draft):
            settings.pop("negative_prompt", None)
        given.append((name, {"prompt": ""} | settings))
    if made := data.prompts(draft, given):
        draft.take(key, "validation_prompts", made, why)
    else:
        draft.unneeded(key, "no sample is on")


def has_samples(draft: Draft, key: str) -> bool:
    """Whether there are samples, or a file that may have some."""
    file = draft.theirs.get("sample_definition_file_name")
    place = find_beside(draft.folder, str(file), by_name=True) if file else None
    return bool(draft.theirs.get("samples")) or place is not None


def _any_seed(entry: dict[Any, Any]) -> bool:
    seed = as_number(entry.get("seed"))
    return not is_off(entry.get("random_seed")) or seed is None or seed < 0


CONCEPT: Final = read_table(__file__, "concept", globals())
