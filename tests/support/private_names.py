"""Private names of libraries: those that code uses, and those that docs/upstream.md lists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PRIVATE = re.compile(r"_[A-Za-z]\w*")
_DOCUMENTED = {"_exit", "_replace"}  # of the standard library, where they are public
_BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


class Classes:
    """Which private names the classes of the product define.

    Args:
        trees: The product's files, parsed.
        packages: Its packages.
    """

    def __init__(self, trees: Mapping[str, ast.Module], packages: set[str]) -> None:
        self._packages = packages
        self._bases: dict[str, set[str]] = defaultdict(set)
        self._names: dict[str, set[str]] = defaultdict(set)
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._names[node.name] |= set(defined(node))
                    bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
                    self._bases[node.name] |= {base.rpartition(".")[2] for base in bases}

    def foreign(self, tree: ast.Module) -> set[str]:
        """The private names in a file that no class of the product defines."""
        here = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for name in self._names[node.name]
        }
        return set(self._visit(tree, "", here))

    def _visit(self, node: ast.AST, place: str, here: set[str]) -> Iterator[str]:
        place = node.name if isinstance(node, ast.ClassDef) else place
        match node:
            case ast.Attribute(value, name) if PRIVATE.fullmatch(name):
                match ast.unparse(value):
                    case "self" | "cls":
                        ours = self._kin(place)
                    case "super()":
                        ours = {n for base in self._bases[place] for n in self._family(base)}
                    case _:
                        ours = here
                yield from {name} - ours - _DOCUMENTED
            case ast.ImportFrom(str(module), names) if module.split(".")[0] not in self._packages:
                yield from filter(PRIVATE.fullmatch, module.split("."))
                yield from filter(PRIVATE.fullmatch, (alias.name for alias in names))
            case ast.Import(names):
                for alias in names:
                    yield from filter(PRIVATE.fullmatch, alias.name.split("."))
            case ast.Call(ast.Name(function), [_, ast.Constant(str(name)), *_]):
                if function in _BY_NAME and PRIVATE.fullmatch(name):
                    yield name
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, place, here)

    def _family(self, name: str) -> set[str]:
        """The names of a class and of those that it inherits from."""
        inherited = (self._family(base) for base in self._bases.get(name, ()) if base != name)
        return self._names.get(name, set()).union(*inherited)

    def _kin(self, name: str) -> set[str]:
        """The names of its family, and of the classes that it is mixed into."""
        mixed = (self._family(other) for other, bases in self._bases.items() if name in bases)
        return self._family(name).union(*mixed)


def defined(of: ast.ClassDef) -> Iterator[str]:
    """Methods, class attributes, and what is assigned to `self`."""
    for node in ast.walk(of):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield name
            case ast.Name(name, ast.Store()):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name


def listed(page: Path) -> set[tuple[str, str]]:
    """Read each private name of the page's tables, with each of its files."""
    pairs = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `_"):
            names, files, *_ = line.strip("|").split("|")
            pairs |= {
                (name, file)
                for name in re.findall(r"`(\w+)`", names)
                for file in re.findall(r"`([\w/.]+)`", files)
            }
    return pairs
