"""Export a checkpoint, for the command line and the dashboard; the job may be running."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.errors import UserError
from jobs.machine.engine_tools import Progress, ask
from jobs.run.checkpoint_files import find_checkpoint, list_checkpoints, read_state
from jobs.run.export_places import check_place, default_place
from jobs.spec.families import experts_of
from jobs.spec.job_spec import JobSpec, field_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.queue.job import Job
    from jobs.run.checkpoint_files import Checkpoint
    from jobs.run.rundir import RunDir
    from jobs.spec.keys.output import ExportDtype, ExportFormat

# Stage of the tool → estimated percentage of the total at its start and end.
_STAGES: Final = {"checking": (0, 40), "writing": (40, 100)}


@dataclass(frozen=True)
class Export:
    """A finished export: verified, and renamed into place.

    Attributes:
        path: Its directory.
        step: Optimizer steps of the checkpoint.
        ema: Whether its weights are averaged.
        warnings: One line each.
    """

    path: Path
    step: int
    ema: bool
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return its path."""
        return str(self.path)


def export_checkpoint(
    job: Job,
    step: int | None = None,
    *,
    output: Path | None = None,
    dtype: ExportDtype | Literal["fp8"] | None = None,
    formats: Sequence[ExportFormat] = (),
    ema: bool = True,
    single_file: bool = False,
    other: RunDir | None = None,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Export:
    """Export a checkpoint of a job. Reads it twice, so large ones take minutes.

    Args:
        job: The job; it may be running.
        step: Step of the checkpoint; the newest intact one by default.
        output: The directory; by default `jobs.run.export_places.default_place`. An earlier
            export of the same step, precision and kind is replaced once the new one is complete.
        dtype: The precision to store; the job's `export_dtype` by default.
        formats: The names to export a LoRA under; the job's `export_formats` by default.
        ema: Export the averaged weights, if there are any.
        single_file: Write a full model as one file that ComfyUI and Forge load.
        other: The run of the model's other expert, to export its newest checkpoint too.
        progress: Called with the percentage done, and 100.
        cancelled: Polled several times a second in the caller's thread; True cancels the export
            and removes what it wrote.

    Raises:
        NotFoundError: There is no such checkpoint.
        UserError: The checkpoint is damaged, or the export cannot be written.
        ToolError: The export failed for another reason.
        Cancelled: `cancelled` returned True.
    """
    if dtype == "fp8" and not single_file:
        raise UserError(
            "fp8 is for single files", "add --as single-file, or choose another --dtype"
        )
    if formats and single_file:
        raise UserError(
            "--format is for LoRAs, and --as single-file for full models", "remove one of them"
        )
    whose, newest = f"job {job.id}", [saved.step for saved in list_checkpoints(job.run_dir)][-1:]
    checkpoint = find_checkpoint(job.run_dir, step, whose)
    state = read_state(checkpoint.path)
    averaged = bool(state.get("ema"))
    target = (
        _absolute(output)
        if output
        else default_place(
            job.run_dir,
            checkpoint.step,
            ends=job.state.ended and newest == [checkpoint.step],
            ema_left_out=averaged and not ema,
        )
    )
    partner = None if other is None else _partner(job, checkpoint, other)
    if partner is not None and output is None:
        target = job.run_dir.root / f"export-both-{checkpoint.step}-{partner.step}"
        target = target.with_name(f"{target.name}{'-no-ema' if averaged and not ema else ''}")
    if single_file and output is None:  # next to the directory that diffusers loads
        target = target.with_name(f"{target.name}-single-file")
    spec = state.get("spec") or {}
    facts = {
        "job": spec.get("name"),
        "step": checkpoint.step,
        "ema": averaged and ema,
    }
    if partner is not None:
        facts["other_expert"] = _names(partner)
    if output is not None:  # the default place is for the latest export, of any precision
        facts |= {"dtype": dtype or spec.get("export_dtype", "auto"), "single_file": single_file}
    check_place(target, facts)
    arguments = [str(checkpoint.path), str(target)]
    arguments += [f"--other={partner.path}"] if partner is not None else []
    arguments += [f"--dtype={dtype}"] if dtype else []
    arguments += [f"--format={each}" for each in formats]
    arguments += [] if ema else ["--no_ema"]
    arguments += ["--single_file"] if single_file else []

    def report(line: str) -> None:
        match line.split():
            case ["exporting", stage, done, total] if done.isdigit() and total.isdigit():
                begin, end = _STAGES.get(stage, (0, 100))
                share = min(1.0, int(done) / max(1, int(total)))
                progress(begin + int((end - begin) * share), 100)

    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as folder:
        answer = ask("engine.exports", arguments, Path(folder, "answer"), report, cancelled)
    warnings = list(answer["warnings"])
    if step is None and newest != [checkpoint.step]:
        warnings.insert(0, f"step-{newest[0]} is damaged; exported step {checkpoint.step}")
    return Export(Path(answer["path"]), answer["step"], answer["ema"], tuple(warnings))


def _partner(job: Job, checkpoint: Checkpoint, other: RunDir) -> Checkpoint:
    """Return the newest checkpoint of the other expert, if one export can hold both.

    Raises:
        NotFoundError: It has none.
        UserError: It trains no other expert of the same model, or has the same name.
    """
    newest = find_checkpoint(other, None, str(other.root))
    own, beside = _spec_of(checkpoint), _spec_of(newest)
    if {own.model_flavour, beside.model_flavour} != set(experts_of(own) or ()):
        raise UserError(
            f"job {job.id} trains {own.model_flavour or own.model_family} and {other.root.name} "
            f"{beside.model_flavour or beside.model_family}, which are not the two experts of one "
            "model",
            "export each by itself",
        )
    if own.model_type != beside.model_type or own.name == beside.name:
        raise UserError(
            f"job {job.id} ({own.model_type}, {own.name}) and {other.root.name} "
            f"({beside.model_type}, {beside.name}) do not fit into one export, which takes two "
            "LoRAs or two full models of different names",
            "export each by itself",
        )
    return newest


def _spec_of(checkpoint: Checkpoint) -> JobSpec:
    values = read_state(checkpoint.path).get("spec") or {}
    return JobSpec.model_validate({k: v for k, v in values.items() if k in field_names()})


def _names(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what an export's facts call the other expert."""
    return {"job": _spec_of(checkpoint).name, "step": checkpoint.step}


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise UserError(f"{path}: no such home directory") from None
