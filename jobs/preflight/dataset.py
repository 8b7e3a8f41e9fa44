"""What can be known to be wrong with a job's data before it is queued."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.paths import exists, expand
from jobs.preflight.conditioning import check_places, check_prompt_images, split_samples
from jobs.spec.families import get_family, needs_first_frame
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.buckets import Buckets
from jobs.spec.values.dataset_files import (
    CAPTION_SUFFIXES,
    PICTURE_SUFFIXES,
    READ_WITH_HELP,
    VIDEO_SUFFIXES,
    foreign_problem,
    list_files,
    without_masks,
)
from jobs.spec.values.datasets import datasets_of, fallback_caption, find_layout
from jobs.spec.values.hub_names import HubName

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.datasets import Dataset

_MOST_OPENED: Final = 5000  # images; of more, hardly all are unusable


def check_dataset(spec: JobSpec) -> int:
    """Count the images and videos in the job's folders, before any file is read.

    Rows of tables are not counted.

    Raises:
        SpecError: There is no such folder, or no image in it, or a caption for none of them; or
            the job trains on or samples videos, and what reads and writes them is not installed.
    """
    if any(request.frames > 1 for request in requests_of(spec)):
        _check_videos("validation_prompts are sampled as videos")
    check_prompt_images(spec)
    return sum(_check_source(spec, dataset) for dataset in datasets_of(spec))


def _check_source(spec: JobSpec, dataset: Dataset) -> int:
    root = expand(dataset.path)
    if fallback_caption(spec, dataset) is not None:
        spec = spec.model_copy(update={"missing_captions": "empty"})
    if dataset.mask_path and not expand(dataset.mask_path).is_dir():
        raise SpecError(f"no such folder of masks: {expand(dataset.mask_path)}")
    if not exists(root):
        named = HubName.read("dataset", dataset.path)
        raise SpecError(
            f"no such dataset folder: {root}",
            f"a dataset of the hub: `fsdp-tui fetch --dataset {named}` first" if named else None,
        )
    if not root.is_dir():
        raise SpecError(f"the dataset {root} is a file, not a folder of images")
    try:
        layout, files = find_layout(root), list_files(root)
    except OSError as error:
        raise SpecError(f"cannot read the dataset {root} ({error.strerror})") from None
    if files.metadata and find_spec("pyarrow") is None:
        table = next((path for path in files.metadata if path.suffix == ".parquet"), None)
        if table is not None:
            raise SpecError(
                f"{table} needs pyarrow, which is not installed",
                "pip install 'fsdp-tui[datasets]'",
            )
    check_places(dataset, layout, metadata=bool(files.metadata))
    if layout == "webdataset":
        return 0  # counted when they are unpacked
    if layout != "folder":
        if find_spec("datasets") is None:
            raise SpecError(
                f"{root} is a directory of the datasets library, which is not installed",
                "pip install 'fsdp-tui[datasets]'",
            )
        return 0  # rows are counted when they are read
    takes_videos = get_family(spec.model_family).frame_step > 0
    masked = spec.masked_loss == "file"
    masks = expand(dataset.mask_path) if dataset.mask_path else None
    pictures = without_masks(files.pictures, masks) if masked else files.pictures
    samples = files.videos + pictures if takes_videos else pictures
    what = "images or videos" if takes_videos else "images"
    kinds = PICTURE_SUFFIXES | VIDEO_SUFFIXES if takes_videos else PICTURE_SUFFIXES
    if needs_first_frame(spec):
        samples, what, kinds = files.videos, "videos", VIDEO_SUFFIXES
    if not samples:
        others = files.foreign + ([] if takes_videos else files.videos)
        raise SpecError(
            f"0 {what} in the dataset folder {root}",
            (f"it has {others[0].name}: {_why_foreign(others[0])}; " if others else "")
            + f"supported: {' '.join(sorted(kinds))}",
        )
    samples, _ = split_samples(dataset, samples)
    if takes_videos and files.videos:
        _check_videos(f"{root} holds videos")
    captioned = files.metadata or any(
        file.with_suffix(suffix).is_file() for file in samples for suffix in CAPTION_SUFFIXES
    )
    if not captioned and spec.missing_captions == "skip":
        raise SpecError(
            f"none of the {len(samples)} images in {root} has a caption",
            "add one for each, e.g. cat.txt for cat.png, or set missing_captions: empty",
        )
    if not any(path in files.videos for path in samples) and not files.metadata:
        _check_any_usable(root, samples, spec, Buckets(spec, dataset))
    return len(samples)


def _check_any_usable(root: Path, pictures: list[Path], spec: DataKeys, buckets: Buckets) -> None:
    """Refuse a folder of which no image can be trained on, by their names and first bytes.

    One that can ends the search, so this costs a moment; the engine decodes them all later.

    Raises:
        SpecError: None of them can; says why not for the first one.
    """
    if len(pictures) > _MOST_OPENED:
        return
    first = ""
    for path in pictures:
        if not (why := _why_unusable(path, spec, buckets)):
            return
        first = first or f"{path.name}: {why}"
    raise SpecError(f"no usable image in {root}", first)


def _why_unusable(path: Path, spec: DataKeys, buckets: Buckets) -> str:
    """Say why an image cannot be used, as far as its first bytes tell; "" if it can."""
    if spec.missing_captions == "skip" and not any(
        path.with_suffix(suffix).exists() for suffix in CAPTION_SUFFIXES
    ):
        return "no caption" if path.name.isascii() else ""
    from PIL import Image, UnidentifiedImageError  # 25 ms, which most commands need not spend

    try:
        if not path.stat().st_size:
            return "empty file"
        with warnings.catch_warnings(), Image.open(path) as picture:
            width, height = picture.size
    except FileNotFoundError:
        return "a broken link"
    except UnidentifiedImageError:
        return "" if path.suffix.lower() in READ_WITH_HELP else "not an image"
    except Image.DecompressionBombError:
        return "more than 178 megapixels; downscale it"
    except Exception:  # a permission, or a damaged header: the engine says it better
        return ""
    return buckets.why_unfit(width, height)


def _check_videos(why: str) -> None:
    """Videos are read and written by a library that images do not need."""
    if find_spec("av") is None:
        raise SpecError(
            f"{why}, which need PyAV; it is not installed", "pip install 'fsdp-tui[video]'"
        )


def _why_foreign(path: Path) -> str:
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return "the model trains on images"
    return foreign_problem(path)
