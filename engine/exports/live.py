"""Export the model in training: all ranks gather, rank 0 writes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from engine.exports.recipe import Recipe
from engine.exports.source import LiveModel
from engine.exports.writing import Writing
from engine.model.adapters.lora import is_lora
from jobs.run.checkpoint_files import read_checkpoint
from jobs.run.events import Export

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from engine.exports.writing import Exported
    from engine.ranks.team import FileBarrier
    from engine.ranks.world import World
    from engine.run_context import RunContext
    from engine.train.train_state import TrainState

_PLACE: Final = "export"


def export_trained(run: RunContext, training: TrainState) -> None:
    """Export the weights at the end of a run (the average if there is one), and report it."""
    spec, telemetry = run.spec, run.telemetry
    saved = read_checkpoint(run.run_dir.checkpoint(training.step))
    recipe = Recipe(
        spec,
        run.family,
        run.model_root,
        training.step,
        training.has_average,
        spec.export_dtype,
        spec.export_formats,
        # Use the last checkpoint's time, so that exporting that checkpoint gives identical bytes.
        saved.time if saved is not None else time.time(),
    )
    with telemetry.phase("export") as progress, training.averaged():

        def report(done: int, total: int) -> None:
            progress.total = total
            progress(done)

        target = run.run_dir.export
        exported = export(training.model, recipe, target, run.world, run.barrier, report)
    if exported is not None:
        for warning in exported.warnings:
            telemetry.warn(warning)
        telemetry.emit(Export(str(exported.path)))
        telemetry.say(f"exported to {exported.path}")


def export(
    model: torch.nn.Module,
    recipe: Recipe,
    target: Path,
    world: World,
    barrier: FileBarrier,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported | None:
    """Export a model, sharded or not. Collective while its tensors are gathered one by one.

    Syncing to disk and reading back may take long, so the other ranks wait for rank 0 at a file
    barrier, outside of any collective.

    Args:
        model: Holds the weights to export, averaged or not.
        recipe: Describes the export.
        target: The directory, whose old content stays until the new one is complete.
        world: The ranks.
        barrier: Where the other ranks wait.
        progress: Called on rank 0 with the amount done and the total.

    Returns:
        The export on rank 0, else None.

    Raises:
        UserError: It cannot be written, or the weights cannot be exported (rank 0).
        DamagedError: The files on disk differ from memory (rank 0).
        StrandedError: Rank 0 failed (other ranks).
    """
    source = LiveModel(_trained(model, recipe), keep=world.main)
    if not world.main:
        for name in source.facts:
            source.read(name)
        barrier.wait(_PLACE, ranks=1)
        return None
    failure: Exception | None = None
    with ExitStack() as opened:
        writing: Writing | None = None
        try:
            writing = opened.enter_context(Writing(recipe, source.facts, target, progress))
        except Exception as error:  # raised later, since the other ranks are gathering
            failure = error
        for name in source.facts:
            whole = source.read(name)
            try:
                if failure is None and writing is not None and whole is not None:
                    writing.add(name, whole)
            except Exception as error:
                failure = error
            del whole
        if failure is not None:
            raise failure
        assert writing is not None
        exported = writing.finish()
    barrier.arrive(_PLACE)
    return exported


def _trained(model: torch.nn.Module, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the tensors to export, each once, in the same order on all ranks.

    Read them from the state dict: building it makes FSDP reshard parameters that a forward left
    unsharded, and unsharded copies do not follow the average.
    """
    first: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first.setdefault(id(tensor), name) == name
        and (recipe.spec.model_type != "lora" or is_lora(name))
    }
