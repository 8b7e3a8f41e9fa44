"""List every sentence that a user can read: `python docs/strings.py [FOLDER …]`.

One line each: file, line, what it is given to, and the text, with `{…}` for what is filled in.
Found in the source by `ast`: every string of two words or more, labels of one word where they are
passed to a widget or stand in a table of keys, and the help of commands. Left out are docstrings,
annotations, style sheets, patterns and SQL.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("tui", "jobs", "engine")

# Calls whose texts are labels, read even if they are one word.
_LABELS: Final = frozenset(
    {"Action", "Binding", "BlockKey", "Button", "Key", "Label", "Static", "TabPane", "notify"}
)
# Calls whose texts nobody reads.
_UNREAD: Final = frozenset(
    {
        "TypeVar",
        "all_of",
        "cast",
        "compile",
        "execute",
        "executemany",
        "executescript",
        "findall",
        "finditer",
        "fullmatch",
        "match",
        "query",
        "query_one",
        "search",
        "split",
        "strftime",
        "sub",
    }
)
_SQL: Final = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA|BEGIN|ALTER|DROP)\b")
_STYLE: Final = re.compile(r"CSS\b")
_WORDS: Final = re.compile(r"[A-Za-z]{2,}[\w'’]*[,;:.]? +\S|\S +[A-Za-z]{2,}")

_LABEL: Final = re.compile(r"[A-Za-z][a-z]+[…:]?")


class Sentence(NamedTuple):
    """A text that a user can read, and where it stands.

    Attributes:
        path: The file, from the repository's root.
        line: Its first line there.
        given_to: The call it is an argument of, `help` for a command's, or the name it is bound to.
        text: With `{…}` for each value that is filled in.
    """

    path: Path
    line: int
    given_to: str
    text: str

    def __str__(self) -> str:
        """One line of the list."""
        text = self.text.replace("\n", "\\n")
        return f"{self.path}:{self.line}: [{self.given_to}] {text}"


def main() -> None:
    """Print the list, of the packages or of the folders and files named."""
    for found in sentences(sys.argv[1:] or PACKAGES):
        print(found)


def sentences(places: list[str] | tuple[str, ...] = PACKAGES) -> Iterator[Sentence]:
    """Every sentence in the Python files of some folders.

    Args:
        places: Folders or files, from the repository's root.
    """
    for place in places:
        top = ROOT / place
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from _Reader(path.relative_to(ROOT)).read(tree)


class _Reader:
    """Walks one file, with the call or name that each string is given to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[Sentence] = []

    def read(self, tree: ast.Module) -> list[Sentence]:
        """Its sentences, in the order of the file."""
        self._walk(tree, "")
        return sorted(self._found, key=lambda one: one.line)

    def _walk(self, node: ast.AST, given_to: str) -> None:
        if text := _text(node):
            self._keep(node, given_to, text)
            return
        for name, below in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment"):
                continue
            parts = below if isinstance(below, list) else [below]
            for part in parts:
                if isinstance(part, ast.AST) and not _is_docstring(part):
                    self._walk(part, _given_to(node, part) or given_to)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_command(node):
            docstring = ast.get_docstring(node) or ""
            self._found.append(Sentence(self._path, node.lineno, "help", docstring))

    def _keep(self, node: ast.AST, given_to: str, text: str) -> None:
        if given_to in _UNREAD or _SQL.match(text) or _STYLE.search(given_to):
            return
        if _WORDS.search(text.strip()) or (given_to in _LABELS and _LABEL.fullmatch(text)):
            line = getattr(node, "lineno", 0)
            self._found.append(Sentence(self._path, line, given_to, text))


def _text(node: ast.AST) -> str | None:
    """What a literal says; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else f"{{{ast.unparse(part.value if isinstance(part, ast.FormattedValue) else part)}}}"
            for part in node.values
        )
    return None


def _given_to(node: ast.AST, part: ast.AST) -> str:
    """What the strings in a part of a node are given to; empty if the node does not say."""
    if isinstance(node, ast.Call):
        function = node.func
        return getattr(function, "attr", None) or getattr(function, "id", "")
    if isinstance(node, ast.keyword):
        return "help" if node.arg == "help" else ""
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and part is node.value:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return getattr(target, "id", None) or getattr(target, "attr", "")
    return ""


def _is_docstring(node: ast.AST) -> bool:
    """Whether it is a string that stands as a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its docstring is the help of a command."""
    return any(re.search(r"\b(command|group)\b", ast.unparse(d)) for d in node.decorator_list)


if __name__ == "__main__":
    main()
