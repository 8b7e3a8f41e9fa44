"""Resolve the checkpoint that a job starts from and the job that trains its other expert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from jobs.errors import NotFoundError, StateError, UserError
from jobs.paths import exists, expand
from jobs.queue.states import ACTIVE, State
from jobs.run.checkpoint_files import find_checkpoint, find_damage, read_checkpoint
from jobs.run.rundir import MANIFEST, RunDir
from jobs.spec.families import experts_of
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from jobs.queue.store import Job, Store
    from jobs.run.checkpoint_files import Checkpoint
    from jobs.spec.job_spec import JobSpec


KEY: Final = "resume_from_checkpoint"

_OF_JOB: Final = re.compile(r"#?(?P<job>\d+)(?::(?P<step>.*))?")
_STEP: Final = re.compile(r"(?:(?:step|checkpoint)[-_ ]?)?(\d+)", re.IGNORECASE)
_OWN: Final = ("latest", "newest", "last", "auto", "true")  # values that other trainers accept


def read_step(text: str) -> int:
    """Parse a step, `20` or `step-20`.

    Raises:
        UserError: It is neither.
    """
    match = _STEP.fullmatch(text.strip().rstrip("/"))
    if match is None:
        raise UserError(f'"{text}" is not a step; use a number such as 20 or step-20')
    return int(match[1])


def find_origin(store: Store, text: str) -> Checkpoint:
    """Find the checkpoint that `resume_from_checkpoint` names, and check its file sizes.

    Args:
        store: The jobs.
        text: `ID`, `ID:STEP`, or the path of a checkpoint or of a run directory.

    Raises:
        UserError: There is no such checkpoint, or it is damaged.
    """
    text = text.strip()
    try:
        if match := _OF_JOB.fullmatch(text):
            step = read_step(match["step"]) if match["step"] else None
            job = store.get(int(match["job"]))
            return find_checkpoint(job.run_dir, step, f"job {job.id}")
        if text.lower() in _OWN:
            raise NotFoundError(
                f'"{text}" is not a job',
                "remove it: a job resumes from its own newest checkpoint",
            )
        return _at(expand(text).absolute())
    except UserError as error:
        raise UserError(f"{KEY}: {error.message}", error.hint) from None


def with_other_expert(store: Store, spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """Replace the job that `other_expert` names by its run directory.

    Returns:
        The job, and what is wrong with that directory, a line each: the job trains without it.

    Raises:
        UserError: There is no such job, it is this one, or the job is one of two to be.
    """
    if spec.both_experts:
        raise UserError(
            "both_experts: this is one job, and a pair is two",
            "queue the pair with `fsdp-tui submit`, or remove both_experts",
        )
    text = (spec.other_expert or "").strip()
    if not text:
        return spec, []
    if match := _OF_JOB.fullmatch(text):
        try:
            root = store.get(int(match["job"])).run_dir.root
        except NotFoundError as error:
            raise NotFoundError(f"other_expert: {error.message}", error.hint) from None
    else:
        root = expand(text).absolute()
    spec = spec.model_copy(update={"other_expert": str(root)})
    if not exists(root):
        return spec, [f"other_expert: {root} is gone; samples use the base model's other expert"]
    try:
        flavour = RunDir(root).job_value("model_flavour")
    except (OSError, ValueError):
        raise NotFoundError(
            f"other_expert: {root} is not a run directory", "use the job's ID, or its run directory"
        ) from None
    experts = experts_of(spec) or ()
    if flavour == spec.model_flavour or (experts and flavour not in experts):
        raise UserError(
            f"other_expert: {root} trains {flavour or 'another model'}, which is not the other "
            f"expert of {spec.model_flavour}",
            "name the job that trains it",
        )
    return spec, []


def other_expert_of(store: Store, job: Job, named: int | None = None) -> RunDir:
    """Return the run of the model's other expert: of the job that is named, or by `other_expert`.

    Raises:
        NotFoundError: There is no such job, or its run directory is gone.
        UserError: The job names none.
    """
    if named is not None:
        return store.get(named).run_dir
    text = load_spec(job.run_dir.job_file).other_expert
    if text is None:
        raise UserError(
            f"job {job.id} does not say which job trains the other expert",
            f"add it: `fsdp-tui export {job.id} --other-expert ID`",
        )
    if not exists(Path(text)):
        raise NotFoundError(
            f"the other expert's run directory is gone: {text}",
            f"`fsdp-tui export {job.id}` exports this one by itself",
        )
    return RunDir(Path(text))


def _at(path: Path) -> Checkpoint:
    """Find the checkpoint at a path, or the newest one of a run directory."""
    if exists(path / MANIFEST):
        damage = find_damage(path, contents=False)
        checkpoint = read_checkpoint(path)
        if checkpoint is None or damage is not None:
            raise NotFoundError(f"the checkpoint {path} is damaged ({damage})")
        return checkpoint
    run = path.parent if path.name == "checkpoints" else path
    if exists(run / "checkpoints"):
        return find_checkpoint(RunDir(run), None, str(run))
    if exists(path):
        raise NotFoundError(f"{path} is neither a complete checkpoint nor a run directory")
    raise NotFoundError(f"no checkpoint {path}", "use ID, ID:STEP or a path")


def origin_of(job: Job) -> Path | None:
    """Return the other job's checkpoint that a job starts from; None if it has its own by now."""
    if job.run_dir.latest_checkpoint() is not None:
        return None
    try:
        text = job.run_dir.job_file.read_text(encoding="utf-8")
        # avoid parsing YAML, which takes milliseconds
        if KEY not in text or f"{KEY}: null" in text:
            return None
        value = yaml.safe_load(text).get(KEY)
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
    return Path(value) if isinstance(value, str) and value else None


def check_unneeded(store: Store, paths: Iterable[Path], leaving: Collection[int] = ()) -> None:
    """Check that no waiting or running job is set to start from paths that will be deleted.

    Args:
        store: The jobs.
        paths: Checkpoints, or directories that contain some.
        leaving: Jobs that are deleted as well.

    Raises:
        StateError: A job is.
    """
    gone = [path.resolve() for path in paths]
    for job in store.in_states([State.QUEUED, *ACTIVE]):
        origin = None if job.id in leaving else origin_of(job)
        if origin is None:
            continue
        for path in gone:
            if origin.resolve().is_relative_to(path):
                raise StateError(
                    f"job {job.id} ({job.state}) is set to start from {origin}",
                    f"stop job {job.id} first, or wait until it has saved a checkpoint",
                )
