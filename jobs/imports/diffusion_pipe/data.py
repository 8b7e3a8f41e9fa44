"""diffusion-pipe's dataset file: directories, and what all of them share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import data, models
from jobs.imports.common.draft import (
    all_of,
    as_number,
    is_off,
    named,
    needless,
    unless_off,
    without,
)
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import read_beside

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft, Rule

_INSTEAD: Final = "set dataset or datasets"
_DEFAULTS: Final = {"enable_ar_bucket": False, "skip_empty_caption": True}


def read_file(draft: Draft, key: str, value: Any) -> None:
    """Read the directories of the file that a key names."""
    file = read_beside(draft, key, value, dict, _INSTEAD)
    if file is None:
        return
    path, values = file
    entries = values.get("directory")
    if not isinstance(entries, list) or not entries:
        draft.unreadable(key, f"{path.name} has no [[directory]]; {_INSTEAD}")
        return
    draft.record(Kind.TAKEN, key, why="its directories follow")
    shared = {str(k): v for k, v in values.items() if k != "directory"}
    parts = []
    for number, entry in enumerate(entries):
        place = f"{path.name}[{number}]"
        if not isinstance(entry, dict):
            draft.unreadable(place, "not a directory")
            continue
        theirs = shared | {str(k): v for k, v in entry.items()}
        part = data.Part(draft, f"{place}.", theirs)
        part.defaults = dict(_DEFAULTS)
        part.apply(_DIRECTORY, {}, ("path", "resolutions"))
        parts.append(part)
    data.settle(draft, parts)


def _resolutions(part: Draft, key: str, value: Any) -> None:
    """Sides of squares, or sizes of which only the area counts; every image is trained at each."""
    given = value if isinstance(value, list) else [value]
    sides: list[int] = []
    for size in given:
        numbers = (
            [as_number(side) for side in size] if isinstance(size, list) else [as_number(size)]
        )
        pixels = [number for number in numbers if number is not None and number > 0]
        if len(pixels) != len(numbers) or len(pixels) not in (1, 2):
            part.unreadable(key, "not sides of squares, or widths and heights")
            return
        sides.append(round(math.sqrt(pixels[0] * pixels[-1])))
    areas = any(isinstance(size, list) for size in given)
    part.take(key, "resolution", sides, "of the same area" if areas else "the equivalent key")


def _buckets(part: Draft, key: str, value: Any) -> None:
    if is_off(value):
        part.take(key, "crop", "square", "no buckets")
    else:
        part.unneeded(key, "buckets are automatic; how many, bucket_step decides")


def _ratio(part: Draft, key: str, value: Any) -> None:
    """Take the ratio of the widest or tallest bucket."""
    low, high = (part.number("min_ar") or 0.5, part.number("max_ar") or 2.0)
    if is_off(part.get("enable_ar_bucket")) or low <= 0:
        part.unneeded(key, "there are no buckets")
    else:
        widest = max(1.0, round(max(high, 1 / low), 4))
        part.take(key, "max_bucket_aspect_ratio", widest, "the larger of max_ar and 1 / min_ar")


def _frames(part: Draft, key: str, value: Any) -> None:
    """Lengths of videos, of which a job has one."""
    given = value if isinstance(value, list) else [value]
    counts = sorted({int(n) for n in map(as_number, given) if n is not None and n > 1})
    if not counts or not models.family_of(part).frame_step:
        part.unneeded(key, "images are videos of one frame")
        return
    data.frames(part, key, counts[-1])
    if len(counts) > 1:
        part.unsupported(key, f"all videos have {counts[-1]} frames; shorter ones are skipped")


def _prefix(part: Draft, key: str, value: Any) -> None:
    """Take a beginning of all captions; a comma after a trigger word is put there here."""
    word = str(value).strip()
    if word.endswith(",") and "," not in word[:-1]:
        part.take(key, "trigger_word", word[:-1].strip(), "in front of captions without it")
    else:
        part.unsupported(key, "write it into the captions, or set trigger_word")


def _empty(part: Draft, key: str, value: Any) -> None:
    if is_off(value):
        part.take(key, "missing_captions", "empty", "trained with an empty caption")
    else:
        part.unneeded(key, "images without captions are skipped")


_DIRECTORY: Final[dict[str, Rule]] = {
    "path": data.folder,
    "resolutions": _resolutions,
    "num_repeats": data.whole_repeats,
    "enable_ar_bucket": _buckets,
    **all_of("min_ar max_ar", _ratio),
    "num_ar_buckets": needless("buckets are automatic; how many, bucket_step decides"),
    "ar_buckets": without("buckets are automatic"),
    "size_buckets": without("set resolution: the side of a square of the same area"),
    "frame_buckets": _frames,
    "mask_path": data.masks,
    "default_mask_file": without("images without a mask are trained whole"),
    "control_path": data.conditioning_folder,
    "caption_prefix": _prefix,
    **all_of(
        "shuffle_tags cache_shuffle_num",
        unless_off("shuffle_captions", True, "in a few orders, each encoded once"),
    ),
    "cache_shuffle_delimiter": data.delimiter("shuffle_tags", "cache_shuffle_num"),
    "skip_empty_caption": _empty,
    "online_captions": without("captions are in .txt files, or in metadata.jsonl"),
    "subsample_ratio": without("put the samples into a separate folder"),
    "shuffle_metadata": needless("samples are always shuffled"),
    "first_frame": unless_off("first_frame", True),
    "loss_weight": named("loss_weight"),
}


def clips(draft: Draft, key: str, value: Any) -> None:
    """Which part of a video a sample is."""
    if not draft.values.get("num_frames"):
        draft.unneeded(key, "there are no videos")
    elif str(value).strip().lower() == "single_beginning":
        draft.unneeded(key, "fps and num_frames decide")
    else:
        draft.unsupported(key, "samples are consecutive frames at fps")
