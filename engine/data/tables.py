"""Datasets of the `datasets` library: what `save_to_disk` writes, and the hub's parquet files."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.data.sources import Entry, Source, captions_in
from jobs.datasets import Dataset, find_layout
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

_IMAGE_COLUMNS: Final = ("image", "img", "jpg", "png", "webp")


class Table:
    """Rows with a picture each, read from disk as they are asked for."""

    def __init__(self, path: str, split: str | None, image_column: str | None) -> None:
        self.root = Path(path)
        self._rows = _open(self.root, split)
        self._column = self._find_column(image_column)
        # The numbers of a table's rows mean what they mean as long as its files are the same.
        self.stamp = _stamp(self.root)

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> list[str]:
        """Names of all columns."""
        return list(self._rows.column_names)

    def record(self, row: int) -> Mapping[str, Any]:
        """A row without its picture."""
        return self._captions()[row]

    def content(self, row: int) -> bytes:
        """The file of a row's picture."""
        cell = self._rows[row][self._column]
        if not isinstance(cell, dict):
            raise UserError(f"{self.root}: row {row} holds no picture in {self._column}")
        if cell.get("bytes") is not None:
            return bytes(cell["bytes"])
        path = Path(cell.get("path") or "")
        return (path if path.is_absolute() else self.root / path).read_bytes()

    @lru_cache(maxsize=1)  # noqa: B019 - tables live as long as the process
    def _captions(self) -> Any:
        return self._rows.remove_columns([self._column])

    def _find_column(self, wanted: str | None) -> str:
        from datasets import Image

        names = self.columns()
        if wanted and wanted not in names:
            raise UserError(f"{self.root} has no column {wanted}", f"it has {', '.join(names)}")
        pictures = [n for n, kind in self._rows.features.items() if isinstance(kind, Image)]
        known = [name for name in _IMAGE_COLUMNS if name in names]
        column = wanted or next(iter(pictures + known), None)
        if column is None:
            raise UserError(f"{self.root} has no column of pictures", f"it has {', '.join(names)}")
        if isinstance(self._rows.features[column], Image):
            self._rows = self._rows.cast_column(column, Image(decode=False))
        return column


@lru_cache(maxsize=16)
def open_table(path: str, split: str | None, image_column: str | None) -> Table:
    """The table in a directory; opened once in a process.

    Raises:
        UserError: The library is missing, or the directory is damaged or has no such split or
            column.
    """
    return Table(path, split, image_column)


def table_of(dataset: Dataset) -> Table:
    """The dataset's table; raises as `open_table` does."""
    return open_table(dataset.path, dataset.split, dataset.image_column)


def read_table(dataset: Dataset) -> Source:
    """The rows of a table.

    Raises:
        UserError: As `open_table`, or the caption column is not there.
    """
    table = table_of(dataset)
    root = Path(dataset.path)
    entries = []
    for row in range(len(table)):
        captions = captions_in(table.record(row), dataset, where=dataset.path)
        entries.append(Entry(f"row {row}", root, captions, row=row))
    return Source(entries)


def _open(root: Path, split: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{root} needs the datasets library", "pip install 'fsdp-tui[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    try:
        if find_layout(root) == "arrow":
            found = datasets.load_from_disk(str(root))
        else:
            found = _read_parquet(root)
    except Exception as error:  # whatever its many readers raise about a damaged directory
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the dataset {root} cannot be read ({text[0]})") from error
    if not isinstance(found, dict):
        if split not in (None, "train"):
            raise UserError(f"{root} has no splits, and split {split} was asked for")
        return found
    name = split or ("train" if "train" in found else next(iter(found)))
    if name not in found:
        raise UserError(f"{root} has no split {name}", f"it has {', '.join(found)}")
    return found[name]


def _read_parquet(root: Path) -> Any:
    """The parquet files, by split: `data/train-00000-of-00002.parquet` is of the split `train`."""
    import datasets

    files: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.parquet")):
        files.setdefault(path.stem.partition("-")[0], []).append(str(path))
    return datasets.DatasetDict({
        name: datasets.Dataset.from_parquet(paths, split=name) for name, paths in files.items()
    })  # fmt: skip


def _stamp(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(os.fsencode(f"{path}:{status.st_size}:{status.st_mtime_ns}"))
    return digest.hexdigest()[:16]
