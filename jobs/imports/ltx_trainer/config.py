"""Configurations of Lightricks' ltx-trainer: the rules that are more than a row of the table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data
from jobs.imports.common.draft import Draft, as_number, flatten
from jobs.imports.common.draft import read as read_value
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import find_beside, parse
from jobs.imports.common.table import read_table
from jobs.imports.common.whose import LTX_TRAINER, refuse_others
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

TITLE: Final = LTX_TRAINER
_STRATEGY: Final = "training_strategy"
_LISTS: Final = ("validation.samples", f"{_STRATEGY}.video.conditions")
# By parts of names of files, in this order.
_FLAVOURS: Final = {"2.5": "2.5-22b", "2.3": "2.3-22b", "22b": "2.3-22b"}
_FRACTION: Final = 0.1  # of the rate, where its linear schedule ends


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, or is of another tool.
    """
    values = parse(path, otherwise=".yaml")
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise UserError(f"{path} is not a config of {TITLE}: it has no model")
    if "model_source" in values["model"]:
        raise UserError(
            f"{path} is a config of LTX-Video-Trainer, which trains LTX-Video, not LTX-2",
            "write a job with model_family: ltxvideo",
        )
    theirs = flatten({str(key): value for key, value in values.items()}, keep=_LISTS)
    draft = Draft(theirs, path.absolute().parent)
    draft.values["model_family"] = "ltx2"
    draft.defaults = CONFIG.defaults_of(draft)
    CONFIG.apply(draft)
    if draft.get(f"{_STRATEGY}.name") == "flexible" and not any(
        key.startswith(f"{_STRATEGY}.video") for key in theirs
    ):
        draft.unsupported(f"{_STRATEGY}.video", "none; sound is trained with its video only")
    draft.values["weight_decay"] = 0.01
    draft.assume("optimization.optimizer_type", "as torch's AdamW has it", weight_decay=0.01)
    return draft


def model(draft: Draft, key: str, value: Any) -> None:
    """Take the flavour that the name of a single file tells."""
    name = re.split(r"[/\\]", str(value))[-1].lower()
    if "distilled" in name:
        draft.unsupported(key, "the job trains the model that it was distilled from")
    flavour = next((called for part, called in _FLAVOURS.items() if part in name), "2-19b")
    hub_id = FAMILIES["ltx2"].flavours[flavour].hub_id
    draft.values["pretrained_model_name_or_path"] = hub_id
    draft.take(key, "model_flavour", flavour, f"{hub_id}, in the layout of diffusers")


def targets(draft: Draft, key: str, value: Any) -> None:
    """Take the modules that get an adapter, of those that see the video."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if draft.values.get("train_audio"):
        draft.take(key, "lora_target_modules", names)
        return
    video = [name for name in names if not re.search(r"audio|a2v|v2a|video_to", name)]
    ours = [
        f"{attention}{name}"
        for name in video
        for attention in (("attn1.", "attn2.") if name.startswith("to_") else ("",))
    ]
    if ours:
        draft.take(key, "lora_target_modules", ours, "of the video; sound is not trained")
    else:
        draft.unsupported(key, "they are of sound, which is not trained")


def conditions(draft: Draft, key: str, value: Any) -> None:
    """First frames are a setting of the dataset; other conditions are not here."""
    entries = [entry for entry in _listed(value) if isinstance(entry, dict)]
    others = [str(entry.get("type")) for entry in entries if entry.get("type") != "first_frame"]
    if others:
        draft.unsupported(key, f"videos are not conditioned on {', '.join(others)}")
    elif entries:
        first_frame(draft, key, value)
    else:
        draft.unneeded(key, "there are none")


def first_frame(draft: Draft, key: str, value: Any) -> None:
    if _share(draft):
        draft.record(Kind.TRANSLATED, key, why="first_frame of the dataset")
    else:
        draft.unneeded(key, "off is the default")


def _share(draft: Draft) -> float:
    """Return how often a video's first frame is given."""
    given = draft.get(f"{_STRATEGY}.video.conditions")
    for entry in _listed(given):
        if isinstance(entry, dict) and entry.get("type") == "first_frame":
            share = as_number(entry.get("probability", 1.0))
            return share if share is not None and 0 <= share <= 1 else 0.0
    share = draft.number(f"{_STRATEGY}.first_frame_conditioning_p")
    return share if share is not None and 0 <= share <= 1 else 0.0


def folder(draft: Draft, key: str, value: Any) -> None:
    """Take the folder, which holds latents there: what was encoded is not in the configuration."""
    place = find_beside(draft.folder, str(value))
    try:
        entry = {"path": str(place or value), "first_frame": _share(draft)}
        draft.values["datasets"] = read_value("datasets", [entry])
    except UserError as error:
        draft.unreadable(key, str(error))
        return
    draft.unsupported(key, "it holds latents; jobs read videos, and cache latents themselves")
    draft.report.to_fill_in.append(
        "datasets: name the folder of the videos; resolution and num_frames are those of "
        "process_dataset.py"
    )


def schedule(draft: Draft, key: str, value: Any) -> None:
    """Fall to a tenth of the rate in a straight line, which is a polynomial of power 1 here."""
    rate = draft.number("optimization.learning_rate")
    if draft.take(key, "lr_scheduler", "polynomial", "to a tenth of the rate, in a straight line"):
        draft.values |= {"lr_power": 1.0, "lr_end": _FRACTION * rate if rate else 0.0}


def size(draft: Draft, key: str, value: Any) -> None:
    """Width, height and frames of samples."""
    sides = [as_number(side) for side in _listed(value)]
    if len(sides) != 3 or not all(side is not None and 1 <= side < 1e5 for side in sides):
        draft.unreadable(key, "not a width, a height and a number of frames")
        return
    width, height, frames = (int(side or 0) for side in sides)
    if draft.take(key, "validation_resolution", f"{width}x{height}", "width and height"):
        draft.take(key, "validation_num_frames", frames, "the number of frames")


def prompts(draft: Draft, key: str, value: Any) -> None:
    """Prompts, each with its first frame."""
    entries = value if isinstance(value, list) else [value]
    given, lost = [], set[str]()
    for number, entry in enumerate(entries):
        settings, others = _settings(entry if isinstance(entry, dict) else {"prompt": entry})
        images = _listed(draft.get("validation.images"))
        if number < len(images) and images[number]:
            settings.setdefault("conditioning_image", str(images[number]))
        given.append((f"{key}[{number}]", settings))
        lost |= others
    draft.take(key, "validation_prompts", data.prompts(draft, given), "the equivalent key")
    for name in sorted(lost):
        draft.unsupported(f"{key}: {name}", "samples are made of a text and a first frame")


def _settings(entry: dict[Any, Any]) -> tuple[dict[str, Any], set[str]]:
    """Split a sample into settings of a prompt and conditions that are not supported here."""
    settings = {k: entry[k] for k in ("prompt", "seed") if entry.get(k) is not None}
    lost: set[str] = set()
    for condition in _listed(entry.get("conditions")):
        parts = condition if isinstance(condition, dict) else {"type": condition}
        kind, image = str(parts.get("type")), parts.get("image_or_video")
        if kind == "first_frame" and image:
            settings["conditioning_image"] = str(image)
        else:
            lost.add(kind)
    sides = _listed(entry.get("video_dims"))
    if len(sides) == 3:
        settings |= {"resolution": f"{sides[0]}x{sides[1]}", "num_frames": sides[2]}
    return settings, lost


def _listed(value: Any) -> list[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list) else []


def old_strategy(draft: Draft, key: str) -> bool:
    """Whether the strategy is its first one, which is also the default."""
    return str(draft.theirs.get(f"{_STRATEGY}.name", "text_to_video")) == "text_to_video"


CONFIG: Final = read_table(__file__, "config", globals())
