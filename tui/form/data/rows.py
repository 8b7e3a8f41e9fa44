"""The rows of the data screen: buckets, findings, and how far a look is. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len, set_cell_size

from tui.text.data_text import bucket_name, dataset_name, draws_text, each, groups
from tui.text.format import Row, Span, bar, percent, right

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBERS: Final = (("per epoch", 11), ("cropped", 9), ("max crop", 9))  # name, columns
_WIDEST_BAR: Final = 48
_LEAST_BAR: Final = 6
_MUCH: Final = 0.25  # of an image cut off: marked
_LEAST_EXAMPLE: Final = 16  # columns
_TITLES: Final = 9  # columns of `converted`, the longest title of a group


def bucket_rows(buckets: Sequence[Mapping[str, Any]], width: int) -> list[Row]:
    """Return a heading, and a row for each bucket.

    Columns that do not fit are dropped, the rightmost first.
    """
    names = max(6, *(len(bucket_name(bucket)) for bucket in buckets))
    most = max(bucket["samples"] for bucket in buckets)
    counts = max(7, len(str(most)))
    room = width - names - 2 - counts - 2
    shown = len(_NUMBERS)
    while shown and room - sum(columns for _, columns in _NUMBERS[:shown]) < _LEAST_BAR:
        shown -= 1
    space = room - sum(columns for _, columns in _NUMBERS[:shown])
    length = max(0, min(_WIDEST_BAR, space))
    heading = f"{'bucket':<{names}}  {'samples':>{counts}}  {'':{length}}"
    heading += "".join(f"{name:>{columns}}" for name, columns in _NUMBERS[:shown])
    return [
        (Span(heading, "dim"),),
        *(_bucket_row(b, names, counts, most, length, shown) for b in buckets),
    ]


def _bucket_row(
    bucket: Mapping[str, Any], names: int, counts: int, most: int, length: int, shown: int
) -> Row:
    samples = bucket["samples"]
    numbers = (
        Span(draws_text(bucket["draws"])),
        Span(percent(bucket["cut_mean"] * 100), _mark(bucket["cut_mean"])),
        Span(percent(bucket["cut_most"] * 100), _mark(bucket["cut_most"])),
    )
    return (
        Span(bucket_name(bucket).ljust(names) + "  ", "strong"),
        Span(right(str(samples), counts) + "  "),
        *bar(samples / most, length),
        *(
            Span(right(span.text, columns), span.role)
            for span, (_, columns) in zip(numbers[:shown], _NUMBERS, strict=False)
        ),
    )


def _mark(share: float) -> str:
    return "warn" if share > _MUCH else ""


def finding_rows(report: Mapping[str, Any], width: int) -> list[Row]:
    """Return rows of skipped, converted or unexpected files, and of datasets if several."""
    rows: list[Row] = []
    for group in groups(report):
        own: list[Row] = []
        for finding in group.findings:
            own += _finding(finding, group.role, width - _TITLES)
        rows += _titled(group.title, own)
    if len(report["datasets"]) > 1:
        rows += _titled("datasets", [_dataset(d, width - _TITLES) for d in report["datasets"]])
    return rows


def _titled(title: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their title in front of the first."""
    titles = [title, *[""] * (len(rows) - 1)]
    return [
        (Span(own.ljust(_TITLES), "title"), *row) for own, row in zip(titles, rows, strict=True)
    ]


def _dataset(dataset: Mapping[str, Any], width: int) -> Row:
    facts = (
        f"{dataset['samples']:>6}  {draws_text(dataset['draws'])} per epoch, {each(dataset)} each"
    )
    facts += f", {dataset['skipped']} skipped  " if dataset["skipped"] else "  "
    return (Span(facts), Span(_head_cut(dataset_name(dataset), width - len(facts)), "dim"))


def _finding(finding: Mapping[str, Any], role: str, width: int) -> list[Row]:
    """One line where an example has room beside the text, else more."""
    count = f"{finding['count']:>6}  "
    space = " " * len(count)
    first, *rest = textwrap.wrap(finding["text"], max(20, width - len(count))) or [""]
    rows: list[Row] = [(Span(count, role), Span(first))]
    rows += [(Span(space + line),) for line in rest]
    examples, room = finding["examples"], width - len(count) - len(first) - 2
    if not examples:
        return rows
    if not rest and room >= min(_LEAST_EXAMPLE, cell_len(examples[0])):
        return [(*rows[0], Span("  " + _listed(examples, finding["count"], room), "dim"))]
    listed = _listed(examples, finding["count"], width - len(count))
    return [*rows, (Span(space + listed, "dim"),)]


def _listed(examples: Sequence[str], count: int, room: int) -> str:
    """As many examples as there is room for, at least the first, with `…` if there are more."""
    for number in range(len(examples), 0, -1):
        text = ", ".join(examples[:number]) + (", …" if number < count else "")
        if cell_len(text) <= room:
            return text
    return _tail_cut(examples[0], room)


def _tail_cut(text: str, room: int) -> str:
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(0, room - 1)).rstrip() + "…"


def _head_cut(text: str, room: int) -> str:
    """Cut a path at its start, since its end is the most telling."""
    while text and cell_len(text) > max(0, room):
        text = "…" + text[2:] if len(text) > 1 else ""
    return text


def looking_row(done: int, total: int, width: int) -> Row:
    """How far the look has come."""
    if not total:
        return (Span("reading the data …", "accent"),)
    if done >= total:
        return (Span(f"read {total} files …", "accent"),)
    words, count = "reading the data ", f" {done}/{total}  {done / total:.0%}"
    return (
        Span(words, "accent"),
        *bar(done / total, max(0, min(60, width - len(words) - len(count)))),
        Span(count, "strong"),
    )
