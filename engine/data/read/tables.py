"""Read datasets of the `datasets` library: `save_to_disk` output and the hub's parquet files.

Rows of Arrow files are read in place. Parquet cannot read one row without decoding the thousands
around it, so a split of parquet files is copied once to an Arrow file in the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.data.read.folders import CAPTION_COLUMNS, Entry, Source, captions_in, weight_in
from engine.data.read.memo import stamp_of
from jobs.errors import UserError
from jobs.paths import cache_home
from jobs.spec.values.datasets import Dataset, find_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_IMAGE_COLUMNS: Final = ("image", "img", "jpg", "png", "webp")
_TRAIN: Final = "train"
_SPLIT_WORDS: Final = (
    f"{_TRAIN} training validation valid val dev test testing eval evaluation".split()
)
_SHARD: Final = re.compile(r"(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
# The hub's own conversion of a large dataset uses folders called `partial-train`.
_FOLDER: Final = re.compile(rf"(?:partial-)?(?P<split>{'|'.join(_SPLIT_WORDS)})", re.IGNORECASE)
_FILE: Final = re.compile(rf"(?P<split>{'|'.join(_SPLIT_WORDS)})(?![a-z])", re.IGNORECASE)
_ROWS_COPIED: Final = 32  # at a time; a row may hold tens of megabytes
_CAPTIONS_READ: Final = 1000  # rows at a time


class RowError(Exception):
    """The problem with one row, in a few words."""


class Table:
    """Rows with an image each, read from disk on request, by any number of threads.

    Attributes:
        root: Its directory.
        others: Number of unused rows of each kind.
        stamp: Changes when one of its files does; empty if one is too new to be trusted.
    """

    def __init__(self, path: str, split: str | None, image_column: str | None) -> None:
        self.root = Path(path)
        opened = _open(self.root, split)
        self.others = opened.others
        # Read rows as Arrow tables; as Python objects, every image would be decoded. These reads do
        # not modify the dataset, and each creates its own formatter, so threads may share it.
        self._rows = opened.rows.with_format("arrow")
        self._column = self._find_column(image_column)
        self._pictures = self._rows.select_columns([self._column])
        # A row's number stays valid while the files and the column are the same.
        self.stamp = opened.stamp and f"{opened.stamp}:{self._column}"

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> list[str]:
        """Return the names of all columns."""
        return list(self._rows.column_names)

    def records(self, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield these columns of every row, in order; missing columns are skipped."""
        there = [name for name in columns if name in self.columns() and name != self._column]
        if not there:
            yield from ({} for _ in range(len(self)))
            return
        for batch in self._rows.select_columns(there).iter(batch_size=_CAPTIONS_READ):
            yield from batch.to_pylist()

    def content(self, row: int) -> bytes:
        """Return the file content of a row's image.

        Raises:
            RowError: The row has no image.
            OSError: The row names a file that cannot be read.
        """
        cell = self._cell(row).as_py()
        if isinstance(cell, dict) and cell.get("bytes") is not None:
            cell = cell["bytes"]
        if isinstance(cell, bytes):
            return cell
        path = self._path(cell)
        if path is None:
            raise RowError("no image in this row")
        return path.read_bytes()

    def stamp_of(self, row: int) -> str:
        """Return a stamp that changes when a row's image may have changed.

        It is empty if the file is too new to be trusted.

        Raises:
            OSError: The row names a file that does not exist.
        """
        cell = self._cell(row)
        if not cell.is_valid or not hasattr(cell, "keys"):
            return self.stamp
        # Arrow can tell whether there are bytes without reading them; a Python object would read
        # them.
        if "bytes" in cell and cell["bytes"].is_valid:
            return self.stamp
        path = self._path(cell.as_py())
        if path is None:
            return self.stamp
        stamp = stamp_of(path)
        return f"{self.stamp}:{stamp}" if self.stamp and stamp else ""

    def _cell(self, row: int) -> Any:
        return self._pictures[row].column(0)[0]

    def _path(self, cell: Any) -> Path | None:
        """Return the file that a cell names, or None."""
        name = cell.get("path") if isinstance(cell, dict) else None
        return self.root / name if isinstance(name, str) and name else None

    def _find_column(self, requested: str | None) -> str:
        from datasets import Image

        names = self.columns()
        if requested and requested not in names:
            raise UserError(f"{self.root} has no column {requested}", f"it has {', '.join(names)}")
        pictures = [n for n, kind in self._rows.features.items() if isinstance(kind, Image)]
        usual = [name for name in _IMAGE_COLUMNS if name in names]
        column = requested or next(iter(pictures + usual), None)
        if column is None:
            raise UserError(f"{self.root} has no image column", f"it has {', '.join(names)}")
        return column


_opening = threading.Lock()
_tables: dict[tuple[str, str | None, str | None], Table] = {}


def open_table(path: str, split: str | None, image_column: str | None) -> Table:
    """Return the table in a directory, opened once per process.

    Raises:
        UserError: The library is missing, the directory is damaged or has no such split or column,
            or the cache has no space for a copy.
    """
    key = (path, split, image_column)
    with _opening:
        if key not in _tables:
            _tables[key] = Table(*key)
        return _tables[key]


def table_of(dataset: Dataset, column: str | None = None) -> Table:
    """Open the dataset's table, or another column of it; raises like `open_table`."""
    return open_table(dataset.path, dataset.split, column or dataset.image_column)


def read_table(dataset: Dataset) -> Source:
    """Return the rows of a table.

    Raises:
        UserError: As in `open_table`, or the caption column does not exist.
    """
    table, named = table_of(dataset), dataset.caption_column
    if named and named not in table.columns():
        captions_in(dict.fromkeys(table.columns()), dataset, where=dataset.path)  # raises
    root, columns = Path(dataset.path), (named,) if named else CAPTION_COLUMNS
    weighted = dataset.loss_weight_column
    if weighted and weighted not in table.columns():
        weight_in(dict.fromkeys(table.columns()), dataset, where=dataset.path)  # raises
    entries = []
    for row, record in enumerate(table.records([*columns, *filter(None, [weighted])])):
        captions = captions_in(record, dataset, where=dataset.path)
        weight, problem = weight_in(record, dataset, where=dataset.path)
        entries.append(Entry(f"row {row}", root, captions, problem, row, weight))
    return Source(entries, Counter(table.others))


@dataclass(frozen=True)
class _Opened:
    """The rows of a split.

    Attributes:
        rows: A `datasets.Dataset`.
        stamp: Stamp of their files, taken before reading them.
        others: Number of unused rows of each kind.
    """

    rows: Any
    stamp: str
    others: Counter[str]


def _open(root: Path, split: str | None) -> _Opened:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{root} needs the datasets library", "pip install 'fsdp-tui[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    try:
        return (_open_arrow if find_layout(root) == "arrow" else _open_parquet)(root, split)
    except UserError:
        raise
    except Exception as error:  # its readers raise many exceptions for a damaged directory
        raise _unreadable(root, error) from error


def _open_arrow(root: Path, split: str | None) -> _Opened:
    import datasets

    stamp = _stamp([path for path in root.rglob("*") if path.suffix in (".arrow", ".json")])
    loaded = datasets.load_from_disk(str(root), keep_in_memory=False)
    if not isinstance(loaded, dict):
        if split not in (None, _TRAIN):
            raise UserError(f"{root} has no splits, but split {split} is set")
        return _Opened(loaded, stamp, Counter())
    name = _choose(root, list(loaded), split)
    # A job that names a split already knows about the others, so do not report them.
    left = [] if split else [other for other in loaded if other != name]
    others = Counter({f"rows of the split {other}": len(loaded[other]) for other in left})
    return _Opened(loaded[name], stamp, others)


def _open_parquet(root: Path, split: str | None) -> _Opened:
    import datasets

    files = split_files(root)
    loose = files.pop("", [])
    if loose and _TRAIN not in files:
        files[_TRAIN], loose = loose, []
    name = _choose(root, list(files), split)
    others: Counter[str] = Counter()
    for other, paths in files.items():
        if other != name and not split:
            _count(paths, f"the split {other}", others)
    _count(loose, "files of no split", others)
    stamp = _stamp(files[name])
    copy = _copy(root, name, files[name])
    return _Opened(datasets.Dataset.from_file(str(copy)), stamp, others)


def split_files(root: Path) -> dict[str, list[Path]]:
    """Return the parquet files below a directory by split, "" for none.

    A split is named by a file (`train-00000-of-00002.parquet`, `test.parquet`) or by its folder
    (`default/train/0000.parquet`). Other names (`0000.parquet`, `cats.parquet`) belong to no split.
    """
    files: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.parquet")):
        folders = reversed(path.relative_to(root).parts[:-1])
        match = (
            _SHARD.fullmatch(path.stem)
            or next(filter(None, map(_FOLDER.fullmatch, folders)), None)
            or _FILE.match(path.stem)
        )
        split = match["split"] if match else ""
        usual = split.lower() in _SPLIT_WORDS
        files.setdefault(split.lower() if usual else split, []).append(path)
    return files


def _choose(root: Path, names: list[str], split: str | None) -> str:
    """Return the split to train on."""
    if split is None:
        if _TRAIN not in names and len(names) > 1:
            raise UserError(
                f"{root} has several splits but no {_TRAIN}",
                f"set split to one of {', '.join(names)}",
            )
        return _TRAIN if _TRAIN in names else names[0]
    if split not in names:
        raise UserError(f"{root} has no split {split}", f"it has {', '.join(names)}")
    return split


def _count(paths: list[Path], what: str, others: Counter[str]) -> None:
    """Count the rows of unused files. Damage in them does not matter."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths:
        try:
            others[f"rows of {what}"] += pq.read_metadata(path).num_rows
        except (OSError, pa.ArrowException):
            others[f"damaged parquet files of {what}"] += 1


def _copy(root: Path, split: str, files: list[Path]) -> Path:
    """Return the Arrow copy of parquet files' rows, and write it if it does not exist yet.

    Raises:
        UserError: The cache is full or not writable, or the files have different columns.
    """
    place = cache_home() / "tables"
    name = hashlib.sha256(os.fsencode(f"{root.absolute()}:{split}")).hexdigest()[:24]
    copy = place / f"{name}-{_identity(files)}.arrow"
    try:
        if copy.is_file():
            return copy
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Other processes that need the same copy wait here.
        with (place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.is_file():
                needed = sum(path.stat().st_size for path in files)
                if (free := shutil.disk_usage(place).free) < needed:
                    room = f"it needs {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
                    raise _no_copy(place, root, room)
                _write(copy, place / f"{name}.part", _batches(root, files))
                for old in place.glob(f"{name}-*.arrow"):
                    if old != copy:
                        old.unlink(missing_ok=True)
    except OSError as error:
        raise _no_copy(place, root, error.strerror or str(error)) from error
    return copy


def _write(copy: Path, part: Path, batches: Iterator[Any]) -> None:
    """Write the copy. An `OSError` is always about the destination."""
    import pyarrow as pa

    schema = next(batches).schema
    try:
        with part.open("wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch in batches:
                    writer.write_table(batch)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, copy)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _batches(root: Path, files: list[Path]) -> Iterator[Any]:
    """Yield an empty table with the columns of all files, then their rows in batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schemas = [pq.read_schema(path) for path in files]
        for path, schema in zip(files, schemas, strict=True):
            if set(schema.names) != set(schemas[0].names):
                raise UserError(
                    f"{path} has different columns than {files[0]}",
                    f"{', '.join(schema.names)} instead of {', '.join(schemas[0].names)}",
                )
        # A column that is empty in one file has no type there.
        common = pa.unify_schemas(schemas, promote_options="permissive")
        yield common.empty_table()
        for path in files:
            # Buffer reads: otherwise a row group, possibly the entire file, is in memory at once.
            with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=_ROWS_COPIED):
                    table = pa.Table.from_batches([batch]).select(common.names)
                    yield table.cast(common)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(root, error) from error


def _unreadable(root: Path, error: Exception) -> UserError:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"the dataset {root} cannot be read ({text[0]})")


def _no_copy(place: Path, root: Path, why: str) -> UserError:
    return UserError(
        f"cannot write a copy of {root} to {place} ({why})",
        "free space, or set XDG_CACHE_HOME to a larger disk",
    )


def _identity(files: list[Path]) -> str:
    """Return a stamp that changes with the files, even if they are new."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        times = f"{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
        digest.update(os.fsencode(f"{path}:{status.st_size}:{times}\n"))
    return digest.hexdigest()[:16]


def _stamp(files: list[Path]) -> str:
    """Return a stamp that changes with the files; empty if one is too new to be trusted."""
    digest = hashlib.sha256()
    for path in sorted(files):
        stamp = stamp_of(path)
        if not stamp:
            return ""
        digest.update(os.fsencode(f"\n{path}:{stamp}"))
    return digest.hexdigest()[:16]
