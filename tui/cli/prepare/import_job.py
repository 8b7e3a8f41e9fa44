"""`fsdp-tui import`: convert another tool's configuration, and report on each key."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from jobs.errors import UserError
from jobs.imports.common.import_report import Kind
from jobs.run.rundir import write_atomic
from tui.cli.echo import echo
from tui.cli.job_arguments import FLAGS, JSON

if TYPE_CHECKING:
    from jobs.imports.common.import_report import Entry
    from jobs.imports.imported import Imported

_CONFIG: Final = click.argument("config", type=click.Path(path_type=Path))
_COMMAND: Final = click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND"
)
_OUTPUT: Final = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="JOB.yaml",
    help="File to write the job to (default: standard output).",
)
_FORCE: Final = click.option("--force", is_flag=True, help="Overwrite an existing file.")
_DETAILED: Final = (Kind.TAKEN, Kind.TRANSLATED, Kind.UNSUPPORTED, Kind.UNREADABLE, Kind.UNKNOWN)


class _OfAnyTool(click.Group):
    """A group that accepts a file in place of a tool's name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        if word not in self.commands and (Path(word).suffix or Path(word).is_file()):
            return "file", any_file, args
        return super().resolve_command(ctx, args)


@click.group(name="import", cls=_OfAnyTool, subcommand_metavar="FILE|TOOL ...")
def import_job() -> None:
    """Convert another tool's config to a job file.

    `fsdp-tui import FILE` tells by the file's keys which tool it is of; TOOL reads it as that
    tool's.

    The job goes to standard output and the report to standard error; with -o, the job goes to a
    file. The report lists what has no equivalent here; that never stops the import.
    """


@click.command(name="file")
@_CONFIG
@_OUTPUT
@_FORCE
@JSON
def any_file(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a configuration of any tool, or a shell script."""
    from jobs.imports.imported import import_file  # the tables take some 20 ms

    _tell(import_file(config), output, force, as_json, config)


@import_job.command()
@_CONFIG
@_OUTPUT
@_FORCE
@JSON
def simpletuner(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a SimpleTuner CONFIG.json or config.env, and the datasets that it names."""
    from jobs.imports.imported import import_simpletuner  # the tables take some 20 ms

    _tell(import_simpletuner(config), output, force, as_json, config)


@import_job.command(name="ai-toolkit")
@_CONFIG
@_OUTPUT
@_FORCE
@JSON
def ai_toolkit(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert an ai-toolkit CONFIG.yaml."""
    from jobs.imports.imported import import_ai_toolkit  # the tables take some 20 ms

    _tell(import_ai_toolkit(config), output, force, as_json, config)


@import_job.command()
@_CONFIG
@_OUTPUT
@_FORCE
@JSON
def onetrainer(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a OneTrainer CONFIG.json, and the concepts and samples that it names."""
    from jobs.imports.imported import import_onetrainer  # the tables take some 20 ms

    _tell(import_onetrainer(config), output, force, as_json, config)


@import_job.command(name="diffusion-pipe")
@_CONFIG
@_OUTPUT
@_FORCE
@JSON
def diffusion_pipe(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a diffusion-pipe CONFIG.toml and the dataset file that it names."""
    from jobs.imports.imported import import_diffusion_pipe  # the tables take some 20 ms

    _tell(import_diffusion_pipe(config), output, force, as_json, config)


@import_job.command(name="ltx-trainer")
@_CONFIG
@_OUTPUT
@_FORCE
@JSON
def ltx_trainer(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a CONFIG.yaml of Lightricks' ltx-trainer."""
    from jobs.imports.imported import import_ltx_trainer  # the tables take some 20 ms

    _tell(import_ltx_trainer(config), output, force, as_json, config)


@import_job.command(name="diffusers-script", context_settings=FLAGS)
@_COMMAND
@_OUTPUT
@_FORCE
@JSON
def diffusers_script(
    words: tuple[str, ...], output: Path | None, force: bool, as_json: bool
) -> None:
    """Convert the command line of a diffusers example script.

    COMMAND is `accelerate launch … train_….py --…` in quotes, or its words after `--`, or a shell
    script that contains it.
    """
    from jobs.imports.imported import import_script  # the tables take some 20 ms

    _tell(import_script(words), output, force, as_json, _file_in(words))


@import_job.command(context_settings=FLAGS)
@_COMMAND
@_OUTPUT
@_FORCE
@JSON
def kohya(words: tuple[str, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a command of kohya's sd-scripts, or its config_file.

    COMMAND is `accelerate launch … flux_train_network.py --…` in quotes, or its words after `--`,
    or a shell script that contains it, or a TOML file. Files that it names are read, too.
    """
    from jobs.imports.common.whose import SD_SCRIPTS
    from jobs.imports.imported import import_kohya  # the tables take some 20 ms

    _tell(import_kohya(words, SD_SCRIPTS), output, force, as_json, _file_in(words))


@import_job.command(name="musubi-tuner", context_settings=FLAGS)
@_COMMAND
@_OUTPUT
@_FORCE
@JSON
def musubi_tuner(words: tuple[str, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a command of musubi-tuner, or its config_file.

    COMMAND is as for `kohya`.
    """
    from jobs.imports.common.whose import MUSUBI
    from jobs.imports.imported import import_kohya  # the tables take some 20 ms

    _tell(import_kohya(words, MUSUBI), output, force, as_json, _file_in(words))


def _file_in(words: tuple[str, ...]) -> Path | None:
    """Return the file to import, if the argument is one."""
    return Path(words[0]) if len(words) == 1 else None


def _tell(
    imported: Imported, output: Path | None, force: bool, as_json: bool, source: Path | None
) -> None:
    """Write the job and report on the conversion.

    Raises:
        UserError: The file exists already, or cannot be written.
    """
    text = imported.to_yaml()
    if output is not None:
        _write(output, text, force, source)
    if as_json:
        facts = {
            "tool": imported.tool,
            "source": imported.source,
            "job": imported.to_dict(),
            "yaml": text,
            "written": None if output is None else str(output),
            "report": imported.report.to_dict(),
        }
        echo(json.dumps(facts))
        return
    if output is None:
        echo(text, nl=False)
    echo(_report(imported, output), err=output is None)


def _write(output: Path, text: str, force: bool, source: Path | None) -> None:
    if output.is_dir():
        raise UserError(f"{output} is a directory", "pass a file name, such as job.yaml")
    if output.exists():
        if source is not None and source.exists() and output.samefile(source):
            raise UserError(f"{output} is the file being imported", "choose another file")
        if not force:
            raise UserError(f"{output} already exists", "choose another file, or add --force")
    try:
        write_atomic(output, text, durable=True)
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror or error})") from None


def _report(imported: Imported, output: Path | None) -> str:
    """Format the report as text; entries that the user should check come last."""
    report = imported.report
    lines = [f"{imported.source} ({imported.tool}) → {output or 'a job'}"]
    for kind in _DETAILED:
        if entries := report.of(kind):
            lines += ["", f"{kind.heading} ({len(entries)})", *(_line(entry) for entry in entries)]
    if entries := report.of(Kind.UNNEEDED):
        lines += ["", f"{Kind.UNNEEDED.heading} ({len(entries)})", *_names(entries)]
    if assumed := report.assumed:
        title = f"not set; that tool's default is used ({len(assumed)})"
        lines += ["", title, *(_line(entry) for entry in assumed)]
    for title, sentences in (("warnings", report.warnings), ("to fill in", report.to_fill_in)):
        if sentences:
            lines += [
                "",
                f"{title} ({len(sentences)})",
                *(f"  {sentence}" for sentence in sentences),
            ]
    return "\n".join(lines)


def _names(entries: list[Entry]) -> list[str]:
    """Join keys; those of one section follow its name."""
    places: dict[str, list[str]] = {}
    for entry in entries:
        place, _, name = entry.key.rpartition(": " if ": " in entry.key else ".")
        if name.endswith("]") and ": " not in entry.key:  # a file's entry: backend.json[1]
            place, name = "", entry.key
        places.setdefault(place, []).append(name)
    lines = []
    for place, names in places.items():
        text = f"{place}: {', '.join(names)}" if place else ", ".join(names)
        lines += textwrap.wrap(text, 96, initial_indent="  ", subsequent_indent="    ")
    return lines


def _line(entry: Entry) -> str:
    """Return `  key: value → ours: value  (why)`; for lost keys, only the reason."""
    text = f"  {entry.key}: {entry.value}" if entry.value else f"  {entry.key}"
    ours = ", ".join(f"{name}: {_shown(value)}" for name, value in entry.ours.items())
    if entry.kind is Kind.TAKEN:
        return text
    if ours:
        text += f" → {ours}"
    return f"{text}  ({entry.why})" if entry.why else text


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:59] + "…"
