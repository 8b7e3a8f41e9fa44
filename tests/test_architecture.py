"""The rules that keep the house standing: who imports whom, how long a file is, what it names."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.order import SLOWEST_FIRST
from tests.support.paths import ROOT
from tests.support.private_names import PRIVATE, Classes, defined, listed
from tui.cli.commands import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

# Lines. A file is one subject, so this asks a question and is no ruler to cut along.
LONGEST = 600
# Paths of machines on which this was written. Put together here so as not to find itself.
MACHINES = ("work", "tmp/env", "root")
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(" + "|".join(MACHINES) + ")/")
# What an import of a test may look like: what is parsed then to be sure.
IMPORT_OF_TEST = re.compile(r"\bfrom\s+(\S*\.test_|\S+\s+import[\s(]+test_)")
# Words that the packages must not import, wherever in a file it stands.
FORBIDDEN = {
    "jobs": {
        "tui",
        "engine",
        "textual",
        "torch",
        "accelerate",
        "diffusers",
        "transformers",
        "peft",
    },
    "tui": {"engine", "torch", "accelerate", "diffusers", "transformers", "peft"},
    "engine": {"tui", "textual"},
}
COMMAND_MODULES = {place.split(":")[0] for names in COMMANDS.values() for place in names.values()}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path, names: set[str]) -> set[str]:
    """Top-level modules, of those named, that a file imports at run time or for types."""
    text = path.read_text(encoding="utf-8")
    if not re.search(rf"\b(import|from)\b.*\b({'|'.join(sorted(names))})\b", text):
        return set()  # most files; to parse them all takes a second
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found & names


def loaded_by(*names: str) -> set[str]:
    """Modules that are loaded after importing these in a fresh interpreter."""
    script = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    return set(done.stdout.split())


def test_the_dashboard_and_the_command_line_load_no_torch() -> None:
    loaded = loaded_by("tui.app.app", "tui.cli.commands", "jobs.service", *COMMAND_MODULES)
    assert "textual" in loaded, "else this test looks at the wrong thing"
    assert not loaded & {"torch", "accelerate", "diffusers", "transformers", "peft", "engine"}


def test_the_command_line_does_not_wait_for_textual() -> None:
    assert "textual" not in loaded_by("tui.cli.commands", "jobs.service", *COMMAND_MODULES)


def test_no_command_is_imported_before_it_is_run() -> None:
    assert loaded_by("tui.cli.commands") & COMMAND_MODULES == {"tui.cli.completion"}


def test_the_core_loads_neither_front_nor_engine() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules("jobs")]
    loaded = loaded_by(*(name.removesuffix(".__init__") for name in names))
    assert not loaded & FORBIDDEN["jobs"]


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_no_file_imports_what_its_package_may_not(package: str) -> None:
    files = modules(package)
    assert files
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in files
        if (found := imports_of(path, FORBIDDEN[package]))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", ["tui", "jobs", "engine"])
def test_no_file_starts_a_module_that_is_not_installed(package: str) -> None:
    """Modules are also named by strings, for `python -m`; an installed wheel has no tests."""
    names = re.compile(r"""["'](tests\.\w[\w.]*)["']""")
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in modules(package)
        if (found := names.findall(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", ["tui", "jobs", "engine"])
def test_no_file_is_longer_than_a_person_reads_at_once(package: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules(package)
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


@pytest.mark.slow
def test_private_names_of_libraries_are_those_that_the_documentation_lists() -> None:
    files = {str(path.relative_to(ROOT)): path for name in FORBIDDEN for path in modules(name)}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    classes = Classes(trees, set(FORBIDDEN))
    used = {(name, file) for file, tree in trees.items() for name in classes.foreign(tree)}
    table = listed(ROOT / "docs" / "upstream.md")
    assert used - table == set(), "list them in docs/upstream.md, or use a public name"
    unused = {(n, f) for n, f in table if not re.search(rf"\b{n}\b", texts.get(f, ""))}
    assert unused == set(), "delete them from docs/upstream.md"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from library._inner import thing", "_inner"),
        ("from library import _thing", "_thing"),
        ("import library._inner", "_inner"),
        ("library.thing._held", "_held"),
        ("getattr(thing, '_held', None)", "_held"),
        ("class A(B):\n    def f(self):\n        self._held", "_held"),
        ("class A(B):\n    def _f(self):\n        super()._f()", "_f"),
    ],
)
def test_uses_of_private_names_are_recognised(line: str, name: str) -> None:
    """So that the test above can fail."""
    tree = ast.parse(line)
    assert Classes({"": tree}, {"ours"}).foreign(tree) == {name}


def test_no_widget_takes_a_private_name_of_textual_by_chance() -> None:
    taken, seen = set(), 0
    for path in modules("tui"):
        file = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.bases:
                module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
                names = private_of_textual(getattr(module, node.name))
                taken |= {(name, file) for name in defined(node) if name in names}
                seen += bool(names)
    assert seen > 50, "else this test looks at the wrong thing"
    assert taken - listed(ROOT / "docs" / "upstream.md") == set()


def private_of_textual(kind: type) -> set[str]:
    """The private names of the classes of Textual that a class inherits from."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("textual."):
            names |= vars(base).keys()
            names |= set(base.__init__.__code__.co_names if "__init__" in vars(base) else ())
    return {name for name in names if PRIVATE.fullmatch(name)}


def ours() -> list[Path]:
    """Files that are, or are about to be, part of the repository."""
    if not (ROOT / ".git").exists():  # an unpacked archive: everything is part of it
        return [p for p in ROOT.rglob("*") if p.is_file() and "/." not in str(p.relative_to(ROOT))]
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = []
    files = ours()
    assert ROOT / "pyproject.toml" in files
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        if not any(f"/{name}/" in text for name in MACHINES):
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {match[0]}"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := MACHINE_PATHS.search(line))
        ]
    assert found == []


def test_machine_paths_are_recognised() -> None:
    """So that the test above can fail."""
    for parts in (["", "work", "x"], ["see ", "tmp", "env", "bin"], ["'", "root", ".cache"]):
        assert MACHINE_PATHS.search("/".join(parts))
    for text in ("network/work/x", "/workspace/x", "a/root/b"):
        assert not MACHINE_PATHS.search(text)


def test_the_files_that_start_first_exist() -> None:
    assert [name for name in SLOWEST_FIRST if not (ROOT / "tests" / name).is_file()] == []


def test_no_test_imports_a_test() -> None:
    """Helpers live in `tests/support`, so that any file can be changed, moved or run alone."""
    wrong = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for path in (ROOT / "tests").rglob("*.py")
        if IMPORT_OF_TEST.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and ".test_" in f"{node.module}.{node.names[0].name}"
    ]
    assert wrong == []
