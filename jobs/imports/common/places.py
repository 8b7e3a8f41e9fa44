"""Files that a configuration is in or names."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import yaml

from jobs.errors import UserError
from jobs.paths import exists, expand
from jobs.spec.values.yaml_lines import MOST_LEVELS, parse_yaml
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.common.draft import Draft

_Content = TypeVar("_Content", dict[Any, Any], list[Any])

_PARENTS: Final = 3


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        UserError: It cannot be read, or is none.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path} is a directory, not a configuration file")
        text = read_regular(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"cannot read {path} ({error})") from None
    if "\0" in text:
        raise UserError(f"{path} is not a text file")
    return text


def parse(path: Path, *, otherwise: str = ".json") -> Any:
    """Parse a JSON, YAML or TOML file.

    Args:
        path: The file; what it is, its suffix says.
        otherwise: What files of other suffixes are.

    Raises:
        UserError: It cannot be read, or is not what its name says; says where.
    """
    text = read_text(path)
    suffix = path.suffix.lower()
    suffix = suffix if suffix in (".json", ".yaml", ".yml", ".toml") else otherwise
    try:
        if suffix in (".yaml", ".yml"):
            return parse_yaml(text)[1]
        value = tomllib.loads(text) if suffix == ".toml" else json.loads(text)
        _refuse_deep(value)
        return value
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}:{at} is not valid YAML: {problem}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno} is not valid JSON: {error.msg}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}: a value cannot be read ({error})") from None


def _refuse_deep(value: Any) -> None:
    """Refuse what is nested deeper than YAML may be; rules go down into values by recursion.

    Raises:
        ValueError: It is.
    """
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"more than {MOST_LEVELS} levels")


def read_beside(
    draft: Draft, key: str, value: Any, kind: type[_Content], instead: str
) -> tuple[Path, _Content] | None:
    """Read the file that a key names.

    Args:
        draft: The job; its report says why nothing can be read.
        key: What names the file.
        value: Its path.
        kind: What the file must hold.
        instead: What to do where it cannot be read.

    Returns:
        The file and its content; None where it cannot be read.
    """
    path = find_beside(draft.folder, str(value), by_name=True)
    if path is None:
        draft.unreadable(key, f"no such file; {instead}")
        return None
    try:
        content = parse(path)
    except UserError as error:
        draft.unreadable(key, f"{error}; {instead}")
        return None
    if not isinstance(content, kind):
        what = "keys" if kind is dict else "list"
        draft.unreadable(key, f"{path.name} has no {what}; {instead}")
        return None
    return path, content


def find_beside(folder: Path, text: str, *, by_name: bool = False) -> Path | None:
    """Resolve a relative path of a configuration.

    The tools look from where they were started, which is not known: often above the folder that
    the configuration lies in.

    Args:
        folder: Where the configuration is.
        text: The path.
        by_name: Also look for a file of that name beside the configuration.
    """
    try:
        path = expand(text.replace("\\", "/"))
    except UserError:  # no such home
        return None
    above = [folder, *list(folder.absolute().parents)[:_PARENTS]]
    places = [path] if path.is_absolute() else [root / path for root in above]
    if by_name and path.name:
        places.append(folder / path.name)
    return next((place for place in places if exists(place)), None)
