"""Read a job from YAML and flags, with errors that name the key, the line and what is allowed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import Problem, SpecError
from jobs.paths import exists, expand
from jobs.spec.families import get_family
from jobs.spec.file.accelerate_file import KEY as ACCELERATE
from jobs.spec.file.accelerate_file import merge_config
from jobs.spec.file.old_keys import FOREIGN, translate
from jobs.spec.file.value_errors import in_words, key_of
from jobs.spec.job_spec import FOLLOWS, JobSpec, field_names, key_facts, upgraded
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.values.spellings import as_none, did_you_mean, normal_key
from jobs.spec.values.value_types import read_settings
from jobs.spec.values.yaml_lines import STDIN, dump_mapping, read_mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from jobs.spec.values.datasets import Dataset


_MAX_LISTED: Final = 10  # unknown keys listed
_LONGEST_KEY: Final = 60  # characters shown of a key
_HALF: Final = re.compile("[\ud800-\udfff]")


def load_spec(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    base: Path | None = None,
    ignoring: Collection[str] = (),
    on_note: Callable[[str], None] = lambda note: None,
) -> JobSpec:
    """Read and check a job.

    Args:
        path: The YAML file; None if `overrides` has everything.
        overrides: Values from flags or a form; they override the file.
        base: Directory where relative model and dataset paths are looked up first (default: the
            working directory); second is the YAML file's directory.
        ignoring: Keys whose conflicts do not matter here, for example the model's when only the
            data is checked.
        on_note: Called with a sentence for each value that was interpreted as another one.

    Returns:
        The job, with absolute paths of the named files that exist.

    Raises:
        SpecError: The job cannot run; all problems in one line.
    """
    written, lines = ({}, {}) if path is None else read_mapping(path)
    where = "flags" if path is None else "standard input" if str(path) == STDIN else str(path)
    roots = [base or Path.cwd()] + ([path.absolute().parent] if path is not None else [])
    flags = {normal_key(key): value for key, value in (overrides or {}).items()}
    written = {key: value for key, value in written.items() if not _is_replaced(key, flags)}
    lines = {key: line for key, line in lines.items() if key not in flags}

    values: dict[str, Any] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for part in (written, flags):
        done = translate(part)
        values = upgraded(values) | done.values
        notes += done.notes
        problems += done.problems
    problems += _unreadable(values)
    values = {k: v for k, v in values.items() if k in field_names() and not _is_invalid_text(k, v)}
    try:
        values, more = _with_accelerate(values, roots)
        spec = JobSpec.model_validate(values)
    except SpecError as error:
        problems.append(Problem(ACCELERATE, str(error)))
    except ValidationError as error:
        problems += [
            Problem(key_of(detail), in_words(detail), named=True) for detail in error.errors()
        ]
    if not problems:
        problems += _conflicts(spec, ignoring)
    if problems:
        raise SpecError.of(
            where, (replace(problem, line=lines.get(problem.key)) for problem in problems)
        )
    for note in (*notes, *more):
        on_note(note)
    return _with_absolute_paths(spec, roots)


def _is_replaced(key: str, flags: Mapping[str, Any]) -> bool:
    """Return whether a flag replaces a file's key by another one, as for a job's length."""
    others = [other for pair in FOLLOWS.items() if key in pair for other in pair if other != key]
    return key not in flags and any(as_none(flags.get(other)) is not None for other in others)


def _unreadable(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield unknown keys, and strings with invalid characters."""
    names = field_names()
    unknown = [key for key in values if key not in names]
    for key in unknown[:_MAX_LISTED]:
        named = key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…"
        instead = f": {FOREIGN[key]}" if key in FOREIGN else did_you_mean(named, names)
        yield Problem(key, f'unknown key "{named}"{instead}')
    if unknown[_MAX_LISTED:]:
        yield Problem("", f"{len(unknown) - _MAX_LISTED} more unknown keys")
    for key, value in values.items():
        if key in names and _is_invalid_text(key, value):
            yield Problem(key, f"{key} has an invalid character")


def _conflicts(spec: JobSpec, ignoring: Collection[str]) -> Sequence[Problem]:
    """Return the conflicts between values that are valid on their own."""
    try:
        get_family(spec.model_family, spec.model_flavour)
    except SpecError as error:
        return error.problems
    return [conflict for conflict in find_conflicts(spec) if conflict.key not in ignoring]


def _is_invalid_text(key: str, value: Any) -> bool:
    """Return whether a value contains half of a surrogate pair, or a path a zero byte."""
    if isinstance(value, str):
        return _HALF.search(value) is not None or (_is_path(key) and "\0" in value)
    if isinstance(value, dict):
        return any(_is_invalid_text(str(name), entry) for name, entry in value.items())
    return isinstance(value, list) and any(_is_invalid_text("", entry) for entry in value)


def dump_spec(spec: JobSpec, *, only_set: bool = False) -> str:
    """Return the job as YAML that `load_spec` reads back to an equal job."""
    return dump_mapping(spec.to_dict(only_set=only_set))


def _with_accelerate(
    values: dict[str, Any], roots: Sequence[Path]
) -> tuple[dict[str, Any], list[str]]:
    """Merge the values with those of the job's accelerate config, if any; also return notes.

    Raises:
        SpecError: The config cannot be read, or is for something unsupported.
    """
    named = values.get(ACCELERATE)
    try:
        config = read_settings(named)
    except ValueError:  # reported with the other values
        return values, []
    name = "it"
    if isinstance(config, str):
        path = expand(config)
        existing = [candidate for root in roots if exists(candidate := root / path)]
        path = existing[0] if existing else path
        try:
            config, name = read_mapping(path, "accelerate config")[0], path.name
        except SpecError as error:
            raise SpecError(f"{ACCELERATE}: {error}") from None
    return merge_config(values, config, name) if config else (values, [])


def _is_path(key: str) -> bool:
    return key == "path" or (key in JobSpec.model_fields and key_facts(key).path)


def _with_absolute_paths(spec: JobSpec, roots: Sequence[Path]) -> JobSpec:
    update: dict[str, Any] = {}
    for key in ("pretrained_model_name_or_path", "dataset", "init_lora", "training_adapter"):
        if path := _absolute(getattr(spec, key) or "", roots):
            update[key] = path
    if spec.datasets:
        update["datasets"] = [
            entry.model_copy(update=_absolute_entry(entry, roots)) for entry in spec.datasets
        ]
    if any(prompt.conditioning_image for prompt in spec.validation_prompts):
        update["validation_prompts"] = [
            prompt.model_copy(
                update={"conditioning_image": _all_absolute(prompt.conditioning_image, roots)}
            )
            for prompt in spec.validation_prompts
        ]
    for key in ("cache_dir", "logging_dir"):
        if text := getattr(spec, key):
            update[key] = str(expand(text).absolute())
    return spec.model_copy(update=update) if update else spec


def _absolute_entry(entry: Dataset, roots: Sequence[Path]) -> dict[str, Any]:
    """Return the absolute paths of a dataset entry, by key."""
    return {
        "path": _absolute(entry.path, roots) or entry.path,
        "mask_path": _absolute(entry.mask_path or "", roots) or entry.mask_path,
        "conditioning_path": _all_absolute(entry.conditioning_path, roots),
    }


def _all_absolute(texts: Sequence[str] | None, roots: Sequence[Path]) -> list[str] | None:
    return None if texts is None else [_absolute(text, roots) or text for text in texts]


def _absolute(text: str, roots: Sequence[Path]) -> str | None:
    """Resolve a path below one of the roots; None if it does not exist and need not."""
    if not text:
        return None
    path = expand(text)
    for candidate in [path] if path.is_absolute() else [root / path for root in roots]:
        if exists(candidate):
            return str(candidate.resolve())
    return str((roots[0] / path).absolute()) if text.startswith(("~", "./", "../")) else None
