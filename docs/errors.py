"""List every error message of the code with its fix, as tables: the made part of errors.md.

A message is the first argument of `UserError` and its subclasses, or of a conflict between two keys
of a job; the fix is the second argument or, without one, what the message says after its last
semicolon. `…` stands for the values that are filled in.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from strings import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ERRORS: Final = frozenset(
    {
        "CannotBuildError",
        "DiskFullError",
        "NoSuchClassError",
        "NotFiniteError",
        "NotFoundError",
        "SpecError",
        "StateError",
        "ToolError",
        "UserError",
    }
)
_CONFLICT: Final = "Conflict"  # its first argument is a key
_FILLED: Final = "…"

# Where a message comes from, and the heading it is listed under. The first match counts.
_HEADINGS: Final = (
    ("jobs/imports", "Other tools' configs"),
    ("jobs/spec", "Job file"),
    ("jobs/preflight|jobs/models/model_files", "Before a job is queued"),
    ("jobs/models|jobs/memory|engine/blocks|engine/memory", "Models and memory predictions"),
    ("engine/data|engine/toy", "Data"),
    ("jobs/resume|jobs/run|engine/checkpoint", "Checkpoints and resume"),
    ("engine/exports|engine/families/shared|jobs/export.py", "Exports"),
    ("engine", "Ranks"),
    ("tui/cli", "Command line"),
    ("tui", "Dashboard"),
    ("jobs", "Queue and machine"),
)


class Message(NamedTuple):
    """An error message: where it comes from, what it says, and what to do."""

    path: str
    text: str
    fix: str


def tables() -> str:
    """All messages, in a table for each heading."""
    rows: dict[str, set[tuple[str, str]]] = {heading: set() for _, heading in _HEADINGS}
    for message in messages():
        rows[_heading(message.path)].add((message.text, message.fix))
    parts = []
    for heading, entries in rows.items():
        lines = [f"| `{_cell(text)}` | {_cell(fix)} |" for text, fix in sorted(entries)]
        parts.append("\n".join([f"## {heading}", "", "| message | fix |", "|---|---|", *lines]))
    return "\n\n".join(parts)


def messages() -> Iterator[Message]:
    """Every error message in the packages; `fix` is empty where the code names none."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from _in_scope(tree, str(path.relative_to(ROOT)), {})


def _in_scope(scope: ast.AST, path: str, names: Mapping[str, ast.expr]) -> Iterator[Message]:
    """The messages of a module or function, which sees the texts that `names` are bound to."""
    inner: list[ast.AST] = []
    calls: list[ast.Call] = []
    names = dict(names)
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner.append(node)
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            names[node.target.id] = node.value
        elif isinstance(node, ast.Call):
            calls.append(node)
    for call in calls:
        name = getattr(call.func, "id", None) or getattr(call.func, "attr", "")
        texts = call.args[1:] if name == _CONFLICT else call.args
        if texts and (name == _CONFLICT or name in _ERRORS):
            hints = [*texts[1:2], *(word.value for word in call.keywords if word.arg == "hint")]
            text = _text(texts[0], names)
            if any(word.arg == "named" for word in call.keywords):  # it is said of the key
                text = f"{_text(call.args[0], names)}: {text}"
            yield from _message(path, text, [_text(one, names) for one in hints])
    for function in inner:
        yield from _in_scope(function, path, names)


def _message(path: str, text: str, hints: list[str]) -> Iterator[Message]:
    text, fix = _tidy(text), _tidy(" ".join(hints))
    if not fix:
        text, _, fix = text.rpartition("; ") if "; " in text else (text, "", "")
    if len(re.findall(r"[A-Za-z]{2,}", text)) > 1:
        yield Message(path, text, fix)


def _text(node: ast.expr, names: Mapping[str, ast.expr]) -> str:
    """What an expression says, as far as the code tells."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) for part in parts)
        case ast.FormattedValue(value=value):
            return _text(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names) + _text(right, names)
        case ast.IfExp(body=body, orelse=orelse):
            return _text(body, names) or _text(orelse, names)
        case ast.Name(id=name) if name in names:
            return _text(names[name], {k: v for k, v in names.items() if k != name})
        case ast.Constant(value=None):
            return ""
    return _FILLED


def _tidy(text: str) -> str:
    text = re.sub(f"{_FILLED}(?:\\s*{_FILLED})+", _FILLED, " ".join(text.split()))
    return "" if text == _FILLED else text


def _heading(path: str) -> str:
    return next(heading for pattern, heading in _HEADINGS if re.match(pattern, path))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")
