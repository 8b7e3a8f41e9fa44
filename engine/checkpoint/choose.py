"""The checkpoint that a run begins from: its own newest sound one, else the one the job names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.run.checkpoint_files import UnreadableError, find_damage, set_aside

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.ranks.world import World
    from jobs.run.rundir import RunDir

_MOST_NAMED: Final = 3


def choose_start(
    run_dir: RunDir,
    named: str | None,
    world: World,
    tell: Callable[[str], None],
    progress: Callable[[int], None] = lambda count: None,
) -> Path | None:
    """Return the checkpoint to begin from, the same on all ranks; a collective.

    Every byte of it is read and compared with its manifest, by all ranks together. Damaged ones
    of the run's own are passed over for the one before, and renamed when that is sound; nobody
    else's are touched.

    Args:
        run_dir: The run.
        named: Where the job begins when it has no checkpoint of its own.
        world: The ranks.
        tell: Called on rank 0 with a line for each damaged checkpoint that is passed over.
        progress: Called with the number of bytes read since the last call.

    Returns:
        Its directory; None when there is none, and training begins at step 0.

    Raises:
        UserError: The run has checkpoints and none of them is sound, the named one is missing or
            damaged, or one cannot be read.
    """
    # Read once: a network file system may show it to one rank before another.
    own = world.from_main(
        [str(path) for _, path in reversed(run_dir.complete_checkpoints())] if world.main else []
    )
    damaged: list[tuple[Path, str]] = []
    for path in map(Path, own):
        damage = _damage(path, world, progress)
        if damage is None:
            if world.main:
                _put_out_of_the_way(damaged, tell)
            world.barrier()  # no rank continues before they are
            return path
        damaged.append((path, damage))
    if damaged:
        # Restarted silently, the run would overwrite what someone may still recover.
        what = "; ".join(f"{path.name}: {damage}" for path, damage in damaged[:_MOST_NAMED])
        raise UserError(
            f"all checkpoints of this run are damaged ({what})",
            "`fsdp-tui resume ID --from 0` sets them aside and restarts at step 0",
        )
    if named is None:
        return None
    path = Path(named)
    damage = _damage(path, world, progress)
    if damage is not None:
        raise UserError(
            f"resume_from_checkpoint: {path} cannot be used: {damage}",
            "choose another checkpoint, or remove resume_from_checkpoint",
        )
    return path


def _put_out_of_the_way(damaged: list[tuple[Path, str]], tell: Callable[[str], None]) -> None:
    """So that the run can write these steps again; kept for whoever wants them."""
    for path, damage in damaged:
        aside = set_aside(path, "damaged")
        tell(f"the checkpoint {path.name} is damaged ({damage}), renamed to {aside.name}")


def _damage(path: Path, world: World, progress: Callable[[int], None]) -> str | None:
    """Return the problem with a checkpoint, the same on all ranks; each rank reads some files.

    Raises:
        UserError: A rank cannot read it; raised on all of them.
    """
    own, unreadable = None, None
    try:
        own = find_damage(path, share=(world.rank, world.size), progress=progress)
    except UnreadableError as error:
        unreadable = str(error)
    everyone = world.gather((own, unreadable))
    for _, problem in everyone:
        if problem is not None:
            raise UserError(problem)
    return next((damage for damage, _ in everyone if damage is not None), None)
