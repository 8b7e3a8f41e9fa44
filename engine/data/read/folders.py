"""List a folder's images and videos, each with its captions or the problem with it.

Captions come from a `.txt`, `.caption` or `.json` file of the same name; from the `metadata.jsonl`,
`metadata.csv` or `metadata.parquet` of the Hugging Face imagefolder layout, whose rows name files
relative to the metadata file; or from the `meta_cap.json` of kohya's scripts, which names files
with or without a suffix.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import shutil
import tarfile
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine.data.index.views import Place
from jobs.errors import DiskFullError, UserError
from jobs.paths import expand
from jobs.spec.values.dataset_files import (
    CAPTION_SUFFIXES,
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
    foreign_problem,
    list_files,
    same_name,
)
from jobs.spec.values.datasets import Dataset, Pairs
from jobs.untrusted.files import LARGEST_PICTURE, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


# -- sample weights -------------------------------------------------------------------------
# Read a sample's loss weight from a column of a metadata file or a table. Pure.


_MOST: Final = 1000.0  # same limit as the `loss_weight` of a dataset


def weight_in(record: Mapping[str, Any], dataset: Dataset, *, where: str) -> tuple[float, str]:
    """Return a row's weight, and the problem with it, if any.

    An empty cell means a weight of 1.

    Raises:
        UserError: The column that the dataset names does not exist.
    """
    column = dataset.loss_weight_column
    if column is None:
        return 1.0, ""
    if column not in record:
        raise UserError(f"{where} has no column {column}", f"it has {', '.join(record)}")
    value = record[column]
    if value is None or value == "":
        return 1.0, ""
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight <= _MOST:
        return 1.0, f"{column} is not a weight from 0 to {_MOST:g}"
    return weight, "" if weight else f"{column} is 0"


# -- folders --------------------------------------------------------------------------------


_T = TypeVar("_T")

CAPTION_COLUMNS: Final = ("text", "caption", "captions", "prompt")
FILE_COLUMN: Final = "file_name"
_ANY: Final = Dataset(path=".")  # a dataset without a caption_column
_LONGEST_FIELD: Final = 10_000_000  # characters of a CSV field; the module's limit is 131,072


@dataclass(frozen=True)
class Entry:
    """A candidate sample of a dataset.

    Attributes:
        name: Its name in messages: the path below the dataset's folder, or a row's number.
        path: The file, or the directory of the table for rows.
        captions: As written; None when there are none.
        problem: Why it cannot be used; "" if no problem is known yet.
        row: Its row, for tables.
        weight: Its loss weight, if a column has one.
        references: Its conditioning images.
    """

    name: str
    path: Path
    captions: tuple[str, ...] | None = None
    problem: str = ""
    row: int | None = None
    weight: float = 1.0
    references: tuple[Place, ...] = ()

    @property
    def is_video(self) -> bool:
        """Return whether it is a video file, judging by its name."""
        return self.row is None and self.path.suffix.lower() in VIDEO_SUFFIXES


@dataclass
class Source:
    """The contents of a dataset.

    Attributes:
        entries: Candidate samples in a fixed order.
        others: Number of files of each kind that are neither samples nor their captions.
    """

    entries: list[Entry]
    others: Counter[str] = field(default_factory=Counter)


def read_folder(dataset: Dataset, *, videos: bool) -> Source:
    """List the candidate samples of a folder. Opens caption files, but no images.

    Args:
        dataset: Its `path` is the folder.
        videos: Whether the model trains on videos.

    Raises:
        UserError: A metadata file cannot be read, or lacks a required column.
    """
    root = Path(dataset.path)
    files = list_files(root)
    rows: dict[str, tuple[str, ...]] = {}
    places: dict[str, str] = {}
    weights: dict[str, tuple[float, str]] = {}
    if dataset.loss_weight_column and not files.metadata:
        raise UserError(f"{root} has no metadata file with a column {dataset.loss_weight_column}")
    lost: list[Entry] = []
    for table in files.metadata:
        for place, record in records_of(table):
            name = f"{_shown(table, root)} {place}"
            if isinstance(record, str):
                lost.append(Entry(name, table, problem=record))
                continue
            # Do not resolve links: two links to one file may have different captions.
            file = same_name(os.path.normpath(table.parent / str(record.get(FILE_COLUMN) or "?")))
            places.setdefault(file, name)
            weights.setdefault(file, weight_in(record, dataset, where=str(table)))
            if captions := captions_in(record, dataset, where=str(table)):
                rows[file] = (*rows.get(file, ()), *captions)
    entries = []
    for path in sorted(files.pictures + files.videos):
        unfit = not videos and path.suffix.lower() in VIDEO_SUFFIXES
        problem = "a video, but the model trains on images" if unfit else ""
        captions, wrong = _captions_of(path, rows, files.renamed) if not problem else (None, "")
        weight, odd = _of_file(weights, path, (1.0, ""))
        problem = problem or wrong or odd
        entries.append(Entry(_shown(path, root), path, captions, problem, weight=weight))
    for path in files.foreign:
        entries.append(Entry(_shown(path, root), path, problem=foreign_problem(path)))
    entries += [Entry(_shown(p, root), p, problem="a folder") for p in files.folders]
    entries += [
        Entry(_shown(p, root), p, problem=f"an unreadable folder ({why})")
        for p, why in files.unreadable
    ]
    named = {same_name(os.path.normpath(entry.path)) for entry in entries}
    named |= {os.path.splitext(name)[0] for name in named}  # kohya's scripts omit the suffix
    for file, name in places.items():
        if file not in named:
            what = os.path.relpath(file, root)
            lost.append(Entry(name, root, problem=f"does not name an image here: {what}"))
    others = Counter(files.others)
    if files.lonely:
        others["captions without an image"] = len(files.lonely)
    return Source([*entries, *lost], others)


def _shown(path: Path, root: Path) -> str:
    """Return the path relative to a folder, printable even if the file name is not UTF-8."""
    name = os.fsencode(path.relative_to(root)).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def captions_in(
    record: Mapping[str, Any], dataset: Dataset, *, where: str
) -> tuple[str, ...] | None:
    """Return the captions of a row: a text, or a list of texts.

    Raises:
        UserError: The column that the dataset names does not exist.
    """
    if dataset.caption_column and dataset.caption_column not in record:
        raise UserError(
            f"{where} has no column {dataset.caption_column}", f"it has {', '.join(record)}"
        )
    columns = [dataset.caption_column] if dataset.caption_column else CAPTION_COLUMNS
    value = next((record[name] for name in columns if record.get(name)), None)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        return None
    # JSON may contain lone surrogates, which tokenizers reject.
    sound = [str(text).encode(errors="replace").decode() for text in texts if text]
    return tuple(text for text in sound if text.strip()) or None


def _captions_of(
    path: Path, rows: Mapping[str, tuple[str, ...]], renamed: Mapping[str, Path]
) -> tuple[tuple[str, ...] | None, str]:
    """Return a file's captions and the problem with them. Metadata files take priority."""
    if captions := _of_file(rows, path, ()):
        return captions, ""
    for suffix in CAPTION_SUFFIXES:
        sidecar = path.with_suffix(suffix)
        if not path.name.isascii():
            sidecar = renamed.get(same_name(sidecar), sidecar)
        try:
            content = read_regular(sidecar)
        except FileNotFoundError:
            continue
        except OSError as error:
            return None, f"caption cannot be read ({error.strerror})"
        try:
            text = content.decode(_encoding(content))
        except UnicodeDecodeError:
            return None, "caption is not UTF-8"
        if suffix == ".json":
            return _json_caption(text)
        return ((text,) if text.strip() else None), ""
    return None, ""


def _of_file(rows: Mapping[str, _T], path: Path, otherwise: _T) -> _T:
    """Look up a file in the rows of metadata files, by its name with or without a suffix."""
    if not rows:
        return otherwise
    name = same_name(os.path.normpath(path))
    return rows.get(name) or rows.get(os.path.splitext(name)[0]) or otherwise


def _json_caption(text: str) -> tuple[tuple[str, ...] | None, str]:
    """Read a caption from an image's `.json` file, as other trainers and taggers write it."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None, "caption is not valid JSON"
    if isinstance(record, str):
        record = {CAPTION_COLUMNS[0]: record}
    return (_record_captions(record) if isinstance(record, dict) else None), ""


def _record_captions(record: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the captions of a JSON object, or else its tags joined by commas."""
    if captions := captions_in(record, _ANY, where=""):
        return captions
    tags = record.get("tags")
    text = ", ".join(map(str, tags)) if isinstance(tags, list) else tags
    return (text,) if isinstance(text, str) and text.strip() else None


def _encoding(content: bytes) -> str:
    """Return UTF-8 unless a byte-order mark says UTF-16, which some Windows editors write."""
    return "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def records_of(table: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each row with its location, or with the problem found there."""
    if table.suffix == ".parquet":
        yield from _parquet_records(table)
        return
    try:
        text = table.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {table} ({error})") from None
    if table.suffix == ".csv":
        yield from _csv_records(table, text)
        return
    if table.suffix == ".json":
        yield from _kohya_records(table, text)
        return
    # Do not use `splitlines`, which also splits at separators that JSON and captions may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        yield f"line {number}", record if isinstance(record, dict) else "is not a JSON object"


def _parquet_records(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            f"{table} needs pyarrow, which is not installed", "pip install 'fsdp-tui[datasets]'"
        ) from None
    try:
        with ParquetFile(table) as file:
            names = file.schema_arrow.names
            if FILE_COLUMN not in names:
                raise UserError(
                    f"{table} has no column {FILE_COLUMN}", f"it has {', '.join(names)}"
                )
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", record
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot read {table} ({error})") from None


def _kohya_records(table: Path, text: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield entries by file path, or by bare file name if the data has moved since."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise UserError(f"cannot read {table} (it is not a JSON object)")
    for name, record in entries.items():
        if not isinstance(record, dict):
            yield f"entry {name}", "is not a JSON object"
            continue
        here = os.path.normpath(table.parent / name)
        inside = here.startswith(f"{os.path.normpath(table.parent)}{os.sep}")
        file = name if inside else Path(name).name
        captions = _record_captions(record)
        yield f"entry {name}", {FILE_COLUMN: file, CAPTION_COLUMNS[0]: captions}


def _csv_records(table: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if FILE_COLUMN not in (reader.fieldnames or ()):
        raise UserError(
            f"{table} has no column {FILE_COLUMN}",
            f"its first line is {', '.join(reader.fieldnames or ['empty'])}",
        )
    try:
        for record in reader:
            yield f"line {reader.line_num}", {str(key): value for key, value in record.items()}
    except csv.Error as error:
        raise UserError(f"{table} line {reader.line_num} cannot be read ({error})") from None


# -- archives -------------------------------------------------------------------------------
# WebDataset archives: tar files with images and captions of equal names, unpacked once.
#
# Each archive is unpacked sequentially into a cache folder that is either complete or absent, and
# is then read like any other folder.


# Limit on the unpacked size relative to the archive: images do not compress, text about tenfold.
_LARGEST_RATIO: Final = 100
_ALLOWANCE: Final = 1 << 30  # bytes that any archive may unpack to
_WANTED: Final = PICTURE_SUFFIXES | VIDEO_SUFFIXES | {name.lower() for name in CAPTION_SUFFIXES}


def read_archives(dataset: Dataset, cache: Path, *, videos: bool) -> Source:
    """List the contents of a dataset's archives, unpacking new ones first.

    Args:
        dataset: Its `path` is a folder of tar files.
        cache: The directory to unpack them in.
        videos: Whether the model trains on videos.

    Raises:
        DiskFullError: The cache directory has no space left.
        UserError: A metadata file in an archive cannot be read.
    """
    root = Path(dataset.path)
    entries: list[Entry] = []
    others: Counter[str] = Counter()
    for archive in sorted(root.rglob("*.tar")):
        name = str(archive.relative_to(root))
        try:
            folder = _unpacked(archive, cache / "webdataset")
        except (tarfile.TarError, EOFError) as error:
            entries.append(Entry(name, archive, problem=f"a damaged archive ({error})"))
            continue
        except OSError as error:
            if error.filename and str(error.filename).startswith(str(cache)):
                raise DiskFullError(
                    f"cannot unpack {archive} into {cache} ({error.strerror})",
                    "free space, or set cache_dir to another directory",
                ) from None
            why = error.strerror or error
            entries.append(Entry(name, archive, problem=f"cannot be read ({why})"))
            continue
        source = read_folder(dataset.model_copy(update={"path": str(folder)}), videos=videos)
        entries += [replace(entry, name=f"{name}/{entry.name}") for entry in source.entries]
        others += source.others
    return Source(entries, others)


def _unpacked(archive: Path, cache: Path) -> Path:
    """Return the folder with an archive's files; a changed archive gets a new folder."""
    status = archive.stat()
    facts = f"{archive.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    folder = cache / hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()[:24]
    if folder.is_dir():
        return folder
    aside = cache / f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        aside.mkdir(parents=True)
        left = _ALLOWANCE + _LARGEST_RATIO * status.st_size
        with tarfile.open(archive, "r|*") as stream:  # sequential, which slow disks handle best
            for member in stream:
                left -= member.size
                if left < 0:  # such a compression ratio would take hours to read or skip
                    ratio = f"{_LARGEST_RATIO} times its own size"
                    raise tarfile.ReadError(f"its files take more than {ratio}")
                place = _place(member)
                if place is not None and (content := stream.extractfile(member)) is not None:
                    target = aside / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with content, open(target, "wb") as file:
                        shutil.copyfileobj(content, file)
        try:
            os.rename(aside, folder)
        except OSError:  # another job unpacked it first
            if not folder.is_dir():
                raise
        return folder
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _place(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Return a member's path below the folder, or None if it is no sample or would be outside."""
    path = PurePosixPath(member.name)
    parts = [part for part in path.parts if part != "."]
    if not member.isfile() or member.size > LARGEST_PICTURE or path.is_absolute():
        return None
    if ".." in parts or path.suffix.lower() not in _WANTED:
        return None
    return PurePosixPath(*parts)


# -- pairs ----------------------------------------------------------------------------------
# Find the conditioning images of a dataset's entries, or report a missing one.


def pair(source: Source, dataset: Dataset, noun: str) -> Source:
    """Add each entry's conditioning images to a source.

    An entry without one is marked with a problem.

    Args:
        source: The dataset's contents; for folders, this includes the conditioning images.
        dataset: Names the location of the conditioning images.
        noun: What one of them is called in messages.

    Raises:
        UserError: A column that the dataset names does not exist.
    """
    if not dataset.references:
        return source
    if dataset.conditioning_column:
        files = _named_files(dataset)
        named = [path for row in files.values() for path in row if path]
        sidecar = {same_name(os.path.normpath(path)) for path in named}
        entries = [
            _of_columns(entry, dataset, files, noun)
            for entry in source.entries
            if (name := same_name(os.path.normpath(entry.path))) in files or name not in sidecar
        ]
        return replace(source, entries=entries)
    pairs = Pairs(dataset, [entry.path for entry in source.entries if not entry.problem])
    entries = [
        entry
        for entry in source.entries
        if not entry.path.is_relative_to(expand(dataset.path)) or pairs.is_sample(entry.path)
    ]
    return replace(source, entries=[_of_names(entry, pairs, noun) for entry in entries])


def _of_names(entry: Entry, pairs: Pairs, noun: str) -> Entry:
    if entry.problem:
        return entry
    paths = pairs.existing_paths(entry.path)
    for path, expected in zip(paths, pairs.expected_paths(entry.path), strict=True):
        if path is None:
            return replace(entry, problem=f"no {noun}: {expected} does not exist")
    return replace(entry, references=tuple(Place(str(path)) for path in paths))


def _of_columns(
    entry: Entry, dataset: Dataset, files: dict[str, list[Path | None]], noun: str
) -> Entry:
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
            return replace(entry, problem=f"no {noun}: {what}")
    return replace(entry, references=tuple(Place(str(path)) for path in paths))


def _named_files(dataset: Dataset) -> dict[str, list[Path | None]]:
    """Map each sample to the conditioning images named by a folder's metadata files."""
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
