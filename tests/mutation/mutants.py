"""The mutants of a source file: one small change each, as text, so that the rest stays as it is."""

from __future__ import annotations

import ast
import copy
import difflib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        kind: What kind of change.
        where: The function or class it is in; `module` if none.
        line: Of the change, counted from 1.
        start: First byte that is replaced.
        stop: The byte behind the last one.
        text: What stands there instead.
    """

    kind: str
    where: str
    line: int
    start: int
    stop: int
    text: str

    def applied(self, source: str) -> str:
        """The file with this change."""
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.stop :]).decode()

    def lines(self, source: str) -> tuple[str, str]:
        """The lines that it changes, before and after, without indentation."""
        before, after = source.splitlines(), self.applied(source).splitlines()
        _, _, *changed = difflib.unified_diff(before, after, n=0, lineterm="")
        return (
            " ".join(line[1:].strip() for line in changed if line.startswith("-")),
            " ".join(line[1:].strip() for line in changed if line.startswith("+")),
        )


def mutants_of(source: str, places: Container[str] | None = None) -> list[Mutant]:
    """All mutants of a file, in the order of its text; each can be compiled.

    Args:
        source: The file.
        places: The functions and classes to change, by `Mutant.where`; `None` for all.
    """
    found = {
        one
        for one in _Finder(source).found()
        if (places is None or one.where in places) and _compiles(one.applied(source))
    }
    return sorted(found, key=lambda one: (one.start, one.stop, one.text))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        lengths = [len(line.encode()) for line in source.splitlines(keepends=True)]
        self._starts = [sum(lengths[:number]) for number in range(len(lengths))]

    def found(self) -> Iterator[Mutant]:
        yield from self._visit(self._tree, ())

    def _visit(self, node: ast.AST, where: tuple[str, ...]) -> Iterator[Mutant]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            where = (*where, node.name)
            if not isinstance(node, ast.ClassDef):
                yield from self._visit(node.args, where)
            for statement in node.body:
                yield from self._visit(statement, where)
            return
        for kind, new in _changes(node):
            text = new if isinstance(new, str) else f"({ast.unparse(new)})"
            yield self._mutant(kind, where, node, text)
        for test in _conditions(node):
            yield self._mutant("negated", where, test, f"({ast.unparse(_negated(test))})")
        for child in _inner(node):
            yield from self._visit(child, where)

    def _mutant(self, kind: str, where: tuple[str, ...], node: Any, text: str) -> Mutant:
        start = self._starts[node.lineno - 1] + node.col_offset
        stop = self._starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(kind, ".".join(where) or "module", node.lineno, start, stop, text)


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """What is looked into: code that runs, and no names of types."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return  # before Python 3.12 what is in an f-string has no true place
        case ast.If() if _is_typing(node.test):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.arguments():
            yield from (one for one in (*node.defaults, *node.kw_defaults) if one is not None)
        case ast.AnnAssign():
            if node.value is not None:
                yield node.value
        case _:
            yield from ast.iter_child_nodes(node)


def _conditions(node: ast.AST) -> list[ast.expr]:
    """What a node decides by; a comparison is turned round as one."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            tests = [node.test]
        case ast.comprehension():
            tests = node.ifs
        case _:
            return []
    return [one for one in tests if not isinstance(one, ast.Compare) and not _is_typing(one)]


def _is_typing(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | str]]:
    """(kind, what stands in a node's place)."""
    match node:
        case ast.Compare():
            yield from _compared(node)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", ast.BoolOp(other, node.values)
            for number in range(len(node.values)):
                rest = node.values[:number] + node.values[number + 1 :]
                yield "left out", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(op)](), node.right)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "sign", node.operand
        case ast.Constant():
            yield from _constants(node.value)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "returned", "return None"
        case ast.Call():
            yield from _called(node)
        case ast.JoinedStr():
            yield from _swapped_words(node)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign():
            yield "dropped", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped", "pass"
        case ast.Continue():
            yield "dropped", "break"
        case ast.Break():
            yield "dropped", "continue"
        case ast.Lambda():
            if not _is_none(node.body):
                yield "returned", ast.Lambda(node.args, ast.Constant(None))


def _compared(node: ast.Compare) -> Iterator[tuple[str, ast.expr]]:
    for number, one in enumerate(node.ops):
        for other in _COMPARISONS[type(one)]:
            changed = copy.copy(node)
            changed.ops = [*node.ops[:number], other(), *node.ops[number + 1 :]]
            boundary = {type(one), other} in ({ast.Lt, ast.LtE}, {ast.Gt, ast.GtE})
            yield "boundary" if boundary else "comparison", changed


def _constants(value: object) -> Iterator[tuple[str, ast.expr]]:
    match value:
        case bool():
            yield "constant", ast.Constant(not value)
        case int():
            yield "constant", ast.Constant(value + 1)
        case float():
            yield "constant", ast.Constant(value * 2 if value else 1.0)


def _called(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    # The order of some does not matter, the other one dies of a TypeError.
    plain = name not in (*_NAMES, "isinstance", "getattr") and not any(
        isinstance(one, ast.Starred) for one in node.args[:2]
    )
    if plain and len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        first, second, *rest = node.args
        yield "swapped", ast.Call(node.func, [second, first, *rest], node.keywords)
    if name in _NAMES:
        other = ast.Name(_NAMES[name], ast.Load())
        yield "swapped", ast.Call(other, node.args, node.keywords)


def _swapped_words(node: ast.JoinedStr) -> Iterator[tuple[str, ast.expr]]:
    places = [n for n, one in enumerate(node.values) if isinstance(one, ast.FormattedValue)]
    for first, second in pairwise(places):
        changed = copy.deepcopy(node)
        values = changed.values
        values[first], values[second] = values[second], values[first]
        yield "swapped", changed


def _negated(test: ast.expr) -> ast.expr:
    return test.operand if isinstance(test, ast.UnaryOp) else ast.UnaryOp(ast.Not(), test)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
