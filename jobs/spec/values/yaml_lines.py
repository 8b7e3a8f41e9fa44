"""Read a file of `key: value` lines, YAML or JSON, with errors that name the line."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final

import yaml

from jobs.errors import SpecError
from jobs.spec.values.spellings import normal_key
from jobs.untrusted.files import LARGEST_TEXT, read_regular
from jobs.untrusted.text import harmless

if TYPE_CHECKING:
    from pathlib import Path

STDIN: Final = "-"  # the file name that stands for standard input
_MOST_VALUES: Final = 20_000  # including keys and list entries
MOST_LEVELS: Final = 30
"""How deep the values of a file that a person writes may be nested."""
_LONGEST_NUMBER: Final = 4300  # characters; Python's own limit


def read_mapping(path: Path, what: str = "job file") -> tuple[dict[str, Any], dict[str, int]]:
    """Return values by normalized key, and the line of each key.

    Args:
        path: The file; `-` is standard input. JSON is YAML except for tabs between tokens.
        what: What it should be, for errors.

    Raises:
        SpecError: It cannot be read, has no keys, or has a key twice.
    """
    return parse_mapping(_read(path, what), path)


def parse_mapping(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse the text of a file: values by normalized key, and the line of each key.

    Raises:
        SpecError: It has no keys, or a key twice.
    """
    if path.suffix.lower() == ".json":
        text = text.replace("\t", "  ")
    try:
        node, data = parse_yaml(text)
    # values that YAML itself cannot construct
    except (ValueError, OverflowError, RecursionError) as error:
        raise SpecError(f"{path}: a value cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{path}:{at} is not valid YAML: {problem}") from None
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        raise SpecError(f"{path}: expected `key: value` lines, found none")
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        name = normal_key(str(key_node.value))
        if name in lines:
            raise SpecError(
                f'{path}: line {key_node.start_mark.line + 1}: "{name}" is set twice (first on '
                f"line {lines[name]})"
            )
        lines[name] = key_node.start_mark.line + 1
    values = {normal_key(str(key)): value for key, value in data.items()}
    # YAML parses keys such as `yes`, `0x10` and `<<` into something other than their text
    for name in values:
        lines.setdefault(name, node.start_mark.line + 1)
    return values, lines


def parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Parse a text once into a tree and its values.

    Raises:
        ValueError: It is larger than anything a user writes.
        yaml.YAMLError: It is not YAML.
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"larger than {LARGEST_TEXT >> 20} MiB")
    loader = _Limited(text)
    try:
        node = loader.get_single_node()
        if node is not None and _expanded(node, {}) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values through aliases")
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


class _Limited(yaml.SafeLoader):
    """Reject input that takes minutes or all memory to build: many aliases, digits or levels."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        for what, count, most in (
            ("values", self._nodes, _MOST_VALUES),
            ("levels", self._depth, MOST_LEVELS),
        ):
            if count > most:
                raise ValueError(f"more than {most} {what}")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            digits = len(node.value)
            if digits > _LONGEST_NUMBER:
                raise ValueError(f"a number of {digits} characters")
            if ":" in node.value:  # YAML 1.1 parses a time, 1:30:00, as 5400
                node.tag = "tag:yaml.org,2002:str"
        return node


def _expanded(node: yaml.Node, counts: dict[int, float]) -> float:
    """Count the values of a tree with all aliases expanded; infinite if it contains itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [
            child for part in parts for child in (part if isinstance(part, tuple) else (part,))
        ]
        counts[id(node)] = 1 + sum(_expanded(child, counts) for child in parts)
    return counts[id(node)]


def dump_mapping(values: dict[str, Any]) -> str:
    """Dump values as YAML that reads back equal and is safe to print in a terminal."""
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if harmless(text) == text and yaml.safe_load(text) == values:
        return text
    # Unicode line separators, for example, do not survive a round trip unless they are escaped.
    escaped: str = yaml.safe_dump(values, sort_keys=False)
    return escaped


def _read(path: Path, what: str) -> str:
    try:
        if str(path) == STDIN:
            return sys.stdin.buffer.read(LARGEST_TEXT + 1).decode("utf-8")
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        raise SpecError(f"no such {what}: {path}") from None
    except IsADirectoryError:
        article = "an" if what[0] in "aeiou" else "a"
        raise SpecError(f"{path} is a directory, not {article} {what}") from None
    except OSError as error:
        raise SpecError(f"cannot read the {what} {path} ({error.strerror or error})") from None
    except ValueError as error:
        raise SpecError(f"cannot read the {what} {path} ({error})") from None
