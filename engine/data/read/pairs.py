"""Find the conditioning images of a dataset's entries, or report that one is missing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.index.references import Place
from engine.data.read.folders import FILE_COLUMN, records_of
from jobs.errors import UserError
from jobs.paths import expand
from jobs.spec.values.dataset_files import list_files, same_name
from jobs.spec.values.pairs import Pairs

if TYPE_CHECKING:
    from engine.data.read.folders import Entry, Source
    from jobs.spec.values.datasets import Dataset

_MISSING = "no conditioning image"


def pair(source: Source, dataset: Dataset) -> Source:
    """Add each entry's conditioning images to a source.

    An entry without one gets a problem.

    Args:
        source: What the dataset offers; in a folder, its conditioning images too.
        dataset: Where they are.

    Raises:
        UserError: A column that the dataset names is not there.
    """
    if not dataset.references:
        return source
    if dataset.conditioning_column:
        files = _named_files(dataset)
        named = [path for row in files.values() for path in row if path]
        beside = {same_name(os.path.normpath(path)) for path in named}
        entries = [
            _of_columns(entry, dataset, files)
            for entry in source.entries
            if (name := same_name(os.path.normpath(entry.path))) in files or name not in beside
        ]
        return replace(source, entries=entries)
    pictures = [entry.path for entry in source.entries if not entry.problem and not entry.is_video]
    pairs = Pairs(dataset, pictures)
    entries = [
        entry
        for entry in source.entries
        if not entry.path.is_relative_to(expand(dataset.path)) or pairs.is_sample(entry.path)
    ]
    return replace(source, entries=[_of_names(entry, pairs) for entry in entries])


def _of_names(entry: Entry, pairs: Pairs) -> Entry:
    if entry.problem:
        return entry
    paths = pairs.existing_paths(entry.path)
    for path, expected in zip(paths, pairs.expected_paths(entry.path), strict=True):
        if path is None:
            return replace(entry, problem=f"{_MISSING}: {expected} does not exist")
    return replace(entry, references=tuple(Place(str(path)) for path in paths))


def _of_columns(entry: Entry, dataset: Dataset, files: dict[str, list[Path | None]]) -> Entry:
    columns = dataset.conditioning_column or []
    if entry.problem:
        return entry
    if entry.row is not None:
        return replace(
            entry, references=tuple(Place(str(entry.path), column) for column in columns)
        )
    paths = files.get(same_name(os.path.normpath(entry.path)), [None] * len(columns))
    for path, column in zip(paths, columns, strict=True):
        if path is None or not path.is_file():
            what = f"{path} does not exist" if path else f"column {column} is empty"
            return replace(entry, problem=f"{_MISSING}: {what}")
    return replace(entry, references=tuple(Place(str(path)) for path in paths))


def _named_files(dataset: Dataset) -> dict[str, list[Path | None]]:
    """Sample → its conditioning images, as a folder's metadata files name them."""
    named: dict[str, list[Path | None]] = {}
    columns = dataset.conditioning_column or []
    for table in list_files(Path(dataset.path)).metadata:
        for _, record in records_of(table):
            if isinstance(record, str):
                continue
            if lost := next((name for name in columns if name not in record), None):
                raise UserError(f"{table} has no column {lost}", f"it has {', '.join(record)}")
            file = same_name(os.path.normpath(table.parent / str(record.get(FILE_COLUMN) or "?")))
            cells = [str(record[name] or "") for name in columns]
            named[file] = [table.parent / cell if cell else None for cell in cells]
    return named
