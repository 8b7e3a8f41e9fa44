"""A command that starts a training script: words of a shell, or of a file with a shell script."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common.places import read_text
from jobs.paths import exists
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from jobs.imports.common.draft import Draft, Rule

_ASSIGNMENT: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_VARIABLE: Final = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>\w+)(?::?-(?P<otherwise>[^}]*))?\})"
)
# What is quoted stays, what is behind a # of its own goes.
_COMMENT: Final = re.compile(
    r"""(?P<kept>'[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<![^\s;&|])\#[^\n]*""", re.DOTALL
)
_LEFT_OPEN: Final = re.compile(r"\$[\w{(@*]|`|%[A-Za-z_]\w*%")
_CONTINUED: Final = re.compile(r"(?:\\|(?<=[ \t])[\^`])[ \t]*\r?\n")  # sh, cmd and PowerShell
_ARRAY: Final = re.compile(
    r"^[ \t]*(?:(?:local|declare|export|readonly)[ \t]+(?:-\w+[ \t]+)*)?"
    r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=\((?P<words>[^()]*)\)",
    re.MULTILINE,
)
_OPENS: Final = re.compile(r"^[ \t]*(?:if|case|for|while|until)\b", re.MULTILINE)
_CLOSES: Final = re.compile(r"(?:^[ \t]*|;[ \t]*)(?:fi|esac|done)\b", re.MULTILINE)
_OPENERS: Final = ("if", "case", "for", "while", "until")
_CLOSERS: Final = ("fi", "esac", "done")
_BETWEEN: Final = ("then", "else", "do")
_ITEMS: Final = re.compile(r"\$\{(?P<name>\w+)\[[@*]\]\}")
_MARK: Final = "\x00"  # in no text that a shell takes
_ENDS: Final = frozenset("\n;&|")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_LARGEST: Final = 1 << 63  # a shell's numbers wrap around there
_OPERATIONS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: _quotient(a, b),
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}
_LAUNCHERS: Final = (
    *("torchrun", "accelerate-launch", "accelerate.commands.launch", "torch.distributed.run"),
)
# Switches of accelerate and torchrun; their other flags take a value.
_SWITCHES: Final = frozenset(
    {
        *("multi_gpu", "cpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "use_xla", "debug"),
        *(
            "quiet",
            "tpu",
            "mps",
            "ipex",
            "module",
            "no_python",
            "standalone",
            "use_mps_device",
            "m",
        ),
    }
)


@dataclass
class Command:
    """A command in its parts.

    Attributes:
        folder: From where its relative paths may be meant.
        script: Name of the training script, if there is one.
        launch: Flags of accelerate or torchrun.
        flags: Flags of the script; lists where a flag has several values, True where it has none.
        environment: Variables that are set for it alone.
        strays: Words that belong to nothing.
    """

    folder: Path
    script: str | None = None
    launch: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def read_command(words: Sequence[str]) -> tuple[str, Command]:
    """Return what is imported, as a short text, and the command.

    Args:
        words: The words of a command; or one text with all of it; or the name of a shell script.

    Raises:
        UserError: There is no command, or more than one that might be meant.
    """
    if len(words) != 1:
        return "the command line", split([*words], Path.cwd())
    (text,) = words
    path = Path(text)
    if exists(path) and path.is_file():
        return path.name, split(_training(read_text(path), str(path)), path.absolute().parent)
    if " " not in text.strip() and not text.startswith("-"):
        raise UserError(f"no such file: {text}", "pass a shell script, or the command in quotes")
    return "the command line", split(_training(text, "the command line"), Path.cwd())


def is_open(value: Any) -> bool:
    """Whether a value still has something in it that only a shell knows."""
    values = value if isinstance(value, list) else [value]
    return any(isinstance(word, str) and _LEFT_OPEN.search(word) is not None for word in values)


def rules_of_odd(flags: Mapping[str, Any], take_several: Collection[str]) -> dict[str, Rule]:
    """Make rules for flags whose values cannot be known, or that have too many words.

    Args:
        flags: Of a script.
        take_several: Those that may have several words.
    """
    several = [key for key, value in flags.items() if isinstance(value, list)]
    odd = dict.fromkeys(set(several) - set(take_several), _several)
    return odd | {key: _open for key, value in flags.items() if is_open(value)}


def _open(draft: Draft, key: str, value: Any) -> None:
    draft.unreadable(key, "uses a variable that is not set; set the key, or write out the value")


def _several(draft: Draft, key: str, value: Any) -> None:
    draft.unreadable(key, "several words; are quotation marks missing?")


def split(words: Sequence[str], folder: Path) -> Command:
    """Return the parts of a command."""
    command, rest = Command(folder), list(words)
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        command.environment[match["name"]] = match["value"]
        rest.pop(0)
    if (start := _launcher_at(rest)) is not None:
        command.launch, rest = _launch_flags(rest[start:])
    script = next((i for i, word in enumerate(rest) if not word.startswith("-")), None)
    flag = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    if script is not None and script < flag:
        named = [i for i in range(flag) if rest[i].endswith(".py")]
        at = named[0] if named else script
        command.script = rest[at]
        rest = rest[at + 1 :]
    command.flags, command.strays = _flags(rest)
    return command


def _launcher_at(words: Sequence[str]) -> int | None:
    """Where the flags of accelerate or torchrun begin."""
    for i, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "launch" and i and words[i - 1].rpartition("/")[2] == "accelerate":
            return i + 1
        if name in _LAUNCHERS:
            return i + 1
        if word.startswith("--") or name.endswith(".py"):
            return None
    return None


def _launch_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split words into the flags before the script's name, and the rest."""
    flags: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        key, equals, value = rest.pop(0).partition("=")
        name = normal_key(key)
        if not equals and name not in _SWITCHES and rest and not rest[0].startswith("--"):
            value, equals = rest.pop(0), "="
        flags[name] = value if equals else True
    return flags, rest


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split words into flags of the script, and words in front of them."""
    flags: dict[str, Any] = {}
    strays: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word.partition("=")
            name = normal_key(key)
            flags[name] = value if equals else True
        elif not name:
            strays.append(word)
        elif flags[name] is True:
            flags[name] = word
        else:
            before = flags[name] if isinstance(flags[name], list) else [flags[name]]
            flags[name] = [*before, word]
    return flags, strays


def _training(text: str, where: str) -> list[str]:
    """Return the words of the only training command in a shell script.

    Raises:
        UserError: There is none, or there are several.
    """
    training = [words for words in _commands(text, where) if _is_training(words)]
    launched = [words for words in training if _launcher_at(words) is not None]
    chosen = launched or training
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise UserError(
            f"{where} has no training command",
            "expected `accelerate launch …`, `torchrun …`, `python ….py …` or flags with --",
        )
    raise UserError(f"{where} has {len(chosen)} training commands", "pass one of them in quotes")


def _is_training(words: Sequence[str]) -> bool:
    flags = any(word.startswith("--") for word in words)
    runs = any(word.endswith(".py") for word in words)
    rest = [word for word in words if not _ASSIGNMENT.fullmatch(word)]
    return flags and (runs or _launcher_at(words) is not None or rest[0].startswith("--"))


def _commands(text: str, where: str) -> list[list[str]]:
    """Return the commands of a script, with its variables put in.

    Raises:
        UserError: A quotation is not closed.
    """
    text = re.sub(r"^[ \t]*#.*\n?", "", text, flags=re.MULTILINE)
    text = _CONTINUED.sub(" ", f"{text}\n")
    text, inner = _without_substitutions(text)
    text = _COMMENT.sub(lambda match: match["kept"] or "", text)
    text, arrays = _without_arrays(text, where)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(_ENDS))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    variables = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd()}
    commands: list[list[str]] = [[]]
    depth = 0  # of what decides whether a line runs
    try:
        for token in lexer:
            if token and set(token) <= _ENDS:
                first = commands[-1][0] if commands[-1] else ""
                depth += (first in _OPENERS) - (first in _CLOSERS)
                _keep_assignments(commands[-1], variables, sure=depth == 0 and token != "&&")
                commands.append([])
            else:
                items = _ITEMS.fullmatch(token)
                words = arrays.get(items["name"]) if items else None
                for word in [token] if words is None else words:
                    for mark, original in inner.items():
                        if mark in word:
                            word = word.replace(mark, _computed(original, variables))
                    commands[-1] += _filled_in(word, variables)
    except ValueError as error:
        raise UserError(
            f"{where} cannot be read ({error})", "is a quotation mark missing?"
        ) from None
    return [words for words in commands if words]


def _without_arrays(text: str, where: str) -> tuple[str, dict[str, list[str]]]:
    """Take arrays of words out of a script: `ARGS=(--seed 1 --rank 8)`.

    Those that are set where something else decides whether they are, are not known.

    Raises:
        UserError: A quotation is not closed.
    """
    arrays: dict[str, list[str]] = {}
    sets = Counter(re.findall(r"\b([A-Za-z_]\w*)\+?=\(", text))
    for match in _ARRAY.finditer(text):
        inside = len(_OPENS.findall(text[: match.start()])) > len(
            _CLOSES.findall(text[: match.start()])
        )
        sets[match["name"]] -= 0 if inside else 1
        try:
            words = shlex.split(match["words"])
        except ValueError as error:
            raise UserError(f"{where} cannot be read ({error})") from None
        before = arrays.get(match["name"], []) if match["more"] else []
        arrays[match["name"]] = before + words
    return _ARRAY.sub("", text), {k: v for k, v in arrays.items() if sets[k] <= 0}


def _without_substitutions(text: str) -> tuple[str, dict[str, str]]:
    """Put a mark in the place of each `$(…)`, `$((…))` and `` `…` ``, whose words are not ours.

    Returns:
        The text, and what each mark stands for.
    """
    out, inner, at = [], dict[str, str](), 0
    while at < len(text):
        end = _end_of_substitution(text, at)
        if end is None:
            out.append(text[at])
            at += 1
            continue
        mark = f"{_MARK}{len(inner)}{_MARK}"
        inner[mark] = text[at:end]
        out.append(mark)
        at = end
    return "".join(out), inner


def _end_of_substitution(text: str, at: int) -> int | None:
    """Return where the substitution that begins here ends; None if there is none, or no end."""
    if at and text[at - 1] == "\\":
        return None
    if text[at] == "`":
        return text.find("`", at + 1) + 1 or None
    if not text.startswith("$(", at):
        return None
    depth = 0
    for i in range(at + 1, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return None


def _computed(text: str, variables: Mapping[str, str]) -> str:
    """Return the number that `$((…))` stands for; the text where that cannot be known.

    Names of variables need no `$` there, and `/` and `%` round toward zero.
    """
    if not (text.startswith("$((") and text.endswith("))")):
        return text
    filled = " ".join(_filled_in(text[3:-2], variables))
    filled = _NAME.sub(lambda name: f"({variables.get(name[0], name[0])})", filled)
    try:
        number = _value(ast.parse(filled.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return text
    return str(number) if abs(number) < _LARGEST else text


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _value(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError: It has something else in it, or large numbers.
    """
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            numbers = _value(left), _value(right)
            if max(map(abs, numbers)) < _LARGEST:
                return _OPERATIONS[type(op)](*numbers)
    raise ValueError(ast.dump(node))


def _keep_assignments(words: Sequence[str], variables: dict[str, str], *, sure: bool) -> None:
    """Remember what a line of nothing but assignments sets; forget it where it may not run."""
    rest = [word for word in words if word not in ("export", "declare", "local", *_BETWEEN)]
    matches = [_ASSIGNMENT.fullmatch(word) for word in rest]
    for match in matches if rest and all(matches) else []:
        if match is not None and sure:
            variables[match["name"]] = match["value"]
        elif match is not None:
            variables.pop(match["name"], None)


def _filled_in(token: str, variables: Mapping[str, str]) -> list[str]:
    """Substitute variables in a word; a variable that holds flags becomes several words."""

    def value(match: re.Match[str]) -> str:
        name = match["plain"] or match["name"]
        return variables.get(name) or (
            match["otherwise"] if match["otherwise"] is not None else match[0]
        )

    filled = _VARIABLE.sub(value, token)
    if _VARIABLE.fullmatch(token) and filled.lstrip().startswith("--"):
        return shlex.split(filled)
    return [filled]
