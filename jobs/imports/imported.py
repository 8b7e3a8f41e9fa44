"""Jobs of other tools' configurations, and what became of each of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import UserError
from jobs.imports.ai_toolkit import config as ai_toolkit
from jobs.imports.common.command_line import read_command
from jobs.imports.common.import_report import Kind, Report
from jobs.imports.common.places import parse
from jobs.imports.common.whose import (
    AI_TOOLKIT,
    DIFFUSION_PIPE,
    LTX_TRAINER,
    MUSUBI,
    ONETRAINER,
    SD_SCRIPTS,
    SIMPLETUNER,
    hint,
    tool_of,
    tool_of_command,
)
from jobs.imports.diffusers import script as diffusers_script
from jobs.imports.diffusion_pipe import config as diffusion_pipe
from jobs.imports.kohya import config as kohya
from jobs.imports.ltx_trainer import config as ltx_trainer
from jobs.imports.onetrainer import config as onetrainer
from jobs.imports.simpletuner import config as simpletuner
from jobs.models.find_model import find_model
from jobs.paths import exists, expand
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.datasets import datasets_of
from jobs.spec.values.hub_names import HubName, is_url
from jobs.spec.values.yaml_lines import dump_mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from jobs.imports.common.draft import Draft
    from jobs.spec.job_spec import InputKeys


_KOHYA: Final = (SD_SCRIPTS, MUSUBI)
_CONFIGS: Final = (".json", ".yaml", ".yml", ".toml")
_USUAL: Final = {"repeats": 1}  # of datasets


@dataclass(frozen=True)
class Imported:
    """A job that was made of another tool's configuration.

    Attributes:
        tool: Whose it was.
        source: What it was made of.
        spec: The job; it need not be complete.
        report: What became of each key.
    """

    tool: str
    source: str
    spec: JobSpec
    report: Report

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the job file: those that differ from their defaults."""
        values = self.spec.to_dict(only_set=True)
        for entry in values.get("datasets", []):
            for key in [key for key, value in entry.items() if value in (None, _USUAL.get(key))]:
                del entry[key]
        return values

    def to_yaml(self) -> str:
        """Return the job file, with a line that names its source."""
        values, source = self.to_dict(), " ".join(self.source.split())
        return f"# From {source} ({self.tool}).\n{dump_mapping(values)}"


def import_simpletuner(path: Path) -> Imported:
    """Import a job from SimpleTuner's `config.json` or `config.env`, with the datasets it names.

    Raises:
        UserError: It cannot be read, or is none.
    """
    return _finish(simpletuner.TITLE, path.name, simpletuner.read(path))


def import_ai_toolkit(path: Path) -> Imported:
    """Import a job from ai-toolkit's `CONFIG.yaml`.

    Raises:
        UserError: It cannot be read, or is none.
    """
    return _finish(ai_toolkit.TITLE, path.name, ai_toolkit.read(path))


def import_onetrainer(path: Path) -> Imported:
    """Import a job from OneTrainer's JSON, with the concepts and samples that it names.

    Raises:
        UserError: It cannot be read, or is none.
    """
    return _finish(onetrainer.TITLE, path.name, onetrainer.read(path))


def import_diffusion_pipe(path: Path) -> Imported:
    """Import a job from diffusion-pipe's TOML, with the dataset file that it names.

    Raises:
        UserError: It cannot be read, or is none.
    """
    return _finish(diffusion_pipe.TITLE, path.name, diffusion_pipe.read(path))


def import_ltx_trainer(path: Path) -> Imported:
    """Import a job from the `CONFIG.yaml` of Lightricks' ltx-trainer.

    Raises:
        UserError: It cannot be read, or is none.
    """
    return _finish(ltx_trainer.TITLE, path.name, ltx_trainer.read(path))


def import_file(path: Path) -> Imported:
    """Return a job of a file of any tool that can be imported, which its keys tell.

    Raises:
        UserError: It cannot be read, or is of another tool, or of none.
    """
    if path.suffix.lower() == simpletuner.ENV:
        return import_simpletuner(path)
    if path.suffix.lower() not in _CONFIGS:
        tool = tool_of_command(read_command([str(path)])[1])
        return (import_kohya if tool in _KOHYA else import_script)([str(path)])
    otherwise = ".json" if path.suffix.lower() == ".json" else ".yaml"
    tool = tool_of(parse(path, otherwise=otherwise))
    if tool in _READERS:
        return _READERS[tool](path)
    if tool in _KOHYA:
        return import_kohya([str(path)])
    if tool:
        raise UserError(f"{path} is a configuration of {tool}", hint(tool))
    raise UserError(
        f"{path} has no key by which a tool can be told",
        "name the tool, as in `fsdp-tui import simpletuner FILE`; `fsdp-tui import --help` has all",
    )


def import_kohya(words: Sequence[str], only: str = "") -> Imported:
    """Import a job from a command or TOML file of kohya's sd-scripts or musubi-tuner.

    Args:
        words: A TOML file; or the words of a command, one text with all of it, or a shell script.
        only: Which of the two it must be of.

    Raises:
        UserError: It cannot be read, is of another tool, or trains what jobs do not.
    """
    tool, source, draft = kohya.read(words)
    if only and tool != only:
        raise UserError(f"{source} is of {tool}, not of {only}", hint(tool))
    return _finish(tool, source, draft)


def import_script(words: Sequence[str]) -> Imported:
    """Import a job from a command line that starts a training script of diffusers' examples.

    Args:
        words: Its words; or one text with all of it; or a shell script that has it.

    Raises:
        UserError: There is no such command, or it cannot be read.
    """
    source, draft = diffusers_script.read(words)
    return _finish(diffusers_script.TITLE, source, draft)


_READERS: Final[dict[str, Callable[[Path], Imported]]] = {
    SIMPLETUNER: import_simpletuner,
    AI_TOOLKIT: import_ai_toolkit,
    ONETRAINER: import_onetrainer,
    DIFFUSION_PIPE: import_diffusion_pipe,
    LTX_TRAINER: import_ltx_trainer,
}


def _finish(tool: str, source: str, draft: Draft) -> Imported:
    entries = [e for e in draft.report.entries if e.kind is not Kind.UNKNOWN]
    if not entries:
        raise UserError(f"{source} has no keys of {tool}", "is it from another tool?")
    spec = _spec_of(draft)
    report = draft.report
    if "model_family" not in draft.values and not report.unknown_family:
        report.to_fill_in.append("model_family: not set; the job uses flux")
    report.to_fill_in += [conflict.message for conflict in find_conflicts(spec)] + _missing(spec)
    report.to_fill_in[:] = dict.fromkeys(report.to_fill_in)
    report.warnings += find_warnings(spec)
    return Imported(tool, source, spec, report)


def _spec_of(draft: Draft) -> JobSpec:
    """Build the job.

    Each value was checked separately; a value that conflicts with another is dropped.
    """
    try:
        return JobSpec.model_validate(draft.values)
    except ValidationError as error:
        wrong = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
        draft.report.to_fill_in += [f"{key}: unreadable" for key in sorted(wrong)]
        return JobSpec.model_validate({k: v for k, v in draft.values.items() if k not in wrong})


def _missing(spec: InputKeys) -> list[str]:
    """Files that the job names and that this machine does not have."""
    problems = []
    if spec.pretrained_model_name_or_path:
        try:
            find_model(spec.pretrained_model_name_or_path)
        except UserError as error:
            problems.append(f"pretrained_model_name_or_path: {error}")
    if spec.dataset or spec.datasets:
        paths = [dataset.path for dataset in datasets_of(spec)]
        problems += [f"dataset: {_where(path)}" for path in paths if not _is_here(path)]
    return problems


def _where(path: str) -> str:
    if is_url(path):
        return f"{path} is not on this machine; `fsdp-tui fetch {path}`"
    named = HubName.read("dataset", path)
    if named is None:
        return f"no such folder: {path}"
    return f"no such folder: {path}; of the hub: `fsdp-tui fetch --dataset {named}`"


def _is_here(path: str) -> bool:
    try:
        return exists(expand(path))
    except UserError:  # ~of-nobody
        return False
