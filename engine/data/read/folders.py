"""What a folder offers: its pictures and videos, each with its captions or what is wrong with it.

Captions stand in a `.txt` of the same name, or in the `metadata.jsonl` or `metadata.csv` of the
Hugging Face imagefolder layout, whose rows name files relative to where they stand.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES, VIDEO_SUFFIXES, list_files
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs.spec.values.datasets import Dataset

CAPTION_COLUMNS: Final = ("text", "caption", "captions", "prompt")
_FILE_COLUMN: Final = "file_name"
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
    """

    name: str
    path: Path
    captions: tuple[str, ...] | None = None
    problem: str = ""
    row: int | None = None

    @property
    def is_video(self) -> bool:
        """Whether it is a video file, by its name."""
        return self.row is None and self.path.suffix.lower() in VIDEO_SUFFIXES


@dataclass
class Source:
    """What was found in a dataset.

    Attributes:
        entries: In a fixed order.
        others: What kind of file → how many are neither samples nor their captions.
    """

    entries: list[Entry]
    others: Counter[str] = field(default_factory=Counter)


def read_folder(dataset: Dataset, *, videos: bool) -> Source:
    """Look for samples in a folder; opens caption files, but no picture.

    Args:
        dataset: Its `path` is the folder.
        videos: Whether the model trains on videos.

    Raises:
        UserError: A metadata file cannot be read, or has not the columns it needs.
    """
    root = Path(dataset.path)
    files = list_files(root)
    rows: dict[str, tuple[str, ...]] = {}
    places: dict[str, str] = {}
    lost: list[Entry] = []
    for table in files.metadata:
        for place, record in _records(table):
            name = f"{_shown(table, root)} {place}"
            if isinstance(record, str):
                lost.append(Entry(name, table, problem=record))
                continue
            # Not resolved: two links to one file may have different captions.
            file = os.path.normpath(table.parent / str(record.get(_FILE_COLUMN) or "?"))
            places.setdefault(file, name)
            if captions := captions_in(record, dataset, where=str(table)):
                rows[file] = (*rows.get(file, ()), *captions)
    entries = []
    for path in sorted(files.pictures + files.videos):
        unfit = not videos and path.suffix.lower() in VIDEO_SUFFIXES
        problem = "a video, but the model trains on images" if unfit else ""
        captions, wrong = _captions_of(path, rows) if not problem else (None, "")
        entries.append(Entry(_shown(path, root), path, captions, problem or wrong))
    for path in files.foreign:
        problem = f"{path.suffix.lower()} images cannot be read"
        entries.append(Entry(_shown(path, root), path, problem=problem))
    entries += [Entry(_shown(p, root), p, problem="a folder") for p in files.folders]
    entries += [
        Entry(_shown(p, root), p, problem=f"an unreadable folder ({why})")
        for p, why in files.unreadable
    ]
    known = {os.path.normpath(entry.path) for entry in entries}
    for file, name in places.items():
        if file not in known:
            what = os.path.relpath(file, root)
            lost.append(Entry(name, root, problem=f"does not name an image here: {what}"))
    others = Counter(files.others)
    if files.lonely:
        others["captions without an image"] = len(files.lonely)
    return Source([*entries, *lost], others)


def _shown(path: Path, root: Path) -> str:
    """The path below a folder, such that it can be printed: file names need not be UTF-8."""
    name = os.fsencode(path.relative_to(root)).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def captions_in(
    record: Mapping[str, Any], dataset: Dataset, *, where: str
) -> tuple[str, ...] | None:
    """The captions of a row: a text, or a list of texts.

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
    path: Path, rows: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...] | None, str]:
    """Captions of a file, and what is wrong with them. A row of a metadata file comes first."""
    if rows and (found := rows.get(os.path.normpath(path))):
        return found, ""
    content = None
    for suffix in CAPTION_SUFFIXES:
        try:
            content = read_regular(path.with_suffix(suffix))
            break
        except FileNotFoundError:
            continue
        except OSError as error:
            return None, f"caption cannot be read ({error.strerror})"
    if content is None:
        return None, ""
    try:
        text = content.decode(_encoding(content))
    except UnicodeDecodeError:
        return None, "caption is not UTF-8"
    return ((text,) if text.strip() else None), ""


def _encoding(content: bytes) -> str:
    """UTF-8 unless a byte-order mark says otherwise, as Windows editors write them."""
    return "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def _records(table: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Where each row stands, and the row or what is wrong with it."""
    try:
        text = table.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {table} ({error})") from None
    if table.suffix == ".csv":
        yield from _csv_records(table, text)
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


def _csv_records(table: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if _FILE_COLUMN not in (reader.fieldnames or ()):
        raise UserError(
            f"{table} has no column {_FILE_COLUMN}",
            f"its first line is {', '.join(reader.fieldnames or ['empty'])}",
        )
    try:
        for record in reader:
            yield f"line {reader.line_num}", {str(key): value for key, value in record.items()}
    except csv.Error as error:
        raise UserError(f"{table} line {reader.line_num} cannot be read ({error})") from None
