"""Datasets and prompts of sd-scripts and musubi-tuner, which are in files of their own."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, models
from jobs.imports.common.draft import Draft, as_number, is_off
from jobs.imports.common.places import find_beside, read_beside, read_text
from jobs.imports.common.table import read_data, read_table
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES, METADATA, list_files
from jobs.spec.values.spellings import as_list, normal_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.imports.common.draft import Rule
    from jobs.imports.common.import_report import Kind

DATA: Final = read_data(__file__)

_WIDEST: Final = 16.0  # of max_bucket_aspect_ratio
# Keys of a folder that are flags of something else, or of none.
_ALONE: Final = ("image_dir", "metadata_file", "is_reg", "validation_seed", "class_tokens")
_SHARED: Final = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}


class _Subset(data.Part):
    """A folder, with the settings that its dataset, its file and the flags have for it."""

    def __init__(self, draft: Draft, levels: list[tuple[str, Mapping[str, Any]]]) -> None:
        super().__init__(
            draft, levels[-1][0], {k: v for _, keys in levels for k, v in keys.items()}
        )
        self.own = self.prefix
        self.places = {key: prefix for prefix, keys in levels for key in keys}

    def record(self, kind: Kind, key: str, *, why: str = "", **ours: Any) -> None:
        """Record what became of a key under where it stands, once for all folders below it."""
        self.prefix = self.places.get(key, self.own)
        if all(entry.key != self.prefix + key for entry in self._into):
            super().record(kind, key, why=why, **ours)


# -- where the datasets are ------------------------------------------------------------------


def of_config(draft: Draft, key: str, value: Any) -> None:
    """Read the file that describes the datasets."""
    file = read_beside(draft, key, value, dict, "set dataset")
    if file is None:
        return
    path, config = file
    draft.unneeded(key, "its keys follow")
    is_musubi = "dit" in draft.theirs
    general = _keys(config.get("general"))
    parts: list[data.Part] = []
    for number, dataset in enumerate(_list(config.get("datasets"))):
        where = f"{path.name}: datasets[{number}]"
        own = {k: v for k, v in _keys(dataset).items() if k != "subsets"}
        levels = [(f"{path.name}: general.", general), (f"{where}.", own)]
        subsets = _list(_keys(dataset).get("subsets"))
        below = [[(f"{where}.subsets[{i}].", _keys(subset))] for i, subset in enumerate(subsets)]
        for lowest in [[]] if is_musubi else below:
            parts.append(_part(draft, [*levels, *lowest], path.absolute().parent, is_musubi))
    if not parts:
        draft.report.warnings.append(f"{path.name}: it has no datasets")
    data.settle(draft, parts)


def of_folders(draft: Draft, key: str, value: Any) -> None:
    """Take `--train_data_dir` and `--reg_data_dir`, or a folder with a metadata file."""
    if "dataset_config" in draft.theirs:
        draft.unneeded(key, "dataset_config is used")
        return
    if key != "train_data_dir":
        if "train_data_dir" not in draft.theirs:
            draft.unsupported(key, "it needs train_data_dir")
        return
    entries: list[dict[str, Any]] = [{"image_dir": value}]
    if not is_off(draft.theirs.get("in_json")):
        entries[0]["metadata_file"] = draft.theirs["in_json"]
    if not is_off(draft.theirs.get("reg_data_dir")):
        entries.append({"image_dir": draft.theirs["reg_data_dir"], "is_reg": True})
    names = ("train_data_dir: ", "reg_data_dir: ")
    parts = [
        _part(draft, [(name, entry)], draft.folder, is_musubi=False)
        for name, entry in zip(names, entries, strict=False)
    ]
    data.settle(draft, parts)
    if "in_json" not in draft.theirs:
        draft.report.warnings.append(
            f"{key}: its folders are named as 10_cat; each becomes a dataset when the job is "
            "submitted, repeats as often, and is the caption of images that have none"
        )


def _part(
    draft: Draft, levels: list[tuple[str, Mapping[str, Any]]], folder: Path, is_musubi: bool
) -> data.Part:
    """Read one folder, with the flags that it takes over."""
    table = MUSUBI_FOLDER if is_musubi else FOLDER
    flags = {k: v for k, v in draft.theirs.items() if _SHARED.get(k, k) in table.rules}
    part = _Subset(draft, [("", {k: v for k, v in flags.items() if k not in _ALONE}), *levels])
    part.folder = folder
    for flag, key in _SHARED.items():
        if flag in part.theirs:
            given = part.theirs.pop(flag)
            if key not in part.theirs:
                part.theirs[key], part.places[key] = given, ""
    part.defaults = table.defaults_of(part)
    table.apply(part)
    return part


def _keys(value: Any) -> dict[str, Any]:
    return {normal_key(str(k)): v for k, v in value.items()} if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# -- keys of a folder ------------------------------------------------------------------------


def folder(part: Draft, key: str, value: Any) -> None:
    data.folder(part, key, value)
    _look_at_captions(part)
    if key == "video_directory" and is_off(part.theirs.get("source_fps")):
        part.unsupported("source_fps", "without it, every frame is taken there; here, as fps says")


def rows(part: Draft, key: str, value: Any) -> None:
    """Take the folder of the files that a JSONL file lists, if there are no others in it.

    Captions are read where they are beside the files too; else a person has to write them.
    """
    path = find_beside(part.folder, str(value), by_name=True)
    captions = _rows_of(path) if path is not None else {}
    folder = Path(os.path.commonpath([file.parent for file in captions])) if captions else None
    if folder is not None:
        present = list_files(folder)
        if not captions.keys() >= {*present.pictures, *present.videos}:
            folder = None
    if folder is not None and all(map(_has_caption, captions, captions.values())):
        part.take(key, "path", str(folder), "its files, whose captions are in .txt files, too")
        return
    if folder is not None:
        part.values["path"] = str(folder)
    part.unsupported(
        key,
        "write its rows as metadata.jsonl (file_name, text) beside the files, and set the folder",
    )
    part.report.to_fill_in.append(
        f"dataset: {folder or f'the folder of {value}'}, with a metadata.jsonl"
    )


def _rows_of(path: Path) -> dict[Path, str]:
    """Return the files of a JSONL file that are all here, with their captions; else nothing."""
    captions: dict[Path, str] = {}
    try:
        for line in filter(str.strip, read_text(path).splitlines()):
            row = json.loads(line)
            named = row.get("image_path") or row["video_path"]
            if (file := find_beside(path.parent, str(named))) is None:
                return {}
            captions[file.absolute()] = str(row.get("caption") or "")
    except (UserError, ValueError, KeyError, AttributeError):
        return {}
    return captions


def _has_caption(file: Path, caption: str) -> bool:
    try:
        return file.with_suffix(".txt").read_text(encoding="utf-8").strip() == caption.strip()
    except (OSError, ValueError):
        return False


def _look_at_captions(part: Draft) -> None:
    """Warn where the folder has captions that the tool would not read."""
    place = find_beside(part.folder, str(part.values.get("path", "")))
    suffix = _suffix_of(part)
    if place is None or not place.is_dir() or not suffix:
        return
    others = {path.suffix for path in place.iterdir()} & set(CAPTION_SUFFIXES) - {suffix, ".json"}
    if others:
        part.report.warnings.append(
            f"{place.name}: captions in {', '.join(sorted(others))} files are read here; there, "
            f"only {suffix} files are"
        )


def _suffix_of(part: Draft) -> str:
    text = str(part.get("caption_extension") or "").strip()
    return f".{text.lstrip('.')}" if text else ""


def names_metadata(part: Draft, key: str) -> bool:
    """Whether a file of captions has a name that is read here, too."""
    return re.split(r"[/\\]", str(part.get(key)))[-1] in METADATA


def size(part: Draft, key: str, value: Any) -> None:
    """Take a side, or the width and height whose area samples have."""
    words = value if isinstance(value, (list, tuple)) else as_list(str(value))
    sides = [as_number(word) for word in (words if isinstance(words, (list, tuple)) else [words])]
    if len(sides) not in (1, 2) or not all(side and side >= 1 for side in sides):
        part.unreadable(key, "not a side, or a width and a height")
        return
    width, height = (sides * 2)[:2]
    side = round(math.sqrt((width or 1) * (height or 1)))
    part.take(key, "resolution", side, "" if width == height else "the side of as large a square")


def bucketed(part: Draft, key: str, value: Any) -> None:
    """Take whether sizes differ; else all have the one that is set."""
    if not is_off(value):
        if "image_directory" in part.theirs or "video_directory" in part.theirs:
            part.take(key, "max_bucket_aspect_ratio", 4.0, "as long as musubi-tuner's buckets")
        else:
            part.unneeded(key, "buckets are the default")
        return
    size = part.get("resolution")
    sides = size if isinstance(size, (list, tuple)) else as_list(str(size))
    if isinstance(sides, (list, tuple)) and len(set(map(str, sides))) > 1:
        part.unsupported(key, "there, all samples are cropped to one size; here, to buckets")
    elif part.on("random_crop"):
        part.take(key, "max_bucket_aspect_ratio", 1.0, "all samples are squares")
    else:
        part.take(key, "crop", "square", "all samples are squares")


def bucket_side(part: Draft, key: str, value: Any) -> None:
    """Take the smallest or largest side of buckets, which have the area of the resolution here."""
    side = part.values.get("resolution", part.job.get("resolution"))
    least, most = part.number("min_bucket_reso"), part.number("max_bucket_reso")
    if is_off(part.get("enable_bucket")):
        part.unneeded(key, "enable_bucket is off")
    elif not least or not most or not 0 < least <= most:
        part.unreadable(key, "not a number of pixels")
    elif not isinstance(side, int):
        part.unsupported(key, "set max_bucket_aspect_ratio")
    elif key == "min_bucket_reso":
        part.unneeded(key, "read with max_bucket_reso")
    else:
        fits = most > side
        ratio = min((most / side) ** 2, (side / min(least, side)) ** 2) if fits else most / least
        ours = max(1.0, min(_WIDEST, round(ratio, 2)))
        part.take(key, "max_bucket_aspect_ratio", ours, "of buckets with the resolution's area")
        if not fits:
            part.unsupported(f"{key} ", "longer buckets have a smaller area there, the same here")


def frames(part: Draft, key: str, value: Any) -> None:
    """Take the longest of the lengths that each video is cut to."""
    numbers = [as_number(n) or 0 for n in (value if isinstance(value, list) else [value])]
    data.frames(part, key, max(numbers, default=0))
    if len(set(numbers)) > 1:
        part.report.warnings.append(
            f"num_frames: there, samples of {', '.join(f'{n:g}' for n in sorted(set(numbers)))} "
            "frames are made of each video; here, only the longest"
        )


def control_size(part: Draft, key: str, value: Any) -> None:
    sides = value if isinstance(value, list) else [value]
    numbers = [as_number(side) or 0 for side in sides]
    side = round(math.sqrt(math.prod(numbers * (2 if len(numbers) == 1 else 1))))
    part.take(key, "conditioning_resolution", side, "the side of as large a square")


def layers(part: Draft, key: str, value: Any) -> None:
    """Take the layers beside each image, `cat_0.png` and so on for `cat.png`."""
    if is_off(value) or not models.family_of(part).makes_layers(part.job.get("model_flavour")):
        part.unsupported(key, "a sample has one target")
        return
    folder = Path(str(part.values.get("path")))
    stems = {path.stem for path in list_files(folder).pictures} if folder.is_dir() else set()
    named = (stem.rpartition("_") for stem in stems)
    ends = {end for image, _, end in named if end.isdigit() and image in stems}
    if ends:
        suffixes = [f"_{end}" for end in sorted(ends, key=int)]
        part.take(key, "conditioning_suffix", suffixes, "what the names of layers end with")
    else:
        part.unsupported(key, "set layer_suffix: what the names of each image's layers end with")


def of_datasets(draft: Draft, key: str, value: Any) -> None:
    """Take a flag that datasets take over for the job, if there is none that did."""
    if any(entry.key == key for entry in draft.report.entries):
        return
    if {"dataset", "datasets"} & draft.values.keys():
        draft.unneeded(key, "the datasets have their own")
    elif _SHARED.get(key, key) != "num_repeats":
        FOLDER.rules[_SHARED.get(key, key)](draft, key, value)
    elif as_number(value) == 1:
        draft.unneeded(key, "off is the default")
    else:
        draft.unsupported(key, "it needs a dataset, and none could be read")


def flag_rules() -> dict[str, Rule]:
    """Return rules for the flags that datasets take over."""
    return dict.fromkeys((*(k for k in FOLDER.rules if k not in _ALONE), *_SHARED), of_datasets)


# -- samples ---------------------------------------------------------------------------------


def prompts(draft: Draft, key: str, value: Any) -> None:
    """Read the file with prompts, each with its settings."""
    path = find_beside(draft.folder, str(value), by_name=True)
    if path is None:
        draft.unreadable(key, "no such file; set validation_prompts")
        return
    try:
        entries = _read_prompts(path)
    except (UserError, ValueError, TypeError, AttributeError) as error:
        draft.unreadable(key, f"{path.name} has no prompts ({error})")
        return
    read = [_settings(draft, entry) for entry in entries]
    made = data.prompts(draft, ((f"{path.name}: {own['prompt']}", own) for own, _ in read))
    lost = [name for _, other in read for name in other]
    if draft.take(key, "validation_prompts", made, f"{len(made)} prompts of {path.name}"):
        for name in dict.fromkeys(lost):
            draft.unsupported(f"{path.name}: --{name}", "samples come from the stock pipeline")


def _read_prompts(path: Path) -> list[dict[str, Any]]:
    """Return each prompt's settings by their short names; a text may also be in a list."""
    text = read_text(path)
    given: list[Any]
    if path.suffix == ".toml":
        table = tomllib.loads(text)["prompt"]
        given = [{**table, **subset} for subset in table["subset"]]
    elif path.suffix == ".json":
        given = json.loads(text)
    else:
        given = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [_short(line) if isinstance(line, dict) else _split(str(line)) for line in given]


def _short(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        DATA["prompt"].get(str(k), str(k)): v
        for k, v in entry.items()
        if k not in ("subset", "enum")
    }


def _split(line: str) -> dict[str, Any]:
    """Split `a cat --w 512 --d 1`."""
    prompt, *flags = line.strip().split(" --")
    settings: dict[str, Any] = {"prompt": prompt}
    for flag in flags:
        name, _, value = flag.partition(" ")
        settings[name.lower()] = value.strip()
    return settings


def _settings(draft: Draft, entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a prompt into what is the same here, and names of what is not."""
    family = models.family_of(draft)
    embedded = family.guidance_of(draft.values.get("model_flavour")) == "embedded"
    scales = {"g": "guidance", "l": "true_cfg_scale"} if embedded else {"l": "guidance"}
    names = DATA["prompt_flags"] | scales
    settings = {names[k]: v for k, v in entry.items() if k in names}
    settings["prompt"] = str(entry.get("prompt", ""))
    if "w" in entry or "h" in entry:
        size = draft.get("sample.size").partition("x")[::2]
        settings["resolution"] = f"{entry.get('w', size[0])}x{entry.get('h', size[1])}"
    if not family.frame_step:
        settings.pop("num_frames", None)
    if models.takes_images(draft) and (images := [entry[k] for k in ("i", "ci") if k in entry]):
        settings["conditioning_image"] = images[0]
    taken = (*names, "prompt", "w", "h", "f", *(("i", "ci") if models.takes_images(draft) else ()))
    return settings, [str(k) for k in entry if k not in taken and not (k == "g" and not embedded)]


FOLDER: Final = read_table(__file__, "folder", globals())
MUSUBI_FOLDER: Final = read_table(__file__, "musubi_folder", globals())
