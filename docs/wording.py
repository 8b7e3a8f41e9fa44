"""Check the words of screens, messages, documents and docstrings: `python docs/wording.py`.

Names each turn that docs/glossary.md has a usual word for, with file and line, and exits 1 if it
finds one. What users read (`docs/strings.py` and the documents) is checked against `_TURNS`,
docstrings and comments against `_PRIVATE`, and the names of variables, arguments, functions and
attributes against `_EMPTY_NAMES`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from typing import TYPE_CHECKING, Final

from strings import PACKAGES, ROOT, sentences

if TYPE_CHECKING:
    from collections.abc import Iterator

# A pattern, and what to write instead.
_WORST: Final = (
    (r"\banew\b", "again, from step 0"),
    (r"\bbegun\b(?!:| =|\()", "started"),
    (r"\bso many\b", "N, a number of, or a default"),
    (r"\bis none of\b", "is not"),
    (r"\bfor a while\b", "a time, or nothing"),
)
_TURNS: Final = (
    *_WORST,
    (r"\bpictures?\b", "image"),
    (r"\bcautions?\b", "warning"),
    (r"\bleft out\b|\bleav(?:es?|ing) (?:it |them )?out\b", "skipped, not set, remove"),
    (r"\b(?:go|goes|going|went|gone) on\b", "resume, continue, keep running"),
    (r"\b(?:is|are|was|were) told\b", "is reported, has the setting"),
    (r"\bas (?:told|said|asked)\b", "as set in the job"),
    (r"\blook(?:s|ed)? (?:again|before)\b|\blooked at\b", "refresh, cached, read"),
    (r"\bcame to\b", "was"),
    (r"\b(?:is|are) no (?:list|number|step|flag|file|place|directory|job|JSON)\b", "is not a …"),
    (r"\bthan there is\b", "than available"),
    (r"\bas it is here\b|\bis not here\b", "is the default; is not supported"),
    (r"\bfirmer\b|\bmore firmly\b", "SIGTERM, SIGKILL"),
    (r"\bmake room\b", "free space"),
    (r"\bwhole (?:model|pipeline|checkpoint)s?\b", "full"),
    (r"\bsomebody\b", "someone"),
    (r"\bst(?:ood|ands?) still\b|\bsigns? of life\b", "makes no progress, heartbeat"),
    (r"\b(?:a|of) \w+ of (?:its|their) own\b", "its own …"),
    (r"\bthat would do\b|\bwould do\b", "is enough"),
    (r"\bmend(?:s|ed|ing)?\b", "fix"),
    (r"\bcolour(?!s: |s`)", "color"),
    (r"\b\w*(?:quantis|normalis|minimis|maximis|regularis|optimis|initialis)\w*", "-iz-"),
    (r"\bgrey\b", "gray"),
    (r"\b1 ranks\b", "1 rank"),
)
# In docstrings and comments.
_PRIVATE: Final = (
    *_WORST,
    (r"\b(?:is|are|was|were) told\b", "is reported, is unknown"),
    (r"\b(?:go|goes|going|went|gone) on\b", "resume, continue, keep running"),
    (r"\bleft out\b|\blooked at\b", "skipped; read, checked, shown"),
    (r"\bin vain\b", "forever, for nothing"),
    (r"\bsomebody\b", "someone"),
    (r"\bone (?:may )?(?:thinks?|sees)\b", "was meant; nothing"),
    (r"\b[Pp]ictures?\b(?![:=(])", "image, frame"),
)
# Names that do not say what a thing is: write match, problem, message, gpus, path …
_EMPTY_NAMES: Final = frozenset({"found", "known", "one", "said", "told", "wanted"})
_ALLOWED_NAMES: Final = frozenset(
    {
        ("jobs/doctor/examine.py", "found"),  # a JSON field of `fsdp-tui doctor --json`
        ("jobs/queue/job.py", "wanted"),  # a column of the jobs database
        ("jobs/service/plan.py", "wanted"),
    }
)
# What is filled in, code and quoted names: not words of ours.
_NOT_WORDS: Final = re.compile(r"\{[^{}]*\}|`[^`]*`|\.\[\]\.\w+|#\w+")
_EXAMPLES: Final = "| instead of |"  # the table of CONTRIBUTING.md that shows what not to write


def main() -> int:
    """Print every problem, one per line.

    Returns:
        The exit status.
    """
    problems = [*_in_strings(), *_in_documents(), *_in_docstrings(), *_in_names()]
    for problem in problems:
        print(problem)
    return int(bool(problems))


def _in_strings() -> Iterator[str]:
    for sentence in sentences():
        for turn, instead in _turns(sentence.text, _TURNS):
            place = f"{sentence.path}:{sentence.line}"
            yield f'{place}: "{turn}" in “{_short(sentence.text)}”; write {instead}'


def _in_documents() -> Iterator[str]:
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]:
        example = code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.startswith("```")
            example = line.startswith(_EXAMPLES) or (example and line.startswith("|"))
            if code or example or path.name == "CHANGELOG.md":
                continue
            for turn, instead in _turns(line, _TURNS):
                yield f'{path.relative_to(ROOT)}:{number}: "{turn}"; write {instead}'


def _in_docstrings() -> Iterator[str]:
    for place, source in _sources():
        for number, text in (*_docstrings(source), *_comments(source)):
            for turn, instead in _turns(text, _PRIVATE):
                yield f'{place}:{number}: "{turn}"; write {instead}'


def _in_names() -> Iterator[str]:
    for place, source in _sources():
        for number, name in _names(ast.parse(source)):
            if name in _EMPTY_NAMES and (place, name) not in _ALLOWED_NAMES:
                yield f'{place}:{number}: the name "{name}"; write what the thing is'


def _sources() -> Iterator[tuple[str, str]]:
    """Path from the repository's root and text of every module."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every variable, argument, function and attribute that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name.lstrip("_")
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name.lstrip("_")


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The lines of all docstrings, numbered."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines = str(node.value.value).splitlines()
            yield from enumerate(lines, node.value.lineno)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#")


def _turns(text: str, banned: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, str]]:
    """`(turn, what to write instead)` for each that is in a text."""
    words = _NOT_WORDS.sub(" ", text)
    for pattern, instead in banned:
        if match := re.search(pattern, words, re.IGNORECASE):
            yield match[0], instead


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:79]}…"


if __name__ == "__main__":
    sys.exit(main())
