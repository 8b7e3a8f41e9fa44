"""The checkpoint that a run begins from: its own newest sound one, else the one the job names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from jobs.checkpoints import find_damage, read_checkpoint, set_aside
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.world import World
    from jobs.rundir import RunDir

_T = TypeVar("_T")


def choose_start(
    run_dir: RunDir,
    named: str | None,
    world: World,
    tell: Callable[[str], None],
    progress: Callable[[int], None] = lambda count: None,
) -> Path | None:
    """The checkpoint to begin from, the same on all ranks; a collective.

    Every byte of it is read and compared with its manifest, by all ranks together. A damaged one
    of the run's own is renamed and passed over for the one before; nobody else's is touched.

    Args:
        run_dir: The run.
        named: Where the job begins when it has no checkpoint of its own.
        world: The ranks.
        tell: Called on rank 0 with a line for each damaged checkpoint that is passed over.
        progress: Called with the number of bytes read since the last call.

    Returns:
        Its directory; None when there is none, and training begins at step 0.

    Raises:
        UserError: The named one is missing or damaged.
    """
    # Read once: a network file system may show it to one rank before another.
    own = from_main(
        [str(path) for _, path in reversed(run_dir.complete_checkpoints())] if world.main else [],
        world,
    )
    for path in map(Path, own):
        damage = _damage(path, world, progress)
        if damage is None:
            return path
        if world.main:
            # Out of the way, so that the run can write this step again; kept for whoever wants it.
            aside = set_aside(path, "damaged")
            tell(f"the checkpoint {path.name} is damaged ({damage}), now {aside.name}")
        from_main(None, world)  # nobody looks further before it is out of the way
    if named is None:
        return None
    path = Path(named)
    damage = _damage(path, world, progress)
    if damage is not None:
        raise UserError(
            f"resume_from_checkpoint: {path} cannot be used: {damage}",
            "name another checkpoint, or leave resume_from_checkpoint out",
        )
    return path


def step_of(path: Path) -> int:
    """The optimizer steps that a complete checkpoint has done."""
    checkpoint = read_checkpoint(path)
    assert checkpoint is not None, path
    return checkpoint.step


def _damage(path: Path, world: World, progress: Callable[[int], None]) -> str | None:
    """What is wrong with a checkpoint, the same answer on all ranks; each reads some files."""
    own = find_damage(path, share=(world.rank, world.size), progress=progress)
    found: list[str | None] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(found, own)
    return next((damage for damage in found if damage is not None), None)


def from_main(value: _T, world: World) -> _T:
    """Rank 0's value, on all ranks; a collective."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]
