"""Datasets and prompts of sd-scripts and musubi-tuner, which are in files of their own."""

from __future__ import annotations

import json
import math
import re
import tomllib
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import UserError
from jobs.imports.common import data, models, training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    is_off,
    named,
    needless,
    unless_off,
    without,
)
from jobs.imports.common.places import find_beside, read_beside, read_text
from jobs.imports.common.whose import MUSUBI
from jobs.spec.keys.prompts import ValidationPrompt
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES, METADATA
from jobs.spec.values.spellings import as_list, normal_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.imports.common.draft import Rule
    from jobs.imports.common.import_report import Kind

_UNCHANGED: Final = "images and captions are used unchanged"
_WIDEST: Final = 16.0  # of max_bucket_aspect_ratio
_MUSUBI_SIZE: Final = [960, 544]
_MUSUBI_STEP: Final = 16


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


def _of_config(draft: Draft, key: str, value: Any) -> None:
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


def _of_folders(draft: Draft, key: str, value: Any) -> None:
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
    rules = _MUSUBI_FOLDER if is_musubi else _FOLDER
    names = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}
    flags = {k: v for k, v in draft.theirs.items() if names.get(k, k) in rules}
    part = _Subset(draft, [("", {k: v for k, v in flags.items() if k not in _ALONE}), *levels])
    part.folder = folder
    for flag, key in names.items():
        if flag in part.theirs:
            given = part.theirs.pop(flag)
            if key not in part.theirs:
                part.theirs[key], part.places[key] = given, ""
    if is_musubi:
        part.defaults = {"resolution": _MUSUBI_SIZE, "enable_bucket": False}
        part.defaults |= {"bucket_step": _MUSUBI_STEP} if part.on("enable_bucket") else {}
    else:
        part.defaults = {"caption_extension": ".caption", "enable_bucket": False}
        if part.on("enable_bucket"):
            sides = {"min_bucket_reso": 256, "max_bucket_reso": 1024, "bucket_reso_steps": 64}
            part.defaults |= sides
    part.apply(rules, {}, ("image_dir", "image_directory", "video_directory", "resolution"))
    return part


def _keys(value: Any) -> dict[str, Any]:
    return {normal_key(str(k)): v for k, v in value.items()} if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# -- keys of a folder ------------------------------------------------------------------------


def _folder(part: Draft, key: str, value: Any) -> None:
    data.folder(part, key, value)
    _look_at_captions(part)
    if key == "video_directory" and is_off(part.theirs.get("source_fps")):
        part.unsupported("source_fps", "without it, every frame is taken there; here, as fps says")


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


def _size(part: Draft, key: str, value: Any) -> None:
    """Take a side, or the width and height whose area samples have."""
    words = value if isinstance(value, (list, tuple)) else as_list(str(value))
    sides = [as_number(word) for word in (words if isinstance(words, (list, tuple)) else [words])]
    if len(sides) not in (1, 2) or not all(side and side >= 1 for side in sides):
        part.unreadable(key, "not a side, or a width and a height")
        return
    width, height = (sides * 2)[:2]
    side = round(math.sqrt((width or 1) * (height or 1)))
    part.take(key, "resolution", side, "" if width == height else "the side of as large a square")


def _bucketed(part: Draft, key: str, value: Any) -> None:
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


def _bucket_side(part: Draft, key: str, value: Any) -> None:
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


def _bucket_step(part: Draft, key: str, value: Any) -> None:
    if is_off(part.get("enable_bucket")):
        part.unneeded(key, "enable_bucket is off")
    else:
        training_keys.bucket_step(part, key, value)


def _metadata(part: Draft, key: str, value: Any) -> None:
    """Look for captions in a file in the folder, under a name that is read here."""
    name = re.split(r"[/\\]", str(value))[-1]
    if name in METADATA:
        part.unneeded(key, f"{name} is read where it is in the folder")
    else:
        part.unsupported(key, "move it into the folder as meta_cap.json")


def _masks(part: Draft, key: str, value: Any) -> None:
    if part.on("masked_loss"):
        data.masks(part, key, value)
    else:
        part.unsupported(key, "ControlNets are not supported")


def _frames(part: Draft, key: str, value: Any) -> None:
    """Take the longest of the lengths that each video is cut to."""
    numbers = [as_number(n) or 0 for n in (value if isinstance(value, list) else [value])]
    data.frames(part, key, max(numbers, default=0))
    if len(set(numbers)) > 1:
        part.report.warnings.append(
            f"num_frames: there, samples of {', '.join(f'{n:g}' for n in sorted(set(numbers)))} "
            "frames are made of each video; here, only the longest"
        )


def _extraction(part: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() == "head":
        part.unneeded(key, "a sample is the beginning of a video")
    else:
        part.unsupported(key, "a sample is the beginning of a video; cut longer ones into several")


def _jsonl(part: Draft, key: str, value: Any) -> None:
    part.unsupported(
        key,
        "write its rows as metadata.jsonl (file_name, text) beside the files, and set the folder",
    )
    part.report.to_fill_in.append(f"dataset: the folder of {value}, with a metadata.jsonl")


def _control_size(part: Draft, key: str, value: Any) -> None:
    sides = value if isinstance(value, list) else [value]
    numbers = [as_number(side) or 0 for side in sides]
    side = round(math.sqrt(math.prod(numbers * (2 if len(numbers) == 1 else 1))))
    part.take(key, "conditioning_resolution", side, "the side of as large a square")


def _source_rate(part: Draft, key: str, value: Any) -> None:
    part.unneeded(key, "the rate is read from each video")


_SHARED: Final[dict[str, Rule]] = {
    "resolution": _size,
    "batch_size": named("train_batch_size"),
    "num_repeats": named("repeats"),
    "enable_bucket": _bucketed,
    "bucket_no_upscale": without("small images are enlarged, up to max_upscale"),
    "caption_extension": data.caption_suffix,
    "debug_dataset": needless(training_keys.NO_EFFECT),
}

_FOLDER: Final[dict[str, Rule]] = {
    **_SHARED,
    "image_dir": _folder,
    "metadata_file": _metadata,
    "is_reg": unless_off("regularization", True),
    "class_tokens": named("caption", "of images without one"),
    "caption_extention": data.caption_suffix,
    "bucket_reso_steps": _bucket_step,
    **all_of("min_bucket_reso max_bucket_reso", _bucket_side),
    "flip_aug": unless_off("random_flip", True),
    "random_crop": unless_off("crop", "random"),
    "shuffle_caption": unless_off("shuffle_captions", True, "in a few orders, each encoded once"),
    "keep_tokens": data.kept_tags("shuffle_caption"),
    "caption_separator": without("captions are split at commas", ","),
    "caption_dropout_rate": named("caption_dropout_probability"),
    "alpha_mask": unless_off("masked_loss", "alpha"),
    "masked_loss": needless("datasets name their masks"),
    "conditioning_data_dir": _masks,
    "prior_loss_weight": named("prior_loss_weight"),
    "validation_split": named("validation_fraction"),
    "network_multiplier": without("the LoRA is trained at full strength", "1"),
    **all_of(
        "color_aug face_crop_aug_range caption_prefix caption_suffix secondary_separator "
        "enable_wildcard keep_tokens_separator caption_tag_dropout_rate token_warmup_step "
        "caption_dropout_every_n_epochs custom_attributes",
        without(_UNCHANGED),
    ),
    **all_of(
        "cache_info validation_seed resize_interpolation token_warmup_min",
        needless(training_keys.NO_EFFECT),
    ),
}

_MUSUBI_FOLDER: Final[dict[str, Rule]] = {
    **_SHARED,
    **all_of("image_directory video_directory", _folder),
    **all_of("image_jsonl_file video_jsonl_file", _jsonl),
    "bucket_step": training_keys.bucket_step,
    "cache_directory": needless(training_keys.OWN_CACHES),
    "control_directory": data.conditioning_folder,
    **all_of("control_resolution qwen_image_edit_control_resolution", _control_size),
    **all_of(
        "no_resize_control flux_kontext_no_resize_control qwen_image_edit_no_resize_control",
        without("conditioning images are resized, to conditioning_resolution"),
    ),
    "target_frames": _frames,
    "frame_extraction": _extraction,
    "source_fps": _source_rate,
    **all_of("frame_stride frame_sample max_frames", needless("a sample is a video's beginning")),
    "multiple_target": without("a sample has one target"),
    **all_of(
        "fp_latent_window_size fp_1f_clean_indices fp_1f_target_index fp_1f_no_post",
        needless("only for FramePack"),
    ),
}
# Keys of a folder that are flags of something else, or of none.
_ALONE: Final = ("image_dir", "metadata_file", "is_reg", "validation_seed", "class_tokens")


def _of_datasets(draft: Draft, key: str, value: Any) -> None:
    """Take a flag that datasets take over for the job, if there is none that did."""
    ours = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}.get(key, key)
    if any(entry.key == key for entry in draft.report.entries):
        return
    if {"dataset", "datasets"} & draft.values.keys():
        draft.unneeded(key, "the datasets have their own")
    elif ours == "num_repeats":
        without("it needs a dataset, and none could be read", "1")(draft, key, value)
    else:
        _FOLDER[ours](draft, key, value)


# -- samples ---------------------------------------------------------------------------------

_SETTINGS: Final = {"d": "seed", "s": "steps", "n": "negative_prompt", "f": "num_frames"}
_LONG: Final = {
    "prompt": "prompt",
    "negative_prompt": "n",
    "seed": "d",
    "sample_steps": "s",
    "scale": "l",
    "cfg_scale": "l",
    "guidance_scale": "g",
    "width": "w",
    "height": "h",
    "frame_count": "f",
    "image_path": "i",
    "control_image_path": "ci",
}
_IMAGES: Final = ("i", "ci")
_WHEN: Final = ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")


def sample_defaults(draft: Draft, tool: str) -> dict[str, Any]:
    """Return what samples have where their prompt does not say."""
    family = models.family_of(draft)
    if tool == MUSUBI:
        return {"sample.size": "256x256", "sample.steps": 20}
    if family.name == "lumina2":
        return {"sample.size": "1024x1024", "sample.steps": 36, "sample.guidance": 3.5}
    flux = family.guidance == "embedded"
    guidance = {"sample.guidance": 3.5 if flux else 7.5}
    return {"sample.size": "512x512", "sample.steps": 20 if flux else 30, **guidance}


def _prompts(draft: Draft, key: str, value: Any) -> None:
    """Read the file with prompts, each with its settings."""
    if not any(map(draft.on, _WHEN)):
        draft.unneeded(key, "nothing is sampled without sample_every_n_steps")
        return
    path = find_beside(draft.folder, str(value), by_name=True)
    if path is None:
        draft.unreadable(key, "no such file; set validation_prompts")
        return
    try:
        entries = _read_prompts(path)
    except (UserError, ValueError, TypeError, AttributeError) as error:
        draft.unreadable(key, f"{path.name} has no prompts ({error})")
        return
    made, lost = [], []
    for entry in entries:
        settings, other = _settings(draft, entry)
        try:
            made.append(ValidationPrompt.model_validate(settings).model_dump(mode="json"))
            lost += other
        except ValidationError as error:
            draft.unreadable(f"{path.name}: {settings.get('prompt')}", error.errors()[0]["msg"])
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
    return {_LONG.get(str(k), str(k)): v for k, v in entry.items() if k not in ("subset", "enum")}


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
    names = _SETTINGS | scales
    settings = {names[k]: v for k, v in entry.items() if k in names}
    settings["prompt"] = str(entry.get("prompt", ""))
    if "w" in entry or "h" in entry:
        size = draft.get("sample.size").partition("x")[::2]
        settings["resolution"] = f"{entry.get('w', size[0])}x{entry.get('h', size[1])}"
    if not family.frame_step:
        settings.pop("num_frames", None)
    if models.takes_images(draft) and (images := [entry[k] for k in _IMAGES if k in entry]):
        settings["conditioning_image"] = images[0]
    taken = (*names, "prompt", "w", "h", "f", *(_IMAGES if models.takes_images(draft) else ()))
    return settings, [str(k) for k in entry if k not in taken and not (k == "g" and not embedded)]


_SAMPLES: Final[dict[str, Rule]] = {
    "sample_prompts": _prompts,
    "sample_every_n_steps": named("validation_steps"),
    "sample_every_n_epochs": without("set validation_steps"),
    "sample_at_first": unless_off("validation_on_startup", True),
    "sample.size": training_keys.size,
    "sample.steps": named("validation_num_inference_steps"),
    "sample.guidance": named("validation_guidance"),
    **all_of(
        "sample_sampler sample_batch_size",
        needless("the stock pipeline samples, with its scheduler"),
    ),
}


def rules_of(tool: str) -> dict[str, Rule]:
    """Return the rules for data and sample keys."""
    folders = {"train_data_dir", "reg_data_dir", "in_json"}
    of_folders = dict.fromkeys(folders, _of_folders)
    rules: dict[str, Rule] = {"dataset_config": _of_config, **_SAMPLES}
    if tool == MUSUBI:
        return rules
    flags = (*(key for key in _FOLDER if key not in _ALONE), "train_batch_size", "dataset_repeats")
    return rules | dict.fromkeys(flags, _of_datasets) | of_folders
