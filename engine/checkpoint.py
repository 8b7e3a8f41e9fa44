"""Checkpoints: complete or absent. Written aside by all ranks, then renamed into place.

`torch.distributed.checkpoint` holds the trained tensors and the optimizer's; a JSON file holds
the step and the schedule; a manifest lists every file with its size and hash. Draws are keyed by
step, so there is no generator state to keep.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from engine.optim import explain_load_failure, fill_state
from jobs.checkpoints import STATE_FILE, find_damage, set_aside, sha256
from jobs.rundir import MANIFEST, read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.training import Training
    from engine.world import World
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec

_SCHEMA: Final = 1
# Only what is trained: a LoRA's frozen base is never saved.
_OPTIONS: Final = StateDictOptions(ignore_frozen_params=True)


def save(training: Training, spec: JobSpec, run_dir: RunDir, world: World) -> Path:
    """Write the checkpoint of the present step; a collective.

    Returns:
        Its directory. A complete checkpoint of the same step is left as it is.
    """
    final = run_dir.checkpoint(training.step)
    # Agreed, since a network file system may show it to one rank before another.
    if world.any([read_json(final / MANIFEST) is not None])[0]:
        return final
    aside = final.with_name(f".{final.name}.tmp")
    if world.main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.barrier()
    try:
        state_dict_saver.save(_tensors(training), checkpoint_id=aside, no_dist=world.size == 1)
    except CheckpointException as error:
        # Torch has gathered what went wrong from all ranks, so all of them are here.
        shutil.rmtree(aside, ignore_errors=True)  # it may be what fills the disk
        failures = [failure for failure, _ in error.failures.values()]
        raise next((f for f in failures if isinstance(f, OSError)), error) from None
    if world.main:
        state = {
            "schema": _SCHEMA,
            "step": training.step,
            "scheduler": training.scheduler.state_dict(),
            "scaler": training.scaler.state_dict() if training.scaler is not None else None,
            "ema": training.ema is not None,
            "world_size": world.size,
            "spec": spec.to_dict(),
            "digest": spec.digest(),
            "time": time.time(),
        }
        (aside / STATE_FILE).write_text(json.dumps(state, indent=1, default=_no_functions) + "\n")
        _write_manifest(aside, training.step)
        shutil.rmtree(final, ignore_errors=True)  # incomplete, see above
        os.replace(aside, final)
        _sync(final.parent)
        _keep_newest(run_dir, spec.checkpoints_total_limit)
    world.barrier()  # nobody goes on, or ends, before the checkpoint is in its place
    return final


def load(training: Training, path: Path, world: World) -> None:
    """Restore model, optimizer, schedule and step, on any number of ranks; a collective.

    Args:
        training: What to restore; built for the same job.
        path: A sound checkpoint, see `newest_sound`.
        world: The ranks.
    """
    state = read_json(path / STATE_FILE) or {}
    tensors = _tensors(training, ema=bool(state.get("ema")))
    try:
        state_dict_loader.load(tensors, checkpoint_id=path, no_dist=world.size == 1)
    except CheckpointException as error:
        raise explain_load_failure(error) or error from None
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=tensors["model"],
        optim_state_dict=tensors["optimizer"],
        options=StateDictOptions(ignore_frozen_params=True, strict=False),
    )
    training.scheduler.load_state_dict(state["scheduler"])
    training.step = int(state["step"])
    if training.scaler is not None and state.get("scaler"):
        training.scaler.load_state_dict(state["scaler"])
    if training.ema is not None and not state.get("ema"):
        training.ema.restart()  # the checkpoint is of a time before there was an average


def newest_sound(run_dir: RunDir, tell: Callable[[str], None]) -> tuple[int, Path] | None:
    """The newest checkpoint whose files are what its manifest says: `(step, path)`.

    Reads every byte of it, so one rank does this for all.

    Args:
        run_dir: The run.
        tell: Called with a line for each damaged checkpoint that is passed over.
    """
    for step, path in reversed(run_dir.complete_checkpoints()):
        damage = find_damage(path)
        if damage is None:
            return step, path
        # Out of the way, so that the run can write this step again; kept for whoever wants it.
        aside = set_aside(path, "damaged")
        tell(f"the checkpoint {path.name} is damaged ({damage}), now {aside.name}")
    return None


def _tensors(training: Training, *, ema: bool = True) -> dict[str, Any]:
    fill_state(training.optimizer)
    model, optimizer = get_state_dict(training.model, training.optimizer, options=_OPTIONS)
    tensors: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if training.ema is not None and ema:
        tensors["ema"] = training.ema.shadow  # loading fills these very tensors
    return tensors


def _write_manifest(directory: Path, step: int) -> None:
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            files[str(path.relative_to(directory))] = {
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
            _sync(path)
    manifest = {"schema": _SCHEMA, "step": step, "files": files}
    write_atomic(directory / MANIFEST, json.dumps(manifest, indent=1) + "\n", durable=True)
    _sync(directory)


def _keep_newest(run_dir: RunDir, limit: int | None) -> None:
    if limit is None:
        return
    for _, path in run_dir.complete_checkpoints()[:-limit]:
        # The manifest first: a half-deleted checkpoint must not look complete.
        (path / MANIFEST).unlink()
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_functions(value: object) -> None:
    """`LambdaLR` lists its functions in its state; they are rebuilt from the spec."""
    del value
