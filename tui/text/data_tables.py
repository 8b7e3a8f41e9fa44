"""What `fsdp-tui data` prints. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from tui.text.data_text import (
    bucket_name,
    dataset_name,
    draws_text,
    each,
    facts,
    groups,
    plain_bar,
)
from tui.text.format import bar, percent
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tui.text.data_text import Group

_BAR: Final = 16  # columns


def data_text(report: Mapping[str, Any], *, width: int = 80, every_file: bool = False) -> str:
    """Format the complete report.

    Args:
        report: The report.
        width: Columns that sentences are wrapped to; a name is never cut.
        every_file: Name every skipped file.
    """
    parts = ["\n".join(f"{name:<12} {text}" for name, text in facts(report))]
    if len(report["datasets"]) > 1:
        parts.append(_datasets(report["datasets"]))
    parts.append(_buckets(report["buckets"]))
    for group in groups(report):
        lines = [group.title.upper()]
        if every_file and group.title == "skipped":
            lines += _every_file(report, group)
        else:
            lines += _findings(group, width, every_example=every_file)
        parts.append("\n".join(lines))
    if report.get("sheet"):
        parts.append(f"images of every bucket: {report['sheet']}")
    return "\n\n".join(parts)


def _datasets(datasets: Sequence[Mapping[str, Any]]) -> str:
    head = ("SAMPLES", "SKIPPED", "PER EPOCH", "EACH", "DATASET")
    rows = [
        (
            str(dataset["samples"]),
            str(dataset["skipped"]),
            draws_text(dataset["draws"]),
            each(dataset),
            dataset_name(dataset),
        )
        for dataset in datasets
    ]
    return _aligned(head, rows, numbers=(0, 1, 2, 3))


def _buckets(buckets: Sequence[Mapping[str, Any]]) -> str:
    head = ("BUCKET", "SAMPLES", "", "PER EPOCH", "CROPPED", "MAX CROP")
    most = max(bucket["samples"] for bucket in buckets)
    rows = [
        (
            bucket_name(bucket),
            str(bucket["samples"]),
            plain_bar(bar(bucket["samples"] / most, _BAR)) or "╸",
            draws_text(bucket["draws"]),
            percent(bucket["cut_mean"] * 100),
            percent(bucket["cut_most"] * 100),
        )
        for bucket in buckets
    ]
    return _aligned(head, rows, numbers=(1, 3, 4, 5))


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """Return a table with some columns to the right, as numbers should stand."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    first, *rest = (
        [cell.rjust(widths[i]) if i in numbers else cell for i, cell in enumerate(line)]
        for line in [head, *rows]
    )
    return table(first, rest)


def _findings(group: Group, width: int, *, every_example: bool) -> list[str]:
    lines = []
    for finding in group.findings:
        examples = finding["examples"] if every_example else finding["examples"][:1]
        more = f", such as {', '.join(examples)}" if examples else ""
        lines += textwrap.wrap(
            f"{finding['count']:>6}  {finding['text']}{more}",
            max(40, width),
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _every_file(report: Mapping[str, Any], group: Group) -> list[str]:
    several, lines = len(report["datasets"]) > 1, []
    for finding in group.findings:
        lines.append(f"{finding['count']:>6}  {finding['text']}")
        for dataset, name, more in finding["files"]:
            folder = f"{report['datasets'][dataset]['path']}/" if several else ""
            lines.append(f"        {folder}{name}" + (f": {more}" if more else ""))
    return lines
