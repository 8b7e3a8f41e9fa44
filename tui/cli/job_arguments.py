"""Parse command-line arguments that describe a job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from jobs.errors import UserError
from jobs.queue.store import Store
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import load_spec
from jobs.spec.file.templates import find_template, list_templates
from jobs.spec.job_spec import JobSpec, field_group, field_words, is_switch, key_facts
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.spellings import as_list
from tui.cli.echo import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


FLAGS: Final = {"ignore_unknown_options": True, "allow_extra_args": True}
JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
_MOST_NAMED: Final = 3
_MOST_DIGITS: Final = 18  # digits that fit into a database integer
_SUMMARY: Final = 72  # characters of help beside a completion


class JobCommand(click.Command):
    """A command that accepts every job key as a flag.

    Its own parser (`jobs.spec.file.flags`) reads them, so spelling is flexible. Shell completion
    offers them as options, with their allowed values.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; during shell completion, include the job keys."""
        params = super().get_params(ctx)
        if not ctx.resilient_parsing:
            return params
        own = {option for param in params for option in param.opts}
        return [*params, *(key for key in _key_options() if not own.intersection(key.opts))]


def _key_options() -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for name, field in JobSpec.model_fields.items():
        kind: dict[str, Any] = {"type": click.Path()} if key_facts(name).path else {}
        if words := field_words(name):
            kind = {"shell_complete": partial(_words, words)}
        if is_switch(name):  # the value is optional
            kind |= {"is_flag": False, "flag_value": "true"}
        text = f"{field_group(name)}: {field.description or ''}"
        options.append(click.Option([f"--{name}"], help=text[:_SUMMARY], **kind))
    return options


def _words(
    words: Collection[str], ctx: click.Context, param: click.Parameter, start: str
) -> list[CompletionItem[str]]:
    """Match words regardless of case."""
    return [CompletionItem(word) for word in words if word.lower().startswith(start.lower())]


def _job_files(ctx: click.Context, param: click.Parameter, start: str) -> list[CompletionItem[str]]:
    return [CompletionItem(start, type="file")]


def _job_ids(ctx: click.Context, param: click.Parameter, start: str) -> list[CompletionItem[str]]:
    jobs = [job for job in Store().all() if str(job.id).startswith(start)]
    return [CompletionItem(str(job.id), help=f"{job.state} {job.name}") for job in jobs]


def _active_ids(
    ctx: click.Context, param: click.Parameter, start: str
) -> list[CompletionItem[str]]:
    """Complete the ids of running jobs, or of queued ones if none runs."""
    jobs = [job for job in Store().all() if str(job.id).startswith(start)]
    active = [job for job in jobs if job.state.active]
    return [
        CompletionItem(str(job.id), help=f"{job.state} {job.name}")
        for job in active or jobs
        if not job.state.ended
    ]


def _read_id(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else read_id(value)


def read_id(value: str) -> int:
    """Parse a job id, `3` or `#3`.

    Raises:
        click.BadParameter: It is not a job id.
    """
    digits = value.removeprefix("#")
    if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS:
        return int(digits)
    named = [str(job.id) for job in Store().all() if job.name == value][:_MOST_NAMED]
    meant = f" (job {' or '.join(named)} has this name)" if named else ""
    raise click.BadParameter(f'"{value}" is not a job id{meant}; `fsdp-tui list` shows the ids')


def read_optional_id(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse a job id; None if there is none."""
    return None if value is None else read_id(value)


def _read_ids(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """Parse job ids, dropping duplicates."""
    return tuple(dict.fromkeys(map(read_id, values)))


ID: Final = click.argument("job_id", metavar="ID", callback=_read_id, shell_complete=_job_ids)
IDS: Final = click.argument(
    "job_ids",
    metavar="ID …",
    nargs=-1,
    required=True,
    callback=_read_ids,
    shell_complete=_job_ids,
)


def _read_id_lists(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the numbers of jobs, given as `3,4` or one by one.

    Raises:
        click.BadParameter: A text names no job, as an empty variable of a shell.
    """
    for text in values:
        if not as_list(text):
            raise click.BadParameter(f'"{text}" names no job')
    return _read_ids(ctx, param, tuple(part.strip() for text in values for part in as_list(text)))


def _read_new_stages(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Return the numbers of jobs, none for `none`; None if nothing was given."""
    if not values:
        return None
    return (
        ()
        if [value.lower() for value in values] == [_NO_JOB]
        else _read_id_lists(ctx, param, values)
    )


_NO_JOB: Final = "none"
AFTER: Final = click.option(
    "--after",
    multiple=True,
    metavar="ID,ID",
    callback=_read_id_lists,
    shell_complete=_job_ids,
    help="Start only when these jobs have completed. If one fails, is stopped, lost or removed, "
    "the job waits until that one is resumed and completes, or this one is released.",
)
AFTER_INSTEAD: Final = click.option(
    "--after",
    multiple=True,
    metavar="ID,ID",
    callback=_read_new_stages,
    shell_complete=_job_ids,
    help="Start only when these jobs have completed, instead of those so far; none: wait for no "
    "job.",
)
IDS_TO_STOP: Final = click.argument(
    "job_ids",
    metavar="ID …",
    nargs=-1,
    required=True,
    callback=_read_ids,
    shell_complete=_active_ids,
)
WORDS: Final = click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=_job_files,
    metavar="[JOB.yaml] [--key=value …]",
)


def _templates(ctx: click.Context, param: click.Parameter, start: str) -> list[CompletionItem[str]]:
    begun = start.lower()
    return [
        CompletionItem(template.name, help=template.about[:_SUMMARY])
        for template in list_templates()[0]
        if template.name.lower().startswith(begun)
    ]


TEMPLATE: Final = click.option(
    "--template",
    metavar="NAME",
    shell_complete=_templates,
    help="Start from a template instead of a file; `fsdp-tui templates` lists them.",
)


def read_job(
    words: tuple[str, ...], *, ignoring: Collection[str] = (), template: str | None = None
) -> JobSpec:
    """Return the job of `[JOB.yaml] [--key=value …]`; print its warnings on standard error.

    Args:
        words: The command-line arguments.
        ignoring: Keys whose conflicts are ignored.
        template: The name of a template to use in place of a file.

    Raises:
        UserError: The job is invalid.
    """
    spec = load_job(words, ignoring=ignoring, template=template)
    for warning in find_warnings(spec):
        warn(warning)
    return settle(spec)


def load_job(
    words: tuple[str, ...], *, ignoring: Collection[str] = (), template: str | None = None
) -> JobSpec:
    """Return the job as written, without values derived from the ranks. See `read_job`."""
    values, others = parse_flags(words)
    if template is not None:
        values, others = _from_template(template, values, others)
    if len(others) > 1:
        raise UserError(f'expected one JOB.yaml, got "{others[0]}" and "{others[1]}"')
    if not others and not values:
        raise UserError("no job given", "pass a JOB.yaml or --key=value flags")
    return load_spec(Path(others[0]) if others else None, values, ignoring=ignoring, on_note=warn)


def _from_template(
    name: str, values: dict[str, Any], others: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Replace a template's name by its file or its values; flags override the values."""
    if others:
        raise UserError(
            f'"{others[0]}" and the template "{name}" cannot be combined', "use one of them"
        )
    template = find_template(name)
    if template.path is not None:
        return values, [str(template.path)]
    return {**template.values, **values}, []


def for_each(job_ids: Sequence[int], act: Callable[[int], object]) -> int:
    """Apply an action to each job; a failure of one does not stop the others.

    Returns:
        The exit status: 1 if any of several failed.

    Raises:
        UserError: The only job failed.
    """
    if len(job_ids) == 1:
        act(job_ids[0])
        return 0
    status = 0
    for job_id in job_ids:
        try:
            act(job_id)
        except UserError as error:
            echo(f"fsdp-tui: job {job_id}: {error}", err=True)
            status = 1
    return status


def warn(text: str) -> None:
    """Warn about settings that are valid but may not do what the user expects."""
    echo(f"fsdp-tui: warning: {text}", err=True)
