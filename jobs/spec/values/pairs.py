"""Which files are the conditioning images of which samples, by their names alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jobs.paths import expand
from jobs.spec.values.dataset_files import list_files, same_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.spec.values.datasets import Dataset


class Pairs:
    """The conditioning images of a folder's samples, with `conditioning_path` or `_suffix`.

    Args:
        dataset: A folder.
        pictures: The images in it.

    Raises:
        OSError: A folder cannot be read.
    """

    def __init__(self, dataset: Dataset, pictures: Sequence[Path]) -> None:
        self._root = expand(dataset.path)
        self._folders = [expand(path) for path in dataset.conditioning_path or ()]
        self._suffixes = dataset.conditioning_suffix or []
        self._beside = [_by_stem(folder, list_files(folder).pictures) for folder in self._folders]
        self._own = _by_stem(self._root, pictures) if self._suffixes else {}

    def expected_paths(self, sample: Path) -> list[Path]:
        """Where its conditioning images should be, as a person would look for them."""
        inside = sample.relative_to(self._root)
        apart = [folder / inside for folder in self._folders]
        together = [
            sample.with_name(sample.stem + suffix + sample.suffix) for suffix in self._suffixes
        ]
        return apart or together

    def existing_paths(self, sample: Path) -> list[Path | None]:
        """Its conditioning images, whatever their file type; None for each that is missing."""
        stem = _stem(sample, self._root)
        if self._folders:
            return [paths.get(stem) for paths in self._beside]
        return [self._own.get(stem + same_name(suffix)) for suffix in self._suffixes]

    def is_sample(self, path: Path) -> bool:
        """Whether a file of the folder is no conditioning image of another."""
        if any(path.is_relative_to(folder) for folder in self._folders):
            return self._root in self._folders  # a folder that is its own
        stem = _stem(path, self._root)
        return not any(
            stem.endswith(suffix) and stem.removesuffix(suffix) in self._own
            for suffix in map(same_name, self._suffixes)
        )


def _by_stem(root: Path, pictures: Sequence[Path]) -> dict[str, Path]:
    """Return the first file of each name."""
    by_stem: dict[str, Path] = {}
    for path in pictures:
        by_stem.setdefault(_stem(path, root), path)
    return by_stem


def _stem(path: Path, root: Path) -> str:
    return same_name(os.path.splitext(path.relative_to(root))[0])
