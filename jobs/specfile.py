"""Read a job from YAML and flags, with errors that name the key, the line and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from jobs.conflicts import find_conflicts
from jobs.datasets import Dataset
from jobs.errors import SpecError
from jobs.families import get_family
from jobs.paths import exists, expand
from jobs.prompts import ValidationPrompt
from jobs.spec import JobSpec, field_choices, field_names, is_switch, takes_many, takes_number
from jobs.spellings import as_bool, did_you_mean, normal_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pydantic_core import ErrorDetails

# What the mappings in lists are.
_ENTRIES: Final[dict[str, type[BaseModel]]] = {
    "datasets": Dataset,
    "validation_prompts": ValidationPrompt,
}


def load_spec(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    base: Path | None = None,
    ignoring: Collection[str] = (),
) -> JobSpec:
    """Read and check a job.

    Args:
        path: The YAML file; None when `overrides` say everything.
        overrides: Values from flags or a form; they win over the file.
        base: Relative model and dataset paths are looked up here first (default: the working
            directory), then beside the YAML file.
        ignoring: Keys whose conflicts do not matter here, such as the model where only the data is
            looked at.

    Returns:
        The job, with absolute paths where the named files exist.

    Raises:
        SpecError: Anything that cannot be run as written, all problems in one line.
    """
    values, lines = ({}, {}) if path is None else _read_yaml(path)
    where = str(path) if path is not None else "flags"
    problems: list[str] = []
    for key, value in (overrides or {}).items():
        name = normal_key(key)
        values[name] = value
        lines.pop(name, None)

    known = field_names()
    for key in list(values):
        if key not in known:
            problems.append(f'{_at(lines, key)}unknown key "{key}"{did_you_mean(key, known)}')
            del values[key]
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as error:
        problems += [f"{_at(lines, _key_of(e))}{_in_words(e)}" for e in error.errors()]
        raise SpecError(f"{where}: {'; '.join(problems)}") from None
    if problems:
        raise SpecError(f"{where}: {'; '.join(problems)}")

    get_family(spec.model_family, spec.model_flavour)
    conflicts = [found for found in find_conflicts(spec) if found.key not in ignoring]
    if conflicts:
        raise SpecError(f"{where}: {'; '.join(_at(lines, c.key) + c.message for c in conflicts)}")
    roots = [base or Path.cwd()] + ([path.absolute().parent] if path is not None else [])
    return _with_absolute_paths(spec, roots)


def dump_spec(spec: JobSpec, *, only_set: bool = False) -> str:
    """The job as YAML that `load_spec` reads back to an equal job."""
    values = spec.to_dict(only_set=only_set)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if yaml.safe_load(text) == values:
        return text
    # Line separators of Unicode, for one, come back changed unless they are escaped.
    return yaml.safe_dump(values, sort_keys=False)


def parse_flags(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read `--key=value`, `--key value` and bare `--key` (true).

    Returns:
        Values by normal key, and the words that are no flags. A key that takes several values may
        be given several times.
    """
    values: dict[str, Any] = {}
    others: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            others.append(word)
            continue
        key, equals, value = word.partition("=")
        name = normal_key(key)
        if not equals:
            follows = bool(rest) and not rest[0].startswith("--")
            if follows and (not is_switch(name) or _is_setting(name, rest[0])):
                value = rest.pop(0)
            else:
                value = "true"
        if name in values and takes_many(name):
            before = values[name]
            values[name] = [*(before if isinstance(before, list) else [before]), value.strip()]
        else:
            values[name] = value.strip()  # given twice: the later one counts
    return values, others


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Values and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"no such job file: {path}") from None
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory, not a job file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the job file {path} ({error})") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (ValueError, OverflowError, RecursionError) as error:  # what YAML itself cannot build
        raise SpecError(f"{path}: a value cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{path}:{at} is not valid YAML: {problem}") from None
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        raise SpecError(f"{path}: expected `key: value` lines, found none")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for key_node, _ in node.value:
        name = normal_key(str(key_node.value))
        if name in lines:
            raise SpecError(
                f'{path}: line {key_node.start_mark.line + 1}: "{name}" is given twice '
                f"(first on line {lines[name]})"
            )
        lines[name] = key_node.start_mark.line + 1
    for key, value in data.items():
        values[normal_key(str(key))] = value
    return values, lines


def _is_setting(switch: str, word: str) -> bool:
    """Whether the word after a switch belongs to it; else it is a word of its own."""
    return isinstance(as_bool(word), bool) or (takes_number(switch) and word.isdigit())


def _at(lines: Mapping[str, int], key: str) -> str:
    return f"line {lines[key]}: " if key in lines else ""


def _key_of(error: ErrorDetails) -> str:
    return str(error["loc"][0]) if error["loc"] else ""


def _in_words(error: ErrorDetails) -> str:
    """One pydantic error as a sentence for a person."""
    key = _key_of(error)
    value = error["input"]
    inner = [str(part + 1) if isinstance(part, int) else str(part) for part in error["loc"][1:]]
    if error["type"] == "extra_forbidden" and inner:
        *where, word = inner
        known = did_you_mean(word, _ENTRIES[key].model_fields)
        return f'{key}: entry {" ".join(where)} has an unknown key "{word}"{known}'
    choices = field_choices(key) if key in JobSpec.model_fields else ()
    if choices:
        allowed = ", ".join(choices)
        return f'{key}: "{value}" is not one of {allowed}{did_you_mean(str(value), choices)}'
    message = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "string_pattern_mismatch":
        message = "use letters, digits, dot, dash and underscore, beginning with a letter or digit"
    place = f"entry {' '.join(inner)}: " if inner else ""
    return f"{key}: {place}{message} (got {value!r})"


def _with_absolute_paths(spec: JobSpec, roots: Sequence[Path]) -> JobSpec:
    update: dict[str, Any] = {}
    for key in ("pretrained_model_name_or_path", "dataset"):
        if path := _absolute(getattr(spec, key), roots):
            update[key] = path
    if spec.datasets:
        update["datasets"] = [
            entry.model_copy(update={"path": _absolute(entry.path, roots) or entry.path})
            for entry in spec.datasets
        ]
    if spec.cache_dir:
        update["cache_dir"] = str(expand(spec.cache_dir).absolute())
    return spec.model_copy(update=update) if update else spec


def _absolute(text: str, roots: Sequence[Path]) -> str | None:
    """The path that a text names below one of the roots, if there is one or it must be one."""
    if not text:
        return None
    path = expand(text)
    for candidate in [path] if path.is_absolute() else [root / path for root in roots]:
        if exists(candidate):
            return str(candidate.resolve())
    return str((roots[0] / path).absolute()) if text.startswith(("~", "./", "../")) else None
