"""What can be known to be wrong with conditioning images before a job is queued: by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.errors import SpecError
from jobs.paths import exists, expand
from jobs.spec.keys.prompts import requests_of
from jobs.spec.values.dataset_files import list_files, without_masks
from jobs.spec.values.datasets import datasets_of
from jobs.spec.values.pairs import Pairs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.spec.job_spec import DataPlanKeys, InputKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.dataset_files import Listing
    from jobs.spec.values.datasets import Dataset, Layout


def check_prompt_images(spec: DataPlanKeys) -> None:
    """Refuse samples whose conditioning image is not there.

    Raises:
        SpecError: It is not.
    """
    for request in requests_of(spec):
        for path in request.conditioning:
            if not expand(path).is_file():
                raise SpecError(f"validation_prompts: no such conditioning image: {path}")


def check_places(dataset: Dataset, layout: Layout, *, metadata: bool) -> None:
    """Refuse places where this kind of dataset can have no conditioning images.

    Raises:
        SpecError: Names the key.
    """
    for path in dataset.conditioning_path or ():
        if not exists(expand(path)) or not expand(path).is_dir():
            raise SpecError(f"conditioning_path: no such folder: {path}")
    if not dataset.references:
        return
    if layout == "webdataset":
        raise SpecError(
            f"{dataset.path} holds tar files, whose conditioning images cannot be read",
            "unpack them into a folder",
        )
    if layout != "folder" and not dataset.conditioning_column:
        raise SpecError(
            f"{dataset.path} is a table, so its conditioning images are in columns",
            "set conditioning_column",
        )
    if layout == "folder" and dataset.conditioning_column and not metadata:
        raise SpecError(
            f"conditioning_column: {dataset.path} has no metadata.jsonl, metadata.csv or "
            "metadata.parquet",
            "set conditioning_path or conditioning_suffix",
        )


def split_samples(dataset: Dataset, paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return a folder's samples without its conditioning images, and those that lack theirs.

    Raises:
        SpecError: None of them has one.
        OSError: A folder cannot be read.
    """
    if not dataset.references or dataset.conditioning_column:
        return paths, []
    pairs = Pairs(dataset, paths)
    samples = [path for path in paths if pairs.is_sample(path)]
    alone = [path for path in samples if None in pairs.existing_paths(path)]
    if samples and len(alone) == len(samples):
        raise SpecError(
            f"none of the {len(samples)} images in {dataset.path} has a conditioning image",
            f"for {samples[0].name}, it would be {pairs.expected_paths(samples[0])[0]}",
        )
    return samples, alone


def missing_partners(spec: InputKeys) -> list[str]:
    """List what lacks a conditioning image in a job's folders, a sentence each."""
    folders = [
        dataset
        for dataset in datasets_of(spec)
        if dataset.references and not dataset.conditioning_column
    ]
    return [
        line
        for dataset in folders
        for line in tell_missing(
            dataset, *samples_in(spec, dataset, list_files(expand(dataset.path)))
        )
    ]


def samples_in(spec: DataKeys, dataset: Dataset, files: Listing) -> tuple[list[Path], list[Path]]:
    """Return a folder's images without masks and conditioning images, and those lacking theirs."""
    pictures = files.pictures
    if spec.masked_loss == "file":
        masks = expand(dataset.mask_path) if dataset.mask_path else None
        pictures = without_masks(pictures, masks)
    try:
        return split_samples(dataset, pictures)
    except (SpecError, OSError):  # said elsewhere
        return pictures, []


def tell_missing(dataset: Dataset, samples: Sequence[Path], alone: Sequence[Path]) -> list[str]:
    """Return a sentence on the samples that lack a conditioning image, if any do."""
    if not alone:
        return []
    names = ", ".join(path.name for path in alone[:3]) + (", …" if len(alone) > 3 else "")
    return [
        f"{len(alone)} of {len(samples)} images in {dataset.path}: no conditioning image "
        f"({names}), will be skipped."
    ]
