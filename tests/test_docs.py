"""The documents: links lead somewhere, commands and job files are accepted, made parts are current.

Commands are read by the real command line up to where they would run; those that need neither a
job nor a file run.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import click
import pytest
import yaml
from click.testing import CliRunner

from jobs.notify import NotifyConfig
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from tests.support.paths import ROOT
from tui.cli.commands import cli
from tui.cli.job_arguments import JobCommand
from tui.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_LINES: Final = 150  # of the README
OUTSIDE: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES: Final = [ROOT / name for name in OUTSIDE] + sorted((ROOT / "docs").glob("*.md"))
IDS: Final = [str(page.relative_to(ROOT)) for page in PAGES]

LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.M)
MADE: Final = re.compile(r"<!-- (\w+): .*? -->\n.*?<!-- /\1 -->", re.S)
# Between two commands of a line, and in front of what is not a word of one.
BETWEEN: Final = frozenset({"&&", "||", "|", ";", ">"})
# A string of the code that goes on in the next line.
CONTINUED: Final = re.compile(r"""["']\s*\n\s*f?["']""")
SHORTEST: Final = 5  # characters of a message that are looked for
# What every job needs, for examples that show only a few keys.
BASE: Final = {
    "name": "example",
    "pretrained_model_name_or_path": "a/b",
    "dataset": "c",
    "num_processes": 2,
}


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(language: str) -> Iterator[Any]:
    """Code blocks by hand of a language, each with where it is; "" for shell."""
    for page, name in zip(PAGES, IDS, strict=True):
        text = MADE.sub(lambda made: "\n" * made[0].count("\n"), read(page))
        for found in BLOCK.finditer(text):
            if found[1] == language:
                line = text[: found.start()].count("\n") + 1
                yield pytest.param(found[2], id=f"{name}:{line}")


# -- README --------------------------------------------------------------------------------


def test_the_readme_is_a_page() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= MOST_LINES


def test_ci_types_the_first_two_lines_of_the_readme() -> None:
    assert "tests/versions.sh readme" in read(ROOT / ".ci" / "run")
    (script,) = re.findall(r"sed -n '(.*)' README.md", read(ROOT / "tests" / "versions.sh"))
    sed = subprocess.run(
        ["sed", "-n", script, "README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sed.stdout.splitlines()[:2] == [
        "pip install -c requirements.lock . && fsdp-tui demo",
        "pip install -c requirements.lock -e '.[test]' && pytest",
    ]


# -- links ---------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as both MkDocs and code hosts make them."""
    found = set()
    for heading in HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"\s+", "-", plain))
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = BLOCK.sub("", read(page))
    broken = []
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(read(target))):
            broken.append(link)
    assert not broken


def test_the_site_has_every_page() -> None:
    text = read(ROOT / "mkdocs.yml")
    missing = [page.name for page in PAGES[len(OUTSIDE) :] if f": {page.name}\n" not in text]
    assert not missing


# -- what comes from the code --------------------------------------------------------------


def test_made_parts_are_current() -> None:
    """In a process of its own: click remembers how a command was first called."""
    words = [sys.executable, str(ROOT / "docs" / "make.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert (done.returncode, done.stdout) == (0, ""), "run `python docs/make.py`"


@cache
def strings_of_the_code() -> str:
    """The source of what people run, with strings of several lines in one."""
    sources = (path for name in ("tui", "jobs", "engine") for path in (ROOT / name).rglob("*.py"))
    return CONTINUED.sub("", "\n".join(map(read, sources)))


def quoted_messages() -> list[str]:
    """Messages in the first column of the tables of the troubleshooting page."""
    rows = re.findall(r"^\| `([^`]+)` \|", read(ROOT / "docs" / "troubleshooting.md"), re.M)
    assert len(rows) > 40
    return rows


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("…")]
    parts = [part for part in parts if len(part) >= SHORTEST]
    assert parts, "nothing to look for"
    missing = [part for part in parts if part not in strings_of_the_code()]
    assert not missing, "the message has changed: change docs/troubleshooting.md"


# -- commands ------------------------------------------------------------------------------


def commands_of(block: str) -> Iterator[list[str]]:
    """The words behind `fsdp-tui` of every command line in a shell block."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "fsdp-tui" in words:
            words = words[words.index("fsdp-tui") + 1 :]
            end = next((at for at, word in enumerate(words) if word in BETWEEN), len(words))
            yield words[:end]


def check(words: list[str]) -> None:
    """Read a command line as far as its options and keys.

    Raises:
        click.ClickException, UserError: It would be refused.
    """
    name, command, rest = "fsdp-tui", cli, list(words)
    if rest[:1] == ["--on"]:  # another machine runs the rest, as this one would
        rest = rest[2:]
    context: click.Context | None = None
    while isinstance(command, click.Group):
        at = next((at for at, word in enumerate(rest) if not word.startswith("-")), len(rest))
        context = (
            command.make_context(name, rest[:at], parent=context)
            if at
            else click.Context(command, parent=context, info_name=name)
        )
        if at == len(rest):
            return
        name, command, rest = command.resolve_command(context, rest[at:])
        assert command is not None
    context = command.make_context(name, rest, parent=context)
    if isinstance(context.command, JobCommand) or "words" in context.params:
        values, _ = parse_flags(context.params["words"])
        unknown = values.keys() - JobSpec.model_fields.keys()
        assert not unknown


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("block", [*blocks(""), *blocks("sh")])
def test_every_command_is_one(block: str) -> None:
    for words in commands_of(block):
        check(words)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "line", ["fsdp-tui summit job.yaml", "fsdp-tui list --wach", "fsdp-tui submit --lora_rang=8"]
)
def test_a_command_that_is_none_is_found(line: str) -> None:
    (words,) = commands_of(line)
    with pytest.raises((click.ClickException, AssertionError)):
        check(words)


# Commands that read nothing but the code and the machine: these run.
ALONE: Final = [
    ["families"],
    ["families", "flux", "--json"],
    ["gpus"],
    ["keys"],
    ["list"],
    ["settings"],
    ["settings", "--keys"],
    ["cache", "list"],
    ["templates"],
    ["--version"],
]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("words", ALONE, ids=" ".join)
def test_a_command_that_needs_no_job_runs(words: list[str]) -> None:
    assert f"fsdp-tui {' '.join(words)}" in "\n".join(map(read, PAGES))
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout


# -- other commands ------------------------------------------------------------------------


def other_commands() -> Iterator[list[str]]:
    """The words of every `python`, `pytest` and `pip` command, in blocks and in sentences."""
    pattern = re.compile(r"(?:^|&& |`)((?:python3?|pytest|pip) [^`#\n]*)", re.M)
    for page in PAGES:
        for line in pattern.findall(MADE.sub("", read(page))):
            if "…" not in line:
                yield shlex.split(line.split(" && ")[0])


def test_scripts_tests_modules_and_extras_of_commands_exist() -> None:
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    missing = []
    for words in other_commands():
        for before, word in pairwise(words):
            if word.endswith(".py") or word.startswith("tests/"):
                found = (ROOT / word).exists()
            elif before == "-m" and words[0] == "python" and word != "venv":
                module = ROOT / word.replace(".", "/")
                found = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
            else:
                found = set(re.findall(r"\[(\w+)\]$", word)) <= extras.keys()
            missing += [] if found else [" ".join(words)]
    assert not missing
    assert len(list(other_commands())) > 20


# -- YAML ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_job_and_every_settings_file_is_accepted(block: str, tmp_path: Path) -> None:
    written = yaml.safe_load(block)
    path = tmp_path / "example.yaml"
    if written.keys() <= JobSpec.model_fields.keys():
        whole = "pretrained_model_name_or_path" in written
        unneeded = {"dataset"} if "datasets" in written else set()
        added = {} if whole else {key: BASE[key] for key in BASE.keys() - unneeded}
        path.write_text(yaml.safe_dump(added | written))
        warnings: list[str] = []
        load_spec(path, on_note=warnings.append)
        assert not warnings
    elif "stalled_after" in written:  # of notify.yaml, whose `on` YAML reads as true
        NotifyConfig.model_validate({"on" if k is True else k: v for k, v in written.items()})
    else:
        path.write_text(block)
        assert read_settings(path).problems == ()


# -- wording -------------------------------------------------------------------------------


def test_empty_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    wording = importlib.import_module("wording")
    source = "def known(one, *, told=0):\n    found, self._said = [wanted for wanted in one]"
    names = {name for _, name in wording._names(ast.parse(source))}
    assert names == wording._EMPTY_NAMES
    (problem, *_) = wording._turns("it goes on", wording._PRIVATE)
    assert problem[0] == "goes on"
