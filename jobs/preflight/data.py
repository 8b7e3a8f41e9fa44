"""Find problems of a job's data before it is queued."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.machine.engine_tools import Progress, ask
from jobs.paths import exists, expand
from jobs.spec.families import get_family, needs_first_frame, noun_of_references
from jobs.spec.families.references import NOUNS
from jobs.spec.file.load import dump_spec
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.buckets import Buckets
from jobs.spec.rules.cascade import settle
from jobs.spec.values import dataset_files, datasets
from jobs.spec.values.hub_names import HubName, is_url, why_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.dataset_files import Listing
    from jobs.spec.values.datasets import Dataset, Layout


# -- dataset --------------------------------------------------------------------------------
# Check datasets before a job is queued.


_OTHER_ROLES: Final = (
    "; if these are reference images or fill masks, set conditioning_roles: reference or fill_mask"
)
_BLANK: Final = 4  # bytes of a caption file, at most, that is read to see whether it is blank
_MOST_OPENED: Final = 5000  # images; in a larger folder hardly all are unusable


def check_dataset(spec: JobSpec) -> int:
    """Count the images and videos in the job's folders, before any file is read.

    Table rows are not counted.

    Raises:
        SpecError: A folder does not exist or has no images or no captions; or the job trains on or
            samples videos, and the library for them is not installed.
    """
    if any(request.frames > 1 for request in requests_of(spec)):
        _check_videos("validation_prompts are sampled as videos")
    check_prompt_images(spec)
    return sum(_check_source(spec, dataset) for dataset in datasets.datasets_of(spec))


def _check_source(spec: JobSpec, dataset: Dataset) -> int:
    root = expand(dataset.path)
    if url := next(filter(is_url, dataset.sources), None):  # a copy would have a path
        if why := why_refused(url):
            raise SpecError(why)
        raise SpecError(
            f"{url} is not on this machine", f"`fsdp-tui fetch {url}` first, or submit with --fetch"
        )
    if datasets.fallback_caption(spec, dataset) is not None:
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
        layout, files = datasets.find_layout(root), dataset_files.list_files(root)
    except OSError as error:
        raise SpecError(f"cannot read the dataset {root} ({error.strerror})") from None
    if files.metadata and find_spec("pyarrow") is None:
        table = next((path for path in files.metadata if path.suffix == ".parquet"), None)
        if table is not None:
            raise SpecError(
                f"{table} needs pyarrow, which is not installed",
                "pip install 'fsdp-tui[datasets]'",
            )
    noun = noun_of_references(spec, roles=dataset.roles)
    check_places(dataset, layout, noun, metadata=bool(files.metadata))
    if layout == "webdataset":
        return 0  # counted when they are unpacked
    if layout != "folder":
        if find_spec("datasets") is None:
            raise SpecError(
                f"{root} is a directory of the datasets library, which is not installed",
                "pip install 'fsdp-tui[datasets]'",
            )
        return 0  # counted when they are read
    takes_videos = get_family(spec.model_family).frame_step > 0
    masked = spec.masked_loss == "file"
    masks = expand(dataset.mask_path) if dataset.mask_path else None
    pictures = dataset_files.without_masks(files.pictures, masks) if masked else files.pictures
    samples = files.videos + pictures if takes_videos else pictures
    what = "images or videos" if takes_videos else "images"
    kinds = (
        dataset_files.PICTURE_SUFFIXES | dataset_files.VIDEO_SUFFIXES
        if takes_videos
        else dataset_files.PICTURE_SUFFIXES
    )
    if needs_first_frame(spec):
        samples, what, kinds = files.videos, "videos", dataset_files.VIDEO_SUFFIXES
    if not samples:
        others = files.foreign + ([] if takes_videos else files.videos)
        raise SpecError(
            f"0 {what} in the dataset folder {root}",
            (f"it has {others[0].name}: {_why_foreign(others[0])}; " if others else "")
            + f"supported: {' '.join(sorted(kinds))}",
        )
    samples, _ = split_samples(dataset, samples, noun)
    if takes_videos and files.videos:
        _check_videos(f"{root} holds videos")
    captioned = files.metadata or any(map(_has_caption, samples))
    if not captioned and spec.missing_captions == "skip":
        raise SpecError(
            f"none of the {_counted(samples)} in {root} has a caption",
            "add one for each, e.g. cat.txt for cat.png, or set missing_captions: empty",
        )
    if not any(path in files.videos for path in samples) and not files.metadata:
        _check_any_usable(root, samples, spec, Buckets(spec, dataset))
    return len(samples)


def _counted(samples: Sequence[Path]) -> str:
    videos = sum(path.suffix.lower() in dataset_files.VIDEO_SUFFIXES for path in samples)
    kinds = [
        name for name, count in (("images", len(samples) - videos), ("videos", videos)) if count
    ]
    return f"{len(samples)} {' and '.join(kinds)}"


def _check_any_usable(root: Path, pictures: list[Path], spec: DataKeys, buckets: Buckets) -> None:
    """Reject a folder in which no image is usable, judging by names and file headers.

    Stops at the first usable image, so it is fast; the engine decodes all of them later.

    Raises:
        SpecError: No image is usable; the message says why for the first one.
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
    """Return why an image cannot be used, judging by its header; "" if it can."""
    if spec.missing_captions == "skip" and not _has_caption(path):
        return "no caption" if path.name.isascii() else ""
    from PIL import Image, UnidentifiedImageError  # takes 25 ms, which most commands avoid

    try:
        if not path.stat().st_size:
            return "empty file"
        with warnings.catch_warnings(), Image.open(path) as picture:
            width, height = picture.size
    except FileNotFoundError:
        return "a broken link"
    except UnidentifiedImageError:
        return "" if path.suffix.lower() in dataset_files.READ_WITH_HELP else "not an image"
    except Image.DecompressionBombError:
        return "more than 178 megapixels; downscale it"
    except Exception:  # no permission or a damaged header: the engine reports it better
        return ""
    return buckets.why_unfit(width, height)


def _check_videos(why: str) -> None:
    """Check that the library for videos is installed; images do not need it."""
    if find_spec("av") is None:
        raise SpecError(
            f"{why}, which need PyAV; it is not installed", "pip install 'fsdp-tui[video]'"
        )


def _why_foreign(path: Path) -> str:
    if path.suffix.lower() in dataset_files.VIDEO_SUFFIXES:
        return "the model trains on images"
    return dataset_files.foreign_problem(path)


# -- conditioning ---------------------------------------------------------------------------
# Check the names of conditioning images before a job is queued.


def check_prompt_images(spec: DataPlanKeys) -> None:
    """Check that the conditioning images of all samples exist.

    Raises:
        SpecError: One is missing.
    """
    for request in requests_of(spec):
        for number, path in enumerate(request.conditioning):
            role = request.roles[number : number + 1]
            if not expand(path).is_file():
                noun = noun_of_references(spec, of_prompts=True, roles=role)
                raise SpecError(f"validation_prompts: no such {noun}: {path}")
            suffix = expand(path).suffix.lower()
            if suffix in dataset_files.VIDEO_SUFFIXES and role == ("reference",):
                raise SpecError(
                    f"validation_prompts: the reference image {path} is a video",
                    "if it is a control video, set conditioning_roles: control in the prompt",
                )
            still = suffix in dataset_files.PICTURE_SUFFIXES
            if still and request.frames > 1 and role == ("control",):
                raise SpecError(
                    f"validation_prompts: the control video {path} is an image",
                    "if it is a reference image, set conditioning_roles: reference in the prompt",
                )


def check_places(dataset: Dataset, layout: Layout, noun: str, *, metadata: bool) -> None:
    """Check that conditioning images are configured in a way that this kind of dataset supports.

    Raises:
        SpecError: The message names the key.
    """
    for path in dataset.conditioning_path or ():
        if not exists(expand(path)) or not expand(path).is_dir():
            name = dataset.name_of("conditioning_path")
            raise SpecError(f"{name}: no such folder: {path}")
    if not dataset.references:
        return
    if layout == "webdataset":
        raise SpecError(
            f"{dataset.path} holds tar files, whose {noun}s cannot be read",
            "unpack them into a folder",
        )
    if layout != "folder" and not dataset.conditioning_column:
        raise SpecError(
            f"{dataset.path} is a table, so its {noun}s are in columns",
            f"set {'layer' if noun == 'layer' else 'conditioning'}_column",
        )
    if layout == "folder" and dataset.conditioning_column and not metadata:
        kind = "layer" if noun == "layer" else "conditioning"
        raise SpecError(
            f"{dataset.name_of('conditioning_column')}: {dataset.path} has no metadata.jsonl, "
            "metadata.csv or metadata.parquet",
            f"set {kind}_path or {kind}_suffix",
        )


def split_samples(
    dataset: Dataset, paths: list[Path], noun: str
) -> tuple[list[Path], dict[Path, Path]]:
    """Return a folder's samples, and the first missing conditioning image of those that lack one.

    Conditioning images themselves are not samples.

    Raises:
        SpecError: None of the samples has a conditioning image.
        OSError: A folder cannot be read.
    """
    if not dataset.references or dataset.conditioning_column:
        return paths, {}
    pairs = datasets.Pairs(dataset, paths)
    samples = [path for path in paths if pairs.is_sample(path)]
    alone = {
        path: pairs.expected_paths(path)[existing.index(None)]
        for path in samples
        if None in (existing := pairs.existing_paths(path))
    }
    if samples and len(alone) == len(samples):
        raise SpecError(
            f"none of the {_counted(samples)} in {dataset.path} has "
            + ("all of its layers" if noun == "layer" else f"a {noun.replace(' or ', ' and a ')}"),
            f"for {samples[0].name}, it would be {alone[samples[0]]}"
            + (_OTHER_ROLES if noun == NOUNS["control"] else ""),
        )
    return samples, alone


def missing_partners(spec: InputKeys) -> list[str]:
    """Return a sentence for each of a job's folders with missing conditioning images."""
    folders = [
        dataset
        for dataset in datasets.datasets_of(spec)
        if dataset.references and not dataset.conditioning_column
    ]
    return [
        line
        for dataset in folders
        for line in describe_missing(
            dataset,
            *samples_in(spec, dataset, dataset_files.list_files(expand(dataset.path))),
            noun_of_references(spec, roles=dataset.roles),
        )
    ]


def samples_in(
    spec: InputKeys, dataset: Dataset, files: Listing
) -> tuple[list[Path], dict[Path, Path]]:
    """Return a folder's samples (no masks or conditioning images), and what some of them lack."""
    paths = files.pictures
    if spec.masked_loss == "file":
        masks = expand(dataset.mask_path) if dataset.mask_path else None
        paths = dataset_files.without_masks(paths, masks)
    if get_family(spec.model_family).frame_step:
        paths = files.videos + paths
    try:
        return split_samples(dataset, paths, noun_of_references(spec, roles=dataset.roles))
    except (SpecError, OSError):  # reported by another check
        return paths, {}


def describe_missing(
    dataset: Dataset, samples: Sequence[Path], alone: Mapping[Path, Path], noun: str
) -> list[str]:
    """Return a sentence on the samples without a conditioning image; empty if there are none."""
    if not alone:
        return []
    # Of several layers or roles, the file says which one is missing.
    several = noun == "layer" or " or " in noun
    lost = [str(path) for path in alone.values()] if several else [path.name for path in alone]
    names = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
    return [
        f"{len(alone)} of {_counted(samples)} in {dataset.path}: no {noun} "
        f"({names}), will be skipped."
    ]


# -- data glance ----------------------------------------------------------------------------
# Sample a job's images, reading as few files and bytes as possible, to find unusable ones.


MOST: Final = 500  # images read per folder, evenly spaced
_REPORTED_SHARE: Final = 0.2  # share of the images; a few bad ones are in every dataset
_HEAD: Final = 12  # bytes
# First bytes of image files: PNG, JPEG, GIF, BMP, TIFF twice, WebP, PNM, QOI, JPEG 2000, and JPEG
# XL twice.
_BEGINNINGS: Final = (
    *(b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM", b"II*\0", b"MM\0*"),
    *(b"RIFF", b"P", b"qoif", b"\0\0\0\x0cjP", b"\xff\x0a", b"\0\0\0\x0cJXL"),
)


def find_unusable(spec: InputKeys) -> list[str]:
    """List which images would be skipped, one sentence for each reason and folder.

    Raises:
        OSError: A folder cannot be read.
    """
    sentences = []
    for dataset in datasets.datasets_of(spec):
        root, default = expand(dataset.path), datasets.fallback_caption(spec, dataset)
        if datasets.find_layout(root) != "folder":
            continue
        files = dataset_files.list_files(root)
        pictures, alone = samples_in(spec, dataset, files)
        noun = noun_of_references(spec, roles=dataset.roles)
        sentences += describe_missing(dataset, pictures, alone, noun)
        total = len(pictures)
        seen = pictures[:: -(-total // MOST) or 1]
        broken = sum(not _is_image(path) for path in seen)
        bare = 0
        if not files.metadata and spec.missing_captions == "skip" and not default:
            bare = sum(not _has_caption(path) for path in seen)
        for count, what in ((broken, "not readable"), (bare, "no caption")):
            if seen and count >= max(1, _REPORTED_SHARE * len(seen)):
                exact = f"{count} of {total} images"
                share = f"about {count / len(seen):.0%} of {total:,} images"
                which = exact if len(seen) == total else share
                sentences.append(f"{which} in {root}: {what}, will be skipped.")
    return sentences


def _is_image(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return head.startswith(_BEGINNINGS) or head[4:8] == b"ftyp"


def _has_caption(path: Path) -> bool:
    """Return whether a sample has a caption file with more in it than spaces."""
    files = (path.with_suffix(suffix) for suffix in dataset_files.CAPTION_SUFFIXES)
    return any(
        file.is_file() and (file.stat().st_size > _BLANK or file.read_bytes().strip())
        for file in files
    )


# -- data look ------------------------------------------------------------------------------
# Read a job's data in an engine process, before anything is queued.


@dataclass(frozen=True)
class DataLook:
    """The result of reading a job's data.

    Attributes:
        report: The fields of `engine.data.report.DataReport`, as JSON values.
        strips: A PNG for each bucket of the report with some of its samples in a row, cropped as
            for training. Empty if not requested.
    """

    report: dict[str, Any]
    strips: tuple[bytes, ...] = ()


def look_at_data(
    spec: JobSpec,
    progress: Progress = lambda done, total: None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    sheet: Path | None = None,
    strips: bool = False,
) -> DataLook:
    """Read every sample of a job. Takes minutes for a large dataset that is not cached.

    Args:
        spec: The job.
        progress: Called with the samples read and the total.
        cancelled: Polled many times a second, in the caller's thread.
        sheet: Where to write a contact sheet of all buckets, as PNG.
        strips: Whether to return some images of each bucket.

    Raises:
        UserError: The data location has nothing usable.
        ToolError: Reading failed for another reason.
        Cancelled: `cancelled` returned True.
    """
    spec, _ = datasets.with_folder_repeats(spec)
    check_dataset(spec)
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as name:
        job, folder = Path(name, "job.yaml"), Path(name, "strips")
        job.write_text(dump_spec(settle(spec)), encoding="utf-8")
        arguments = [str(job)]
        arguments += ["--sheet", str(sheet)] if sheet else []
        arguments += ["--strips", str(folder)] if strips else []

        def on_line(line: str) -> None:
            match line.split():
                case ["looked", done, total] if done.isdigit() and total.isdigit():
                    progress(int(done), int(total))

        report = ask("engine.data", arguments, Path(name, "answer"), on_line, cancelled)
        names = report.pop("strips", [])
        return DataLook(report, tuple((folder / strip).read_bytes() for strip in names))
