"""Describe a report on a job's data (`jobs.preflight.data.look_at_data`). Pure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tui.text.format import bar, percent
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tui.text.format import Row


@dataclass(frozen=True)
class Group:
    """Findings of one kind, each with `count`, `text` and `examples`.

    Attributes:
        title: What they have in common.
        role: Color role of their numbers.
        count: Their number, formatted for a heading.
        findings: The report's findings.
    """

    title: str
    role: str
    count: str
    findings: Sequence[Mapping[str, Any]]


def bucket_name(bucket: Mapping[str, Any]) -> str:
    """Return `1024x768`; for videos, `1024x768x49`."""
    return "x".join(map(str, bucket["size"]))


def groups(report: Mapping[str, Any]) -> list[Group]:
    """Group the findings: skipped, converted, warnings; without the empty groups."""
    cautions, converted = report["cautions"], sum(finding["count"] for finding in report["handled"])
    kinds = [
        Group("skipped", "warn", f"{len(report['skipped'])} skipped", report["reasons"]),
        Group("converted", "", f"{converted} converted", report["handled"]),
        Group("warnings", "accent", some(len(cautions), "warning"), cautions),
    ]
    return [group for group in kinds if group.findings]


def draws_text(count: float) -> str:
    """Return an epoch's number of draws: `12`, or an average of `12.5`."""
    return f"{count:.10g}"


def each(dataset: Mapping[str, Any]) -> str:
    """Write how often an epoch draws each of a dataset's samples: `1x`, `2.5x`."""
    return f"{dataset['draws'] / max(dataset['samples'], 1):.3g}x"


def _epoch(report: Mapping[str, Any]) -> str:
    """Return an epoch's length: `12.5 steps of 8`."""
    steps = report["steps_per_epoch"]
    return f"{steps:.10g} step{'s' * (steps != 1)} of {report['global_batch']}"


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the totals, each with a name."""
    skipped, longest = len(report["skipped"]), report["longest"]
    captions = some(report["texts"], "unique caption")
    most = report.get("most_drawn", 1.0)
    held = f"; {report['held_out']} more held out" if report.get("held_out") else ""
    rows = [
        (
            "samples",
            str(report["samples"])
            + _of_images(report)
            + held
            + (f"; {skipped} skipped" if skipped else ""),
        ),
        ("buckets", _buckets(report)),
        ("captions", captions + (f", up to {longest} tokens" if longest else "")),
        ("masks", some(report["masked"], "image") if report.get("masked") else ""),
        ("sound", _sound(report)),
        ("each with", _references(report)),
        ("loss weights", _weights(report)),
        ("class images", _class_images(report)),
        ("views", f"{report['views']} of each image" if report["views"] > 1 else ""),
        (
            "epoch",
            _epoch(report)
            + (
                f"; the most drawn sample comes {most:.3g} times as often as the average"
                if most > 1.005
                else ""
            ),
        ),
        ("job", f"{some(report['total_steps'], 'step')}, {epochs(report)}"),
    ]
    return [(name, text) for name, text in rows if text]


def headlines(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the totals in two lines of at most 80 columns: the samples, and an epoch."""
    skipped, longest = len(report["skipped"]), report["longest"]
    samples = [
        some(report["samples"], "sample") + _of_images(report),
        f"{report['held_out']} held out" if report.get("held_out") else "",
        f"{skipped} skipped" if skipped else "",
        some(report["texts"], "caption") + (f" up to {longest} tokens" if longest else ""),
        f"{report['views']} views of each" if report["views"] > 1 else "",
        f"{report['masked']} masked" if report.get("masked") else "",
        f"sound in {_sound(report)}" if report.get("sound") else "",
        f"each with {_references(report)}" if report.get("references") else "",
        f"{report['class_images']} class images to make" if report.get("class_images") else "",
    ]
    return (
        " · ".join(filter(None, samples)),
        f"{_epoch(report)} per epoch · {epochs(report)} in {some(report['total_steps'], 'step')}",
    )


def _of_images(report: Mapping[str, Any]) -> str:
    """Return how many images the samples show, if several resolutions share images."""
    images = report.get("images", report["samples"])
    return f" of {some(images, 'image')}" if images != report["samples"] else ""


def _buckets(report: Mapping[str, Any]) -> str:
    """Return the number of buckets, and the difference between their sides in pixels."""
    steps = " and ".join(map(str, report.get("bucket_steps") or ()))
    return f"{len(report['buckets'])}, sides {steps} pixels apart" if steps else ""


def _sound(report: Mapping[str, Any]) -> str:
    """Return how many videos have sound, where a job trains with it."""
    heard, videos = report.get("sound") or (0, 0)
    return f"{heard or 'none'} of {some(videos, 'video')}" if videos else ""


def _references(report: Mapping[str, Any]) -> str:
    """Return what lies beside each sample: layers, conditioning images or control videos."""
    noun, least, most = report.get("references") or ("", 0, 0)
    if not most:
        return ""
    return some(most, noun) if least == most else f"{least} to {some(most, noun)}"


def _weights(report: Mapping[str, Any]) -> str:
    weights = report.get("weights")
    return f"{weights[0]:g} to {weights[1]:g}" if weights else ""


def _class_images(report: Mapping[str, Any]) -> str:
    count = report.get("class_images")
    return f"{count}, made before training and not counted here" if count else ""


def dataset_name(dataset: Mapping[str, Any]) -> str:
    """Return a dataset's path, with its purpose unless that is training."""
    return str(dataset["path"]) + (" (regularization)" if dataset.get("regularization") else "")


def epochs(report: Mapping[str, Any]) -> str:
    """Return how many epochs the job trains."""
    return f"{report['epochs']:.3g} epoch{'s' * (report['epochs'] != 1)}"


def changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Compare with an earlier report on the same job; return "" if nothing changed."""
    if before is None:
        return ""
    try:
        counts = [
            ("samples", before["samples"], now["samples"]),
            ("skipped", len(before["skipped"]), len(now["skipped"])),
            ("captions", before["texts"], now["texts"]),
            ("buckets", len(before["buckets"]), len(now["buckets"])),
        ]
        changed = [f"{name} {old} → {new}" for name, old, new in counts if old != new]
        if not changed and _by_bucket(before) != _by_bucket(now):
            changed = ["other sizes"]
    except (KeyError, TypeError):  # written by another version
        return ""
    return ", ".join(changed)


def some(count: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {what}{'s' * (count != 1)}"


def plain_bar(row: Row) -> str:
    """Return the characters of a bar, without its empty rest."""
    return "".join(span.text for span in row if span.role != "faint")


def _by_bucket(report: Mapping[str, Any]) -> dict[str, int]:
    return {bucket_name(bucket): bucket["samples"] for bucket in report["buckets"]}


# -- data tables ----------------------------------------------------------------------------
# The output of `fsdp-tui data`. Pure.


_BAR: Final = 16  # columns


def data_text(report: Mapping[str, Any], *, width: int = 80, every_file: bool = False) -> str:
    """Format the complete report.

    Args:
        report: The report.
        width: Columns at which sentences wrap; names are never cut.
        every_file: List every skipped file.
    """
    parts = ["\n".join(f"{name:<12} {text}" for name, text in facts(report))]
    if len(report["datasets"]) > 1:
        parts.append(_datasets(report["datasets"]))
    parts.append(_bucket_lines(report["buckets"]))
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


def _bucket_lines(buckets: Sequence[Mapping[str, Any]]) -> str:
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
    """Return a table with some columns right-aligned, as numbers should be."""
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
