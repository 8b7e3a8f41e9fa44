"""A configuration as its own tool reads it, and what all tools' readers share."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs.imports.common.table import translation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.imports.imported import Imported


@dataclass
class Real:
    """A configuration as its tool reads it.

    Attributes:
        name: Of the file or command.
        read: Imports it.
        values: Our key → the tool's key and its value.
        content: What the configuration says; those that say the same are read once.
        spelled_out: Imports it with the tool's defaults written out, and says which those are.
    """

    name: str
    read: Callable[[], Imported]
    values: dict[str, tuple[str, Any]] = field(default_factory=dict)
    content: str = ""
    spelled_out: Callable[[], tuple[Imported, list[str]]] | None = None


def files_in(paths: list[Path], *suffixes: str) -> Iterator[Path]:
    """The files of these suffixes among paths and below those that are folders."""
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in inside if one.suffix in suffixes and one.is_file())


def literal(node: ast.expr) -> Any:
    """The value of an expression that is one; None of others."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def parse_source(path: Path) -> ast.Module:
    """A source file of a tool."""
    return ast.parse(path.read_text(encoding="utf-8"))


def keywords(call: ast.Call) -> dict[str, Any]:
    """The keyword arguments of a call that are literals."""
    return {str(word.arg): literal(word.value) for word in call.keywords}


def word_of(row: str, value: Any) -> Any:
    """Our word for one of a tool's, by a row of the table for all tools."""
    word = str(value).strip().lower().replace("-", "_")
    return (translation(row, word) or (word, ""))[0]


def base_of(word: Any) -> str:
    """Our precision of a frozen base, of a tool's word for it."""
    text = str(word).strip().lower()
    for start, ours in (
        *((start, "fp8_scaled") for start in ("fp8", "qfloat8", "float8")),
        *((start, "int8") for start in ("int8", "uint8", "qint8", "convrot8")),
        *((start, "nf4") for start in ("nf4", "int", "uint", "fp4", "convrot", "nvfp4")),
    ):
        if text.startswith(start):
            return ours
    return "none"
