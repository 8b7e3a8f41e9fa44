"""The checkpoints of a run as a person sees them: whole, damaged, and set aside."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import NotFoundError
from jobs.run.checkpoint_files import UnreadableError, find_damage, read_checkpoint
from jobs.run.disk_space import directory_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from jobs.run.rundir import RunDir

_NAME: Final = re.compile(r"step-(?P<step>\d+)(?:\.(?P<word>[a-z]+)(?:-\d+)?)?")
_MOST_NAMED: Final = 8  # in a sentence


@dataclass(frozen=True)
class Listed:
    """A directory of a checkpoint, whatever its condition. What is not known is None.

    Attributes:
        name: Of the directory.
        step: Optimizer steps done.
        path: The directory.
        bytes: The size of its files.
        time: When it was written, in Unix seconds.
        layout: "sharded" or "full".
        world_size: Ranks that wrote it.
        ema: Whether it holds a moving average of the weights.
        damage: What is wrong with it; None when nothing is known to be.
        readable: Whether it could be read; else `damage` says why not.
        set_aside: Why no run takes it: "rewound" or "damaged".
        verified: Whether every byte was read and matches its checksum.
        next: Whether a run that is resumed continues from it.
    """

    name: str
    step: int
    path: Path
    bytes: int
    time: float
    layout: str | None = None
    world_size: int | None = None
    ema: bool | None = None
    damage: str | None = None
    set_aside: str | None = None
    verified: bool = False
    next: bool = False
    readable: bool = True

    @property
    def health(self) -> str:
        """Its condition in words."""
        words = [f"set aside ({self.set_aside})"] if self.set_aside else []
        # What was set aside as damaged needs no second complaint before someone looks closer.
        if self.damage and (self.set_aside != "damaged" or self.verified):
            words.append(f"damaged: {self.damage}" if self.readable else self.damage)
        elif self.verified:
            words.append("verified")
        return ", ".join(words) or "complete"

    def to_dict(self) -> dict[str, Any]:
        """For scripts; `health` says whether it is readable."""
        facts = asdict(self) | {"path": str(self.path), "health": self.health}
        del facts["readable"]
        return facts


def list_all(run_dir: RunDir) -> list[Listed]:
    """Every checkpoint of a run, oldest first; names and sizes of files are compared."""
    checkpoints = []
    for path in run_dir.checkpoints.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            checkpoints.append(_look(path, int(match["step"]), match["word"]))
        except OSError:
            continue  # deleted meanwhile
    checkpoints.sort(
        key=lambda checkpoint: (checkpoint.step, checkpoint.set_aside is not None, checkpoint.name)
    )
    # As `jobs.run.checkpoint_files.newest_whole` has it.
    whole = [
        n
        for n, checkpoint in enumerate(checkpoints)
        if checkpoint.set_aside is None and checkpoint.damage is None
    ]
    for number in whole[-1:]:
        checkpoints[number] = replace(checkpoints[number], next=True)
    return checkpoints


def _look(path: Path, step: int, word: str | None) -> Listed:
    checkpoint = read_checkpoint(path)
    damage, readable = _damage(path)
    if checkpoint is None:
        return Listed(
            path.name,
            step,
            path,
            directory_size(path),
            path.stat().st_mtime,
            damage=damage,
            set_aside=word,
            readable=readable,
        )
    return Listed(
        path.name,
        step,
        path,
        checkpoint.bytes,
        checkpoint.time,
        checkpoint.layout,
        checkpoint.world_size,
        checkpoint.ema,
        damage,
        word,
        readable=readable,
    )


def verify(listed: Listed, progress: Callable[[int], None] = lambda count: None) -> Listed:
    """Read every byte of a checkpoint.

    Args:
        listed: The checkpoint.
        progress: Called with the number of bytes read since the last call; what it raises ends
            the reading.

    Raises:
        NotFoundError: It was deleted while it was read.
    """
    damage, readable = _damage(listed.path, contents=True, progress=progress)
    if damage is not None and not listed.path.exists():
        raise NotFoundError(f"{listed.name} has been deleted")
    return replace(listed, damage=damage, readable=readable, verified=True)


def _damage(
    path: Path, *, contents: bool = False, progress: Callable[[int], None] = lambda count: None
) -> tuple[str | None, bool]:
    """Return the damage, if any, and whether the checkpoint could be read."""
    try:
        return find_damage(path, contents=contents, progress=progress), True
    except UnreadableError as error:
        return error.message, False


def find_listed(listed: Sequence[Listed], name: str, whose: str) -> Listed:
    """Find a checkpoint by name: `30`, `step-30` or `step-30.rewound`.

    Raises:
        NotFoundError: No checkpoint has this name.
    """
    word = name.strip().rstrip("/")
    directory = f"step-{int(word)}" if word.isdecimal() else word
    for checkpoint in listed:
        if checkpoint.name == directory:
            return checkpoint
    names = [checkpoint.name for checkpoint in listed]
    more = ["…"] if len(names) > _MOST_NAMED else []
    there = f"there are {', '.join(more + names[-_MOST_NAMED:])}" if names else None
    raise NotFoundError(f"{whose} has no checkpoint {directory}", there)


def free_bytes(run_dir: RunDir) -> int | None:
    """Free space where a run's checkpoints are; None when its directory is gone."""
    try:
        return shutil.disk_usage(run_dir.root).free
    except OSError:
        return None
