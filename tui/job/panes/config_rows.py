"""The rows of the config tab: the job file, the launch command, what another job has. Pure."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any, Final

from tui.text.format import Span, cut, left
from tui.text.value_text import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Job
    from jobs.spec.file.diff import Difference
    from tui.text.format import Row

_KEY: Final = re.compile(r"([A-Za-z_][\w.-]*):(?= |$)(.*)")
_SIGNS: Final = {"added": ("+", "good"), "removed": ("−", "bad"), "changed": ("~", "accent")}
_WIDEST_KEY: Final = 34


def yaml_rows(text: str) -> list[Row]:
    """YAML with its keys in another colour."""
    rows: list[Row] = []
    for line in text.splitlines():
        if match := _KEY.fullmatch(line):
            rows.append((Span(match[1] + ":", "accent"), Span(match[2])))
        else:
            rows.append((Span(line, "dim" if line.startswith("#") else ""),))
    return rows


def command_rows(text: str, width: int) -> list[Row]:
    """Show a shell script, with long lines wrapped."""
    rows: list[Row] = []
    for line in text.splitlines():
        role = "dim" if line.startswith("#") else ""
        first, *rest = textwrap.wrap(
            line, width - 2, break_on_hyphens=False, break_long_words=True, drop_whitespace=False
        ) or [""]
        rows.append((Span(first, role),))
        rows += [(Span("  ", "faint"), Span(part.lstrip(), role)) for part in rest]
    return rows


def diff_rows(changed: Sequence[Difference], ours: Job, theirs: Job, width: int) -> list[Row]:
    """List the keys that differ, with the values of both jobs side by side.

    Args:
        changed: What differs; `before` is of our job, `after` of the other one.
        ours: The job on the screen.
        theirs: The other one.
        width: Columns.
    """
    if not changed:
        return [(Span("both jobs have the same settings", "good"),)]
    keys = min(_WIDEST_KEY, max(len(difference.key) for difference in changed))
    room = max(8, (width - keys - 6) // 2)
    rows: list[Row] = [
        (
            Span(" " * (keys + 4)),
            Span(left(cut(f"#{ours.id} {ours.name}", room), room), "strong"),
            Span("  "),
            Span(cut(f"#{theirs.id} {theirs.name}", room), "strong"),
        )
    ]
    group = ""
    for difference in changed:
        if difference.group != group:
            group = difference.group
            rows += [(), (Span(group, "title"),)]
        sign, role = _SIGNS[difference.kind]
        mine, other = _wrapped(difference.before, room), _wrapped(difference.after, room)
        for n in range(max(len(mine), len(other))):
            rows.append(
                (
                    Span(f"{sign} " if n == 0 else "  ", role),
                    Span(left(difference.key if n == 0 else "", keys) + "  "),
                    Span(left(mine[n] if n < len(mine) else "", room), "dim"),
                    Span("  "),
                    Span(other[n] if n < len(other) else "", role),
                )
            )
    return rows


def _wrapped(value: Any, width: int) -> list[str]:
    return textwrap.wrap(in_words(value), width, break_on_hyphens=False) or [""]
