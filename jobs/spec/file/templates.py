"""Templates for new jobs: the user's own by name, and the defaults of each family."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import NotFoundError, UserError
from jobs.paths import config_home, ensure_private_dir
from jobs.run.rundir import write_atomic
from jobs.spec.families import FAMILIES
from jobs.spec.file.old_keys import translate
from jobs.spec.job_spec import field_names
from jobs.spec.values.spellings import did_you_mean
from jobs.spec.values.yaml_lines import dump_mapping, read_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME: Final = re.compile(r"[\w][\w .+-]{0,63}")


@dataclass(frozen=True)
class Template:
    """A template for a new job.

    Attributes:
        title: Its display name.
        about: Its contents, in a few words.
        values: The job's values, by key; may be incomplete or invalid.
        path: The user's file; None for a family's defaults.
    """

    title: str
    about: str
    values: Mapping[str, Any]
    path: Path | None = None

    @property
    def name(self) -> str:
        """Return its name on the command line: `my flux`, `wan/2.2`."""
        if self.path is not None:
            return self.title
        return f"{self.values['model_family']}/{self.values['model_flavour']}"


def templates_home() -> Path:
    """Return the directory of the user's templates, without creating it."""
    return config_home() / "templates"


def path_of(name: str) -> Path:
    """Return the path of the user's template of this name; the file may not exist."""
    return templates_home() / f"{_plain(name)}.yaml"


def _plain(name: str) -> str:
    return name.strip().removesuffix(".yaml")


def list_templates() -> tuple[list[Template], list[str]]:
    """Read the user's templates, by name, then each flavour of each family.

    Returns:
        The templates, and a sentence for each that cannot be read.
    """
    own, problems = _own()
    return [*own, *_of_families()], problems


def find_template(name: str) -> Template:
    """Find a template by name or title, ignoring case; the user's own come first.

    Raises:
        NotFoundError: There is none.
    """
    templates, _ = list_templates()
    lowered = _plain(name).lower()
    for template in templates:
        if lowered in (template.name.lower(), template.title.lower()):
            return template
    names = [template.name for template in templates]
    raise NotFoundError(
        f'no template "{name}"{did_you_mean(name, names)}',
        "`fsdp-tui templates` lists them",
    )


def save_template(name: str, values: Mapping[str, Any]) -> Path:
    """Save values under a name, replacing an existing template.

    Raises:
        UserError: The name is no valid file name, or the file cannot be written.
    """
    name = _plain(name)
    if not _NAME.fullmatch(name):
        raise UserError(
            f'"{name}" is not a valid template name; use letters, digits, spaces and . _ + -'
        )
    path = path_of(name)
    ensure_private_dir(path.parent)
    text = dump_mapping(dict(values))
    try:
        write_atomic(path, text, durable=True)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error})") from error
    return path


def _own() -> tuple[list[Template], list[str]]:
    try:
        paths = sorted(templates_home().glob("*.yaml"))
    except OSError as error:
        return [], [f"cannot read {templates_home()} ({error.strerror or error})"]
    templates, problems = [], []
    for path in paths:
        try:
            written, _ = read_mapping(path)
        except UserError as error:
            problems.append(str(error))
            continue
        values = translate(written).values
        if unknown := [str(key) for key in values if key not in field_names()]:
            problems.append(f"{path.name}: ignored unknown keys: {', '.join(unknown)}")
        kept = {key: value for key, value in values.items() if key in field_names()}
        templates.append(Template(path.stem, _about(kept), kept, path))
    return templates, problems


def _about(values: Mapping[str, Any]) -> str:
    settings = [f"{key}: {value}" for key, value in values.items() if isinstance(value, str | int)]
    return "yours · " + ", ".join(settings[:6])


def _of_families() -> list[Template]:
    return [
        Template(
            f"{family.title} · {name}",
            flavour.note or flavour.hub_id,
            {"model_family": family.name, "model_flavour": name},
        )
        for family in FAMILIES.values()
        for name, flavour in family.flavours.items()
    ]
