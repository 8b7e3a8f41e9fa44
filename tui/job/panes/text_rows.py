"""Rows of text that several tabs need. Pure."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Final

from tui.text.format import Span

if TYPE_CHECKING:
    from tui.text.format import Row

LABEL: Final = 12  # columns of what stands before a fact


def heading(text: str) -> Row:
    return (Span(text, "title"),)


def fact(name: str, words: str, width: int, role: str = "", *, label: int = LABEL) -> list[Row]:
    """`name        words`, in as many rows as they need; `label` columns for the name."""
    rows: list[Row] = []
    for paragraph in words.splitlines() or [""]:
        # A path has to stay in one piece as long as it can: it is there to be copied.
        lines = textwrap.wrap(
            paragraph, max(20, width - label), break_on_hyphens=False, drop_whitespace=True
        )
        for line in lines or [""]:
            before = "" if rows else name
            rows.append((Span(before.ljust(label), "dim"), Span(line, role)))
    return rows


def clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


def day(t: float) -> str:
    return time.strftime("%A, %Y-%m-%d", time.localtime(t))


def moment(t: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) if t else "–"
