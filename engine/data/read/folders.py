"""What a folder offers: its images and videos, each with its captions or what is wrong with it.

Captions stand in a `.txt`, `.caption` or `.json` of the same name; in the `metadata.jsonl`,
`metadata.csv` or `metadata.parquet` of the Hugging Face imagefolder layout, whose rows name files
relative to where they stand; or in the `meta_cap.json` of kohya's scripts, which names files with
or without a suffix.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine.data.read.sample_weights import weight_in
from jobs.errors import UserError
from jobs.spec.values.dataset_files import (
    CAPTION_SUFFIXES,
    VIDEO_SUFFIXES,
    foreign_problem,
    list_files,
    same_name,
)
from jobs.spec.values.datasets import Dataset
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine.data.index.references import Place

_T = TypeVar("_T")

CAPTION_COLUMNS: Final = ("text", "caption", "captions", "prompt")
FILE_COLUMN: Final = "file_name"
_ANY: Final = Dataset(path=".")  # of no caption_column
_LONGEST_FIELD: Final = 10_000_000  # characters of a CSV field; the module's limit is 131,072


@dataclass(frozen=True)
class Entry:
    """Something that a dataset offers to train on.

    Attributes:
        name: What people know it by: the path below the dataset's folder, or a row's number.
        path: The file; of a row, the directory of its table.
        captions: As written; None when there are none.
        problem: Why it cannot be used, "" if nothing is known against it yet.
        row: Its row, for tables.
        weight: Of its loss, where a column has one.
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
        """Whether it is a video file, by its name."""
        return self.row is None and self.path.suffix.lower() in VIDEO_SUFFIXES


@dataclass
class Source:
    """The contents of a dataset.

    Attributes:
        entries: In a fixed order.
        others: What kind of file → how many are neither samples nor their captions.
    """

    entries: list[Entry]
    others: Counter[str] = field(default_factory=Counter)


def read_folder(dataset: Dataset, *, videos: bool) -> Source:
    """Look for samples in a folder; opens caption files, but no images.

    Args:
        dataset: Its `path` is the folder.
        videos: Whether the model trains on videos.

    Raises:
        UserError: A metadata file cannot be read, or lacks a column it needs.
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
            # Not resolved: two links to one file may have different captions.
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
    named |= {os.path.splitext(name)[0] for name in named}  # as kohya's scripts name them
    for file, name in places.items():
        if file not in named:
            what = os.path.relpath(file, root)
            lost.append(Entry(name, root, problem=f"does not name an image here: {what}"))
    others = Counter(files.others)
    if files.lonely:
        others["captions without an image"] = len(files.lonely)
    return Source([*entries, *lost], others)


def _shown(path: Path, root: Path) -> str:
    """Return the path below a folder, printable: file names need not be UTF-8."""
    name = os.fsencode(path.relative_to(root)).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def captions_in(
    record: Mapping[str, Any], dataset: Dataset, *, where: str
) -> tuple[str, ...] | None:
    """Return the captions of a row: a text, or a list of texts.

    Raises:
        UserError: The column that the dataset names is not there.
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
    # JSON may hold halves of surrogate pairs, which no tokenizer takes.
    sound = [str(text).encode(errors="replace").decode() for text in texts if text]
    return tuple(text for text in sound if text.strip()) or None


def _captions_of(
    path: Path, rows: Mapping[str, tuple[str, ...]], renamed: Mapping[str, Path]
) -> tuple[tuple[str, ...] | None, str]:
    """Return a file's captions, and the problem with them; a row of a metadata file comes first."""
    if captions := _of_file(rows, path, ()):
        return captions, ""
    for suffix in CAPTION_SUFFIXES:
        beside = path.with_suffix(suffix)
        if not path.name.isascii():
            beside = renamed.get(same_name(beside), beside)
        try:
            content = read_regular(beside)
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
    """Return a file's entry in metadata files, by its name with or without a suffix."""
    if not rows:
        return otherwise
    name = same_name(os.path.normpath(path))
    return rows.get(name) or rows.get(os.path.splitext(name)[0]) or otherwise


def _json_caption(text: str) -> tuple[tuple[str, ...] | None, str]:
    """Read the caption from the `.json` beside an image, as other trainers and taggers write it."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None, "caption is not valid JSON"
    if isinstance(record, str):
        record = {CAPTION_COLUMNS[0]: record}
    return (_record_captions(record) if isinstance(record, dict) else None), ""


def _record_captions(record: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the captions of an object, or else its tags."""
    if captions := captions_in(record, _ANY, where=""):
        return captions
    tags = record.get("tags")
    text = ", ".join(map(str, tags)) if isinstance(tags, list) else tags
    return (text,) if isinstance(text, str) and text.strip() else None


def _encoding(content: bytes) -> str:
    """UTF-8 unless a byte-order mark says otherwise, as Windows editors write them."""
    return "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def records_of(table: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Return each row with its place, or the problem with it."""
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
    # Not `splitlines`, which also splits at separators that JSON and captions may hold.
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
    """Each entry, named by its file's path; by its name alone where the data has moved."""
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
