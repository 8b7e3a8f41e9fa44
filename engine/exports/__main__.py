"""`python -m engine.exports CHECKPOINT TARGET`: export a checkpoint, print what came of it as JSON.

Reads one tensor at a time, and needs no GPU.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from engine.start.command import OneLineParser, run_command
from jobs.errors import UserError
from jobs.run.checkpoint_files import find_damage, read_checkpoint, read_state
from jobs.spec.keys.output import ExportDtype, ExportFormat

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from engine.exports.recipe import Recipe
    from jobs.run.checkpoint_files import Checkpoint

_PROGRESS_EVERY: Final = 0.2  # seconds
_SETTINGS: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Progress goes to standard error as `exporting STAGE DONE TOTAL` lines.

    Returns:
        0, 1 if the written export differs from the trained weights, or 2 for bad input.
    """
    parser = OneLineParser(prog="python -m engine.exports", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("target", type=Path)
    dtypes = (*get_args(ExportDtype), "fp8")
    parser.add_argument("--other", type=Path, help="the checkpoint of the model's other expert")
    parser.add_argument("--dtype", choices=dtypes, help="default: the job's; fp8: single files")
    parser.add_argument("--format", action="append", choices=get_args(ExportFormat))
    parser.add_argument("--no_ema", action="store_true", help="export the raw weights")
    parser.add_argument("--single_file", action="store_true", help="as ComfyUI and Forge load it")
    options = parser.parse_args(arguments)
    try:
        exported = _export(options)
    except UserError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(
            f"fsdp-tui: {error.filename} is gone; the job may have deleted this checkpoint "
            "(checkpoints_total_limit); export a newer one",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(exported))
    return 0


def _export(options: Namespace) -> dict[str, Any]:
    checkpoints = [_read(path) for path in (options.checkpoint, options.other) if path is not None]
    progress = _Progress()
    _check(checkpoints, progress)

    # torch and diffusers take seconds to import, so first check that there is something to export.
    from engine.exports.source import open_checkpoint
    from engine.exports.writing import Writing

    recipes = [_recipe(checkpoint, options) for checkpoint in checkpoints]
    if len(recipes) > 1:
        first, second = (recipe.family.component for recipe in recipes)
        recipes = [
            replace(recipes[0], partner=second),
            replace(recipes[1], partner=first, leads=False),
        ]
    pairs = zip(checkpoints, recipes, strict=True)
    sources = [open_checkpoint(checkpoint, ema=recipe.ema) for checkpoint, recipe in pairs]
    parts = [(recipe, source.facts) for recipe, source in zip(recipes, sources, strict=True)]
    report = progress.of("writing")
    with Writing(*parts[0], options.target, report, *parts[1:]) as writing:
        for number, source in enumerate(sources):
            for name in source.facts:
                writing.add(name, source.read(name), of_other=bool(number))
        exported = writing.finish()
    return {
        "path": str(exported.path),
        "step": recipes[0].step,
        "ema": recipes[0].ema,
        "warnings": list(exported.warnings),
    }


def _read(path: Path) -> Checkpoint:
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} is not a complete checkpoint")
    return checkpoint


def _recipe(checkpoint: Checkpoint, options: Namespace) -> Recipe:
    """Describe the export of a checkpoint by the job that trained it."""
    from engine import families
    from engine.exports.recipe import Recipe
    from jobs.models.find_model import find_model
    from jobs.spec.job_spec import JobSpec, field_names

    state = read_state(checkpoint.path)
    values = {k: v for k, v in (state.get("spec") or {}).items() if k in field_names()}
    if not values:
        raise UserError(f"{checkpoint.path} does not name its job")
    spec = JobSpec.model_validate(values)
    root = find_model(spec.pretrained_model_name_or_path)
    return Recipe(
        spec=spec,
        family=families.load(spec.model_family, spec.model_flavour, root),
        root=root,
        step=checkpoint.step,
        ema=bool(state.get("ema")) and not options.no_ema,
        dtype=options.dtype or spec.export_dtype,
        formats=options.format or spec.export_formats,
        time=checkpoint.time,
        single_file=options.single_file,
    )


def _check(checkpoints: Sequence[Checkpoint], progress: _Progress) -> None:
    """Read every byte of the checkpoints and verify their checksums.

    Raises:
        UserError: A checkpoint is damaged.
    """
    report, total = progress.of("checking"), sum(each.bytes for each in checkpoints) >> 20
    read = 0

    def more(count: int) -> None:
        nonlocal read
        read += count
        report(min(read >> 20, total), total)

    for checkpoint in checkpoints:
        if damage := find_damage(checkpoint.path, progress=more):
            raise UserError(
                f"the checkpoint {checkpoint.path.name} is damaged ({damage})",
                "export another one (--step N)",
            )


class _Progress:
    """Prints the progress of each stage, a few times a second."""

    def __init__(self) -> None:
        self._printed = 0.0

    def of(self, stage: str) -> Any:
        """Return a stage's callback, which takes the amount done and the total."""
        self._printed = 0.0  # the first progress of a stage is always printed

        def report(done: int, total: int) -> None:
            if done == total or time.monotonic() - self._printed >= _PROGRESS_EVERY:
                self._printed = time.monotonic()
                print(f"exporting {stage} {done} {total}", file=sys.stderr, flush=True)

        return report


def prepare_process() -> None:
    """Set up this process as a command-line tool, before torch is imported."""
    # All inputs are on this machine, and exporting needs no GPU.
    os.environ.update(_SETTINGS)
    for library in ("torchao", "torch.utils._pytree"):  # irrelevant advice
        logging.getLogger(library).setLevel(logging.ERROR)
    # SIGTERM means that the export is no longer needed: exit normally so that partial files are
    # removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    prepare_process()
    run_command(main)
