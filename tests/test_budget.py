"""How large the project may be: what `tests/budget.yaml` allows each package.

Whoever raises a number lowers another, or says why in a comment of the same commit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest
import yaml

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PACKAGES: Final = ("tui", "jobs", "engine")
BUDGET: Final = ROOT / "tests" / "budget.yaml"


@cache
def sources(package: str) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}


def code_lines(package: str) -> int:
    """Count the lines that hold code: neither blank, nor a comment, nor a docstring."""
    return sum(
        bool(stripped) and not stripped.startswith("#") and number not in documented
        for path, tree in sources(package).items()
        for documented in [_documented(tree)]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for stripped in [line.strip()]
    )


def _documented(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings, those below a constant or a field among them."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def files(package: str) -> int:
    return len(sources(package))


def folders(package: str) -> int:
    return len({path.parent for path in sources(package)})


def import_lines(package: str) -> int:
    """Count the lines of import statements."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in _nodes(package)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def whole_specs(package: str) -> int:
    """Count the functions that take all keys of a job, where a group of keys might do."""
    return sum(
        any(
            isinstance(a.annotation, ast.Name) and a.annotation.id == "JobSpec"
            for a in _arguments(node)
        )
        for node in _nodes(package)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


@cache
def _nodes(package: str) -> list[ast.AST]:
    return [node for tree in sources(package).values() for node in ast.walk(tree)]


def noun_docstrings(package: str) -> int:
    """Count the docstrings of functions that do not begin with what the function does (D401)."""
    ruff = [sys.executable, "-m", "ruff", "check", "--select=D401", "--output-format=concise"]
    done = subprocess.run([*ruff, package], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.count(": D401 ")


MEASURES: Final[dict[str, Callable[[str], int]]] = {
    "code lines": code_lines,
    "files": files,
    "folders": folders,
    "import lines": import_lines,
    "functions of a whole JobSpec": whole_specs,
    "docstrings that are no sentence": noun_docstrings,
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("measure", MEASURES)
def test_a_package_keeps_to_its_budget(measure: str, package: str) -> None:
    allowed = yaml.safe_load(BUDGET.read_text())[measure][package]
    assert MEASURES[measure](package) <= allowed, f"see {BUDGET.name}"


if __name__ == "__main__":
    for name, count in MEASURES.items():
        print(f"{name}: {{{', '.join(f'{p}: {count(p)}' for p in PACKAGES)}}}")
