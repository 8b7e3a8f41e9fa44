"""`fsdp-tui keys`, `templates` and `diff`: describe job keys, and compare two jobs."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from jobs.errors import UserError
from jobs.queue.store import Store
from jobs.spec.file.diff import differences
from jobs.spec.file.load import load_spec
from jobs.spec.file.templates import list_templates, templates_home
from jobs.spec.job_spec import JobSpec, field_group, field_words, is_switch, takes_many, takes_none
from jobs.spec.noise_levels import preview
from jobs.spec.values.spellings import did_you_mean, normal_key
from tui.cli.echo import echo
from tui.cli.job_arguments import ID, JSON, warn
from tui.text.format import cut, in_words
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.spec.file.templates import Template


# -- keys -----------------------------------------------------------------------------------
# `fsdp-tui keys`: list all job keys for users, scripts and the documentation.


_NOISE: Final = "timestep_sampling"
_LEAST: Final = 40  # columns; a narrower terminal wraps lines itself
_KINDS: Final = {"int": "number", "float": "number", "bool": "true or false", "str": "text"}


@click.command()
@click.argument("names", nargs=-1, metavar="[KEY | GROUP …]")
@click.option("--markdown", is_flag=True, help="Print tables, as in docs/job-keys.md.")
@JSON
def keys(names: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """List job keys: values, default, meaning.

    Each key is also a flag of submit, run, resume and data: --lora_rank=8, --lora-rank 8.

    \b
    fsdp-tui keys                 all keys, by group
    fsdp-tui keys fsdp devices    two groups
    fsdp-tui keys lora_rank       one key
    """
    chosen = _choose(names)
    if as_json:
        echo(json.dumps([facts(name) for name in chosen]))
    elif markdown:
        echo(tables(chosen))
    else:
        columns = max(_LEAST, min(100, shutil.get_terminal_size((80, 24)).columns))
        echo(_text(chosen, columns))
        if chosen == [_NOISE]:
            echo("\n" + "\n".join(f"      {line}" for line in preview(columns - 6)))


def facts(name: str) -> dict[str, Any]:
    """Return a key as JSON values."""
    field = JobSpec.model_fields[name]
    return {
        "key": name,
        "group": field_group(name),
        "values": values_of(name),
        "words": list(field_words(name)),
        "default": field.default,
        "optional": takes_none(name),
        "help": field.description,
    }


def values_of(name: str) -> str:
    """Summarize a key's allowed values."""
    field, words = JobSpec.model_fields[name], field_words(name)
    annotation = str(field.annotation)
    kinds = [word for part, word in _KINDS.items() if re.search(rf"\b{part}\b", annotation)]
    kind = " ".join([" or ".join(dict.fromkeys(kinds)), *_limits(name)])
    if words and not is_switch(name) and name != "model_family":
        if "number" in kinds:
            kind = " ".join(["number", *_limits(name)])
            return f"{kind}, or {' or '.join(words)}"
        return " · ".join(words) + (" · pkg.mod.name" if name == "fsdp_auto_wrap_policy" else "")
    if "dict[" in annotation:
        besides = {"str |": "file or ", "int |": "number or "}
        return f"{besides.get(annotation[:5], '')}mapping"
    if takes_many(name):
        return "number or list" if name in ("gpus", "resolution") else "list"
    if is_switch(name):
        return "true or false, or a number" if "int" in annotation else "true or false"
    return kind


def _limits(name: str) -> list[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    field = JobSpec.model_fields[name]
    parts = chain(*(getattr(part, "__metadata__", ()) for part in get_args(field.annotation)))
    return [
        f"{sign} {getattr(limit, word)}"
        for limit in chain(field.metadata, *(part.metadata for part in parts))
        for word, sign in signs.items()
        if hasattr(limit, word)
    ]


def tables(chosen: Iterable[str]) -> str:
    """Return a Markdown table for each group."""
    parts = []
    for group, names in _by_group(chosen).items():
        rows = [
            f"### {group}",
            "",
            "| key | values | default | meaning |",
            "|---|---|---|---|",
        ]
        for name in names:
            cells = (f"`{name}`", values_of(name), _default(name), _help(name))
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            rows.append(f"| {row} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _text(chosen: list[str], columns: int) -> str:
    parts = []
    for group, names in _by_group(chosen).items():
        lines = [group]
        for name in names:
            default = _default(name)
            given = f"; default: {default}" if default else ""
            head = f"{name}  ({values_of(name)}{given})"
            lines += textwrap.wrap(head, columns, initial_indent="  ", subsequent_indent="    ")
            lines += textwrap.wrap(
                _help(name), columns, initial_indent="      ", subsequent_indent="      "
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _choose(names: Iterable[str]) -> list[str]:
    """Expand names of keys and groups into keys, in job-file order."""
    groups = _by_group(JobSpec.model_fields)
    chosen: set[str] = set()
    for written in names:
        name = normal_key(written)
        if name not in groups and name not in JobSpec.model_fields:
            meant = did_you_mean(name, [*groups, *JobSpec.model_fields])
            raise UserError(f'unknown key or group "{written}"{meant}')
        chosen |= set(groups.get(name, [])) if name in groups else {name}
    return [name for name in JobSpec.model_fields if name in chosen or not chosen]


def _by_group(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(field_group(name), []).append(name)
    return groups


def _default(name: str) -> str:
    default = JobSpec.model_fields[name].default
    if default in (None, "") or default == []:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _help(name: str) -> str:
    return str(JobSpec.model_fields[name].description)


# -- templates ------------------------------------------------------------------------------
# `fsdp-tui templates`: list the starting points for new jobs.


@click.command()
@JSON
def templates(as_json: bool) -> None:
    """List the templates for `submit --template NAME`: your own and the families' presets.

    Save your own in the dashboard's form (^t), or put job files into the directory printed
    at the end; they may be incomplete.
    """
    listed, problems = list_templates()
    for problem in problems:
        warn(problem)
    if as_json:
        echo(json.dumps([_facts(template) for template in listed]))
        return
    longest = max(len(template.name) for template in listed)
    room = max(20, shutil.get_terminal_size((100, 24)).columns - longest - 2)
    for template in listed:
        echo(f"{template.name.ljust(longest)}  {cut(template.about, room)}".rstrip())
    echo(f"\nYours are in {templates_home()}")


def _facts(template: Template) -> dict[str, object]:
    return {
        "name": template.name,
        "title": template.title,
        "about": template.about,
        "path": str(template.path) if template.path else None,
        "values": dict(template.values),
    }


# -- diff -----------------------------------------------------------------------------------
# `fsdp-tui diff`: compare the settings of two jobs.


@click.command()
@ID
@click.argument("other", metavar="OTHER", type=int)
@JSON
def diff(job_id: int, other: int, as_json: bool) -> None:
    """Compare two jobs' settings, except their names.

    \b
    fsdp-tui diff 3 4
    """
    store = Store()
    ours, theirs = store.get(job_id), store.get(other)
    changed = differences(load_spec(ours.run_dir.job_file), load_spec(theirs.run_dir.job_file))
    if as_json:
        echo(json.dumps([difference.to_dict() for difference in changed]))
    elif not changed:
        echo(f"jobs {job_id} and {other} have the same settings")
    else:
        head = ("", "KEY", f"#{ours.id} {ours.name}", f"#{theirs.id} {theirs.name}")
        rows = [
            (
                difference.kind,
                difference.key,
                in_words(difference.before),
                in_words(difference.after),
            )
            for difference in changed
        ]
        echo(table(head, rows))
