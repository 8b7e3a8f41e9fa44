"""Commands about a job's outputs: checkpoints, exports, pushes and samples."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from jobs import service
from jobs.errors import NotFoundError, UserError
from jobs.export import export_checkpoint
from jobs.hub.push import push_step
from jobs.queue.store import Store
from jobs.run.checkpoint_files import find_best, free_bytes, list_all, verify
from jobs.run.eventlog import read_measured
from jobs.run.samples import list_samples
from jobs.service.plan import plan_resume
from jobs.service.start_point import other_expert_of, read_step
from jobs.spec.file.flags import parse_flags
from jobs.spec.keys.output import ExportDtype, ExportFormat
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import (
    FLAGS,
    ID,
    IDS,
    JSON,
    JobCommand,
    for_each,
    read_id,
    read_optional_id,
)
from tui.text.checkpoint_text import checkpoint_table, plan_lines
from tui.text.format import MISSING, cut, size
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Job
    from jobs.run.checkpoint_files import Listed
    from jobs.service.plan import Plan


# -- checkpoints ----------------------------------------------------------------------------
# Commands about checkpoints: list, verify, delete, resume.


@click.command()
@ID
@click.argument("more", metavar="", nargs=-1)
@click.option(
    "--verify",
    "contents",
    is_flag=True,
    help="Read every byte; exit status 1 if anything is damaged.",
)
@click.option(
    "--delete",
    "names",
    multiple=True,
    metavar="STEP …",
    help="Delete these steps' checkpoints (set-aside ones by name).",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@JSON
def checkpoints(
    job_id: int,
    more: tuple[str, ...],
    contents: bool,
    names: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> int:
    """List a job's checkpoints: time, size, health, which is best, and which a resume uses."""
    if more and not names:
        raise click.UsageError(
            f'"{more[0]}" is an extra argument; to delete it, use --delete {more[0]}'
        )
    store = Store()
    job = store.get(job_id)
    if not job.run_dir.root.is_dir():
        raise NotFoundError(
            f"the run directory of job {job_id} is gone: {job.run_dir.root}",
            f"forget the job with `fsdp-tui remove {job_id}`",
        )
    deleted = _delete(store, job, [*names, *more], ask=not yes) if names else []
    listed = list_all(job.run_dir, read_measured(job.run_dir))
    if contents:
        listed = _verify_all(listed)
    if as_json:
        facts = {
            "id": job_id,
            "checkpoints": [checkpoint.to_dict() for checkpoint in listed],
            "best": next((checkpoint.name for checkpoint in listed if checkpoint.best), None),
            "next": next((checkpoint.name for checkpoint in listed if checkpoint.next), None),
            "total_bytes": sum(checkpoint.bytes for checkpoint in listed),
            "free_bytes": free_bytes(job.run_dir),
            "deleted": [checkpoint.name for checkpoint in deleted],
        }
        echo(json.dumps(facts))
    else:
        for checkpoint in deleted:
            echo(f"deleted {checkpoint.name} ({size(checkpoint.bytes)})", err=True)
        echo(checkpoint_table(listed, free_bytes(job.run_dir)))
    return int(
        contents
        and any(checkpoint.damage and checkpoint.set_aside != "damaged" for checkpoint in listed)
    )


def _delete(store: Store, job: Job, words: Sequence[str], *, ask: bool) -> list[Listed]:
    names = [name for word in words for name in word.split(",") if name.strip()]
    deletable = service.find_deletable(store, job.id, names)
    if ask and sys.stdin.isatty():
        what = ", ".join(
            f"{checkpoint.name} ({size(checkpoint.bytes)})" for checkpoint in deletable
        )
        click.confirm(f"delete {what} of job {job.id} “{job.name}”?", abort=True)
    return service.delete_checkpoints(store, job.id, names)


def _verify_all(listed: Sequence[Listed]) -> list[Listed]:
    """Verify all except those set aside as damaged; skip those deleted in the meantime."""
    unread = [checkpoint for checkpoint in listed if checkpoint.set_aside != "damaged"]
    total, done = sum(checkpoint.bytes for checkpoint in unread), 0
    with ProgressLine("reading checkpoints") as line:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            line(done, total, f"{size(done)} of {size(total)}")

        verified = []
        for checkpoint in listed:
            with suppress(NotFoundError):
                verified.append(verify(checkpoint, advance) if checkpoint in unread else checkpoint)
        return verified


@click.command(cls=JobCommand, context_settings=FLAGS)
@ID
@click.option(
    "--from",
    "back_to",
    metavar="STEP",
    help="Resume from this step (0: from the beginning; best: see checkpoints_best_by); newer "
    "checkpoints are set aside, not deleted.",
)
@JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def resume(job_id: int, back_to: str | None, as_json: bool, words: tuple[str, ...]) -> int:
    """Resume ended jobs from their newest checkpoints. ID … [--key=value …] changes settings.

    --json prints an object a line.
    """
    values, others = parse_flags(words)
    if stray := next((word for word in others if not word.removeprefix("#").isdecimal()), None):
        raise UserError(f'"{stray}" is neither a job id nor a --key=value flag')
    to_best = back_to is not None and back_to.strip().lower() == "best"
    step = read_step(back_to) if back_to is not None and not to_best else None
    store = Store()

    def act(job_id: int) -> None:
        after = _best(store.get(job_id), "resumes after") if to_best else step
        plan = plan_resume(store, job_id, values, back_to=after)
        tell(plan)
        job = service.carry_out(store, plan)
        if as_json:
            echo(json.dumps(_resumed(job, plan)))
        else:
            echo(f"job {job.id} is {job.state}: {job.reason}")

    return for_each(list(dict.fromkeys([job_id, *map(read_id, others)])), act)


def _best(job: Job, does: str) -> int:
    """Return the step of a job's best checkpoint, and print it on standard error."""
    best = find_best(job.run_dir, read_measured(job.run_dir), f"job {job.id}")
    echo(f"fsdp-tui: {does} {best}", err=True)
    return best.step


def _step(job: Job, step: int | None, best: bool, does: str) -> int | None:
    """Return the step of `--step` or `--best`; None for neither."""
    if best and step is not None:
        raise click.UsageError("--step and --best name a checkpoint each; use one of them")
    return _best(job, does) if best else step


def tell(plan: Plan) -> None:
    """Print what a submit or resume changes on standard error."""
    for line in plan_lines(plan):
        echo(f"fsdp-tui: {line}", err=True)


def _resumed(job: Job, plan: Plan) -> dict[str, Any]:
    return {
        "id": job.id,
        "state": str(job.state),
        "reason": job.reason,
        "run_dir": str(job.run_dir.root),
        "step": plan.begin.step if plan.begin is not None else 0,
        "changes": plan.changes,
        "set_aside": [checkpoint.path.name for checkpoint in plan.rewound],
    }


BEST = click.option(
    "--best", is_flag=True, help="Take the step of the best checkpoint (checkpoints_best_by)."
)


# -- export ---------------------------------------------------------------------------------
# `fsdp-tui export`: write a checkpoint in formats that other tools load.


@click.command()
@IDS
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step of the checkpoint to export (default: the newest).",
)
@BEST
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Output directory (default: a new one in the run directory).",
)
@click.option(
    "--dtype",
    type=click.Choice([*get_args(ExportDtype), "fp8"]),
    help="Precision (default: the job's export_dtype); fp8 for single files.",
)
@click.option(
    "--as",
    "kind",
    type=click.Choice(["diffusers", "single-file"]),
    default="diffusers",
    help="A full model as a diffusers directory, or as one file for ComfyUI and Forge.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(get_args(ExportFormat)),
    help="Key names of the LoRA's tensors; can be repeated.",
)
@click.option("--no-ema", is_flag=True, help="Export the raw weights, not their average.")
@click.option(
    "--both-experts",
    is_flag=True,
    help="Also export the newest checkpoint of the job that trains the model's other expert.",
)
@click.option(
    "--other-expert",
    metavar="ID",
    callback=read_optional_id,
    help="The job that does, if the job does not say: it was not submitted with both_experts.",
)
@JSON
def export(
    job_ids: tuple[int, ...],
    step: int | None,
    best: bool,
    output: Path | None,
    dtype: ExportDtype | Literal["fp8"] | None,
    kind: str,
    formats: tuple[ExportFormat, ...],
    no_ema: bool,
    both_experts: bool,
    other_expert: int | None,
    as_json: bool,
) -> int:
    """Export a checkpoint of each job for other tools and print its path.

    The job may be running. A LoRA is written with the key names of diffusers and of other tools, a
    full model as a pipeline for from_pretrained, or with --as single-file as one file of its
    transformer for ComfyUI and Forge. Every file is read back and compared. With --both-experts,
    one directory has both: two LoRA files in each format, or a pipeline with both transformers.
    """
    if output is not None and len(job_ids) > 1:
        raise click.UsageError("--output takes the export of one job; several need none")
    store = Store()

    def act(job_id: int) -> None:
        job = store.get(job_id)
        after = _step(job, step, best, "exports")
        other = None
        if both_experts or other_expert is not None:
            other = other_expert_of(store, job, other_expert)
        with ProgressLine("exporting") as line:
            made = export_checkpoint(
                job,
                after,
                output=output,
                dtype=dtype,
                formats=formats,
                ema=not no_ema,
                single_file=kind == "single-file",
                other=other,
                progress=lambda done, total: line(done, total, f"{done} %"),
            )
        for warning in made.warnings:
            echo(f"fsdp-tui: warning: {warning}", err=True)
        echo(json.dumps(asdict(made) | {"path": str(made.path)}) if as_json else str(made.path))

    return for_each(job_ids, act)


# -- push -----------------------------------------------------------------------------------
# `fsdp-tui push`: upload a job's export to the hub.


@click.command()
@ID
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step of the checkpoint to push (default: the export, else the newest).",
)
@BEST
@click.option("--repo", metavar="ORG/NAME", help="Repository (default: the job's hub_model_id).")
@click.option("--private", is_flag=True, help="Create the repository as a private one.")
@JSON
def push(
    job_id: int, step: int | None, best: bool, repo: str | None, private: bool, as_json: bool
) -> None:
    """Push a job's export to the Hugging Face hub with a model card, and print its address.

    Works for running and ended jobs, also without push_to_hub. What is there already is not sent
    again. The card has samples, settings and the number of training images, but no captions or
    paths; validation prompts stand beside their images.

    \b
    fsdp-tui push 3 --repo me/my-lora --private
    """
    job = Store().get(job_id)
    step = _step(job, step, best, "pushes")
    with ProgressLine("pushing") as line:
        done = push_step(
            job,
            step,
            repo=repo,
            private=private or None,
            progress=lambda done, total: line(done, total, f"exporting: {done} %"),
        )
    echo(json.dumps(asdict(done)) if as_json else done.url)


# -- samples --------------------------------------------------------------------------------
# `fsdp-tui samples`: list the images and videos that a job made.


_PROMPT = 40  # characters


@click.command()
@ID
@click.option("--step", type=click.IntRange(min=0), help="Only the samples of this step.")
@click.option("--newest", is_flag=True, help="Only the newest samples.")
@JSON
def samples(job_id: int, step: int | None, newest: bool, as_json: bool) -> None:
    """List a job's samples: step, prompt, size and path.

    \b
    fsdp-tui samples 3 --newest
    fsdp-tui samples 3 --json | jq -r '.[].picture'
    """
    chosen = list_samples(Store().get(job_id).run_dir)
    if newest and chosen:
        step = chosen[-1].step
    chosen = tuple(sample for sample in chosen if step is None or sample.step == step)
    if as_json:
        echo(json.dumps([sample.to_dict() for sample in chosen]))
    elif not chosen:
        echo("no samples" if step is None else f"no samples of step {step}")
    else:
        rows = [
            (
                str(sample.step),
                str(sample.number + 1),
                f"layer {number}"
                if number
                else cut(" ".join(sample.prompt.split()) or MISSING, _PROMPT),
                "×".join(map(str, sample.size)) if sample.size else MISSING,
                MISSING if number else size(sample.bytes),
                str(path),
            )
            for sample in chosen
            for number, path in enumerate((sample.video or sample.picture, *sample.layers))
        ]
        echo(table(("STEP", "NO", "PROMPT", "PIXELS", "SIZE", "PATH"), rows))
