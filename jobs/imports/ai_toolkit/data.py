"""ai-toolkit's datasets and samples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.imports.common import data, models, training_keys
from jobs.imports.common.draft import (
    all_of,
    as_number,
    flatten,
    is_off,
    named,
    needless,
    same,
    unless_off,
    without,
)
from jobs.imports.common.import_report import Kind
from jobs.spec.keys.prompts import ValidationPrompt
from jobs.spec.values.datasets import TRIGGER

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft, Rule

# Flags in the text of a prompt, as sd-scripts have them, and the settings that they are here.
_FLAGS: Final = {
    "n": "negative_prompt",
    "d": "seed",
    "seed": "seed",
    "l": "guidance",
    "cfg": "guidance",
    "s": "steps",
    "steps": "steps",
    "ctrl_img": "conditioning_image",
}
_SETTINGS: Final = {
    "prompt": "prompt",
    "neg": "negative_prompt",
    "seed": "seed",
    "guidance_scale": "guidance",
    "sample_steps": "steps",
    "num_frames": "num_frames",
    "ctrl_img": "conditioning_image",
}
_CONTROLS: Final = ("ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
_RESOLUTION: Final = 512  # of a dataset that says none
_FPS: Final = 24
_BUCKET_TOLERANCE: Final = 64  # pixels
_NO_CONTROLS: Final = "generated control images and inverted masks are not supported"


def read_datasets(draft: Draft, key: str, value: Any) -> None:
    """All datasets, each reported under its number."""
    entries = value if isinstance(value, list) else [value]
    parts = []
    for number, entry in enumerate(entries):
        place = f"{key}[{number}]"
        if not isinstance(entry, dict):
            draft.unreadable(place, "not a dataset")
        else:
            part = data.Part(draft, f"{place}.", flatten({str(k): v for k, v in entry.items()}))
            part.defaults = _defaults(part)
            part.apply(_DATASET, _DATASET_PREFIXES, ("folder_path", "resolution"))
            parts.append(part)
    if any("resolution" in part.values for part in parts):
        for part in parts:
            part.values.setdefault("resolution", _RESOLUTION)
    data.settle(draft, parts)


def _defaults(part: Draft) -> dict[str, Any]:
    """Return the tool's defaults of a dataset: its buckets, and how videos are read."""
    defaults: dict[str, Any] = {"bucket_tolerance": _BUCKET_TOLERANCE}
    if not _has_videos(part) or part.on("auto_frame_count"):
        return defaults
    shrinks = part.theirs.get("shrink_video_to_frames", True)
    return defaults | ({"shrink_video_to_frames": True} if not is_off(shrinks) else {"fps": _FPS})


def _has_videos(part: Draft) -> bool:
    return (part.number("num_frames") or 1) > 1 or part.on("auto_frame_count")


def _shrinks(part: Draft, key: str, value: Any) -> None:
    """Whether a sample shows a video from start to end."""
    if is_off(value) or not _has_videos(part):
        part.unneeded(key, "off, or there are no videos")
    else:
        part.unsupported(key, "a sample is consecutive frames at fps, not all of a video")


def _resolution(part: Draft, key: str, value: Any) -> None:
    """One resolution or several; both train every image at each that it is large enough for."""
    sides = [as_number(side) for side in (value if isinstance(value, list) else [value])]
    resolutions = [int(side) for side in sides if side]
    if resolutions and len(resolutions) == len(sides):
        part.take(key, "resolution", resolutions)
    else:
        part.unreadable(key, "not a number, or a list of numbers")


def _default_caption(part: Draft, key: str, value: Any) -> None:
    """Take the caption for images without one, with the trigger word inserted as the tool does."""
    word = part.job.get("trigger_word")
    text = str(value).replace(TRIGGER, word or "")
    data.only_caption(part, key, f"{word} {text}" if word and word not in text else text)


def _control(part: Draft, key: str, value: Any) -> None:
    """Control images; the tool makes those of Kontext as large as the training image."""
    if is_off(value):
        part.unneeded(key, "off is the default")
        return
    data.conditioning_folder(part, key, value)
    if part.values.get("conditioning_path") and part.job.get("model_flavour") == "kontext":
        part.values["conditioning_resolution"] = part.values.get("resolution")


def _outside(part: Draft, key: str, value: Any) -> None:
    if part.get("mask_path") or part.on("alpha_mask"):
        part.take(key, "unmasked_weight", value)
    else:
        part.unneeded(key, "there are no masks")


def reg_weight(draft: Draft, key: str, value: Any) -> None:
    """Take the weight of regularization, if there is a regularization dataset."""
    entries = draft.theirs.get("datasets")
    entries = entries if isinstance(entries, list) else [entries]
    if any(isinstance(entry, dict) and not is_off(entry.get("is_reg")) for entry in entries):
        draft.take(key, "prior_loss_weight", value)
    else:
        draft.unneeded(key, "there is no regularization dataset")


_DATASET: Final[dict[str, Rule]] = {
    **all_of("folder_path dataset_path", data.folder),
    "type": needless("images and videos are recognized by file name"),
    "resolution": _resolution,
    **all_of("caption_ext caption_type", data.caption_suffix),
    "caption_dropout_rate": named("caption_dropout_probability"),
    "default_caption": _default_caption,
    "trigger_word": same,
    "shuffle_tokens": unless_off("shuffle_captions", True, "in a few orders, each encoded once"),
    "keep_tokens": data.kept_tags("shuffle_tokens"),
    "num_repeats": named("repeats"),
    "flip_x": named("random_flip"),
    "random_crop": unless_off("crop", "random"),
    "num_frames": data.frames,
    "fps": same,
    "shrink_video_to_frames": _shrinks,
    "auto_frame_count": without("all samples have num_frames frames"),
    "do_i2v": data.first_frame,
    "flip_y": without("images are only flipped horizontally (random_flip)"),
    "token_dropout_rate": without("caption_dropout_probability trains with empty captions"),
    "loss_multiplier": named("loss_weight"),
    "network_weight": without("the LoRA is trained at full strength", "1"),
    "mask_path": data.masks,
    "alpha_mask": unless_off("masked_loss", "alpha"),
    "mask_min_value": _outside,
    "scale": without("images are resized to fill their bucket", "1"),
    "square_crop": unless_off("crop", "square"),
    **all_of(
        "random_scale random_triggers augments augmentations standardize_images poi "
        "use_short_captions replacements",
        without("images and captions are used unchanged"),
    ),
    **all_of("control_path control_path_1 control_path_2 control_path_3", _control),
    **all_of(
        "inpaint_path unconditional_path invert_mask controls",
        without(_NO_CONTROLS),
    ),
    "buckets": needless(training_keys.BUCKETS),
    "bucket_tolerance": training_keys.bucket_step,
    "is_reg": unless_off("regularization", True),
    "prior_reg": without("regularization images are trained as they are"),
    **all_of(
        "cache_latents cache_latents_to_disk cache_text_embeddings cache_clip_vision_to_disk",
        needless(training_keys.OWN_CACHES),
    ),
    **all_of(
        "num_workers prefetch_factor fast_image_size debug guidance_type "
        "full_size_control_images replay_transforms extra_values shuffle_augmentations "
        "random_triggers_max control_transparent_color",
        needless(training_keys.NO_EFFECT),
    ),
}

_DATASET_PREFIXES: Final[dict[str, Rule]] = {"clip_image_": without(_NO_CONTROLS)}


# -- samples ---------------------------------------------------------------------------------


def no_samples(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "off is the default")
    else:
        draft.record(Kind.TRANSLATED, key, why="no validation_prompts")


def _prompts(draft: Draft, key: str, value: Any) -> None:
    """Prompts, each with the settings that stand in its text or beside it."""
    if draft.on("train.disable_sampling"):
        draft.unneeded(key, "train.disable_sampling is on")
        return
    entries = value if isinstance(value, list) else [value]
    made, lost = [], []
    for number, entry in enumerate(entries):
        settings, other = _of_mapping(entry) if isinstance(entry, dict) else _of_text(str(entry))
        if not models.takes_images(draft) and settings.pop("conditioning_image", None):
            other.append("ctrl_img")
        if draft.on("sample.walk_seed") and "seed" not in settings:
            settings["seed"] = int(draft.number("sample.seed") or 0) + number
        try:
            made.append(ValidationPrompt.model_validate(settings).model_dump(mode="json"))
            lost += other
        except ValidationError as error:
            draft.unreadable(f"{key}[{number}]", error.errors()[0]["msg"])
    seeds = "with increasing seeds" if draft.on("sample.walk_seed") else "the equivalent key"
    draft.take(key, "validation_prompts", made, seeds)
    for name in dict.fromkeys(lost):
        draft.unsupported(f"{key}: {name}", "samples use only the trained model")


def _of_mapping(entry: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a prompt that is a mapping into settings and keys that are not supported here."""
    settings = {_SETTINGS[k]: v for k, v in entry.items() if k in _SETTINGS and v is not None}
    width, height = entry.get("width"), entry.get("height")
    if width or height:
        settings["resolution"] = f"{width or height}x{height or width}"
    if controls := [entry[key] for key in _CONTROLS if entry.get(key)]:
        settings["conditioning_image"] = controls
    supported = (*_SETTINGS, *_CONTROLS, "width", "height", "fps")
    lost = [str(k) for k in entry if k not in supported]
    if not settings.get("negative_prompt"):
        settings.pop("negative_prompt", None)
    return settings, lost


def _of_text(text: str) -> tuple[dict[str, Any], list[str]]:
    """Split a prompt followed by flags into settings and flags that are not supported here."""
    prompt, *flags = re.split(r"(?:^|\s)--(?=[a-z])", text)
    settings: dict[str, Any] = {"prompt": prompt.strip()}
    sides: dict[str, str] = {}
    lost = []
    for flag in flags:
        name, _, value = flag.partition(" ")
        if name in ("w", "h"):
            sides[name] = value.strip()
        elif name in _FLAGS:
            settings[_FLAGS[name]] = value.strip()
        else:
            lost.append(f"--{name}")
    if sides:
        some = next(iter(sides.values()))
        settings["resolution"] = f"{sides.get('w', some)}x{sides.get('h', some)}"
    return settings, lost


def _width(draft: Draft, key: str, value: Any) -> None:
    height = draft.get("sample.height") or value
    draft.take(key, "validation_resolution", f"{value}x{height}", "width and height")


def _negative(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "not set")
    elif models.takes_negatives(draft):
        draft.take(key, "validation_negative_prompt", value)
    else:
        draft.unneeded(key, "no effect with guidance-distilled models")


def _sample_frames(draft: Draft, key: str, value: Any) -> None:
    if models.family_of(draft).frame_step and (as_number(value) or 1) > 1:
        draft.take(key, "validation_num_frames", value)
    else:
        draft.unneeded(key, "samples are images")


def _height(draft: Draft, key: str, value: Any) -> None:
    if "sample.width" in {**draft.theirs, **draft.defaults}:
        draft.unneeded(key, "set by validation_resolution")
    else:
        _width(draft, key, value)


SAMPLES: Final[dict[str, Rule]] = {
    **all_of("sample.prompts sample.samples", _prompts),
    "sample.sample_every": named("validation_steps"),
    "sample.width": _width,
    "sample.height": _height,
    "sample.neg": _negative,
    "sample.seed": named("validation_seed"),
    "sample.guidance_scale": named("validation_guidance"),
    "sample.sample_steps": named("validation_num_inference_steps"),
    "sample.num_frames": _sample_frames,
    "sample.walk_seed": needless("each prompt has the resulting seed"),
    "sample.sampler": needless("the stock pipeline samples, with its scheduler"),
    "sample.network_multiplier": without("samples use the trained weights", "1"),
    "sample.guidance_rescale": without("the stock pipeline's guidance is used"),
    "sample.sample_start_step": without("samples start at the first multiple of validation_steps"),
    **all_of(
        "sample.fps sample.format sample.ext sample.extra_values sample.refiner_start_at "
        "sample.adapter_conditioning_scale",
        needless("samples are PNG, and MP4 at the job's fps"),
    ),
}
