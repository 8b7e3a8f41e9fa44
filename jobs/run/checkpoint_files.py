"""Checkpoints as files: which there are, whether they are whole, and what may be done with them.

A checkpoint is a directory `step-<n>` with a manifest, which is written last and lists every other
file with its size and SHA-256. Nothing here needs torch; `engine.checkpoint` writes and loads them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.errors import NotFoundError, UserError
from jobs.run.disk_space import directory_size
from jobs.run.judging import LOSS, UNMEASURED, Judged, Measurements, judge
from jobs.run.rundir import MANIFEST, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from jobs.run.rundir import RunDir


# Step, schedule, loss scale, the job as it was, and what its data was: JSON beside the tensors.
STATE_FILE: Final = "trainer_state.json"

# What the name of a checkpoint gets that is newer than the one a run went back to.
REWOUND: Final = "rewound"


class UnreadableError(UserError):
    """The file system does not give a file away; nothing is known of what is in it."""

    def __init__(self, file: Path, error: OSError) -> None:
        super().__init__(
            f"cannot read {file} ({error.strerror})",
            "the checkpoint itself may be intact; check the disk, then try again",
        )


Layout = Literal["sharded", "full"]

_MOST_NAMED: Final = 8  # steps in a sentence
_CHUNK: Final = 1 << 20  # bytes read at once
_NO_MANIFEST: Final = "no readable manifest"
_LONGEST_NAME: Final = 255  # bytes, of Linux
_LONGEST_SHOWN: Final = 60


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        step: Optimizer steps done.
        path: Its directory.
        bytes: The size of all its files.
        layout: "sharded": what every rank had, in its own file; "full": whole tensors.
        world_size: Ranks that wrote it; None in manifests that do not say so.
        ema: Whether it holds a moving average of the weights.
        time: When it was complete, in Unix seconds.
        files: Relative name → size in bytes and SHA-256.
    """

    step: int
    path: Path
    bytes: int
    layout: Layout
    world_size: int | None
    ema: bool
    time: float
    files: dict[str, tuple[int, str]]


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory; None if it is incomplete."""
    result = _read(path)
    return result if isinstance(result, Checkpoint) else None


def _read(path: Path) -> Checkpoint | str:
    """Return the checkpoint in a directory, or why there is none."""
    manifest = read_json(path / MANIFEST)
    if manifest is None:
        return _NO_MANIFEST
    try:
        files = {str(n): (int(f["bytes"]), str(f["sha256"])) for n, f in manifest["files"].items()}
        step = int(manifest["step"])
        written = float(manifest.get("time") or (path / MANIFEST).stat().st_mtime)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        return _NO_MANIFEST
    for name in files:
        if not _is_file_name(name):
            return f"its manifest lists {name[:_LONGEST_SHOWN]!a}, which is not a file of it"
    return Checkpoint(
        step=step,
        path=path,
        bytes=sum(size for size, _ in files.values()),
        layout="full" if manifest.get("layout") == "full" else "sharded",
        world_size=manifest.get("world_size"),
        ema=bool(manifest.get("ema")),
        time=written,
        files=files,
    )


def _is_file_name(name: str) -> bool:
    """Whether a file in the checkpoint itself can have this name."""
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return 0 < length <= _LONGEST_NAME and name not in (".", "..") and not {"/", "\0"} & {*name}


def list_checkpoints(run_dir: RunDir) -> list[Checkpoint]:
    """List a run's complete checkpoints, the oldest first. Reads manifests only."""
    checkpoints = (read_checkpoint(path) for _, path in run_dir.complete_checkpoints())
    return [checkpoint for checkpoint in checkpoints if checkpoint is not None]


def find_checkpoint(run_dir: RunDir, step: int | None, whose: str) -> Checkpoint:
    """Return a checkpoint with correct file sizes; the newest one by default.

    Args:
        run_dir: The run.
        step: Which one.
        whose: The run, in words, for what is raised.

    Raises:
        NotFoundError: There is none, or it is damaged.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise NotFoundError(f"{whose} has no checkpoint")
    candidates = [checkpoint for checkpoint in checkpoints if step in (None, checkpoint.step)]
    if not candidates:
        raise NotFoundError(f"{whose} has no checkpoint of step {step}", _there_are(run_dir, step))
    damage = None
    for checkpoint in reversed(candidates):
        damage = find_damage(checkpoint.path, contents=False)
        if damage is None:
            return checkpoint
    raise NotFoundError(
        f"{whose}: {candidates[-1].path.name} is damaged ({damage})"
        if len(candidates) == 1
        else f"{whose} has no intact checkpoint"
    )


def find_best(run_dir: RunDir, measured: Measurements, whose: str) -> Judged:
    """Find the best checkpoint of a run whose file sizes are right.

    Args:
        run_dir: The run.
        measured: What its checkpoints are judged by.
        whose: The run, in words, for what is raised.

    Raises:
        NotFoundError: There is none, or nothing says which one is the best.
    """
    saved = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run_dir)}
    if not saved:
        raise NotFoundError(f"{whose} has no checkpoint")
    by_loss = measured.by == LOSS
    if not measured:
        raise NotFoundError(
            f"{whose} has no {measured.title}, so none of its checkpoints is the best",
            "set validation_fraction to hold data out (0.05 is a twentieth) and "
            "validation_loss_steps to measure it"
            if by_loss
            else "it is measured where samples are made, after every validation_steps steps",
        )
    for judged in judge(saved, measured):
        if find_damage(saved[judged.step].path, contents=False) is None:
            return judged
    raise NotFoundError(
        f"{whose} has no intact checkpoint of step {measured.values[0][0]}, where its "
        f"{measured.title} was first measured, or later",
        f"lower {'validation_loss_steps' if by_loss else 'validation_steps'} to measure it earlier",
    )


def newest_whole(run_dir: RunDir) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from: the newest with correct file sizes."""
    whole = (
        checkpoint
        for checkpoint in reversed(list_checkpoints(run_dir))
        if find_damage(checkpoint.path, contents=False) is None
    )
    return next(whole, None)


def _there_are(run_dir: RunDir, step: int | None) -> str:
    """Which checkpoints exist instead of the requested one."""
    aside = sorted(path.name for path in run_dir.checkpoints.glob(f"step-{step}.*"))
    if aside:
        return f"it was set aside as {aside[0]}; rename it to restore it"
    steps = [str(number) for number, _ in run_dir.complete_checkpoints()]
    more = ["…"] if len(steps) > _MOST_NAMED else []
    return f"there are {', '.join(more + steps[-_MOST_NAMED:])}"


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's training state (`STATE_FILE`); empty if it cannot be read.

    Its `spec`, the job, is a mapping if it is there.
    """
    state = read_json(path / STATE_FILE) or {}
    if not isinstance(state.get("spec"), dict):
        state.pop("spec", None)
    return state


def find_damage(
    path: Path,
    *,
    contents: bool = True,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda count: None,
) -> str | None:
    """Return what is wrong with a checkpoint by its manifest, or None.

    Args:
        path: Its directory.
        contents: Also read every byte; without it only names and sizes are compared.
        share: `(number, of)`: read only every `of`-th file, from `number` on, where several
            divide the work. Names and sizes are always compared of all.
        progress: Called with the number of bytes read since the last call.

    Raises:
        UnreadableError: A file is there and cannot be read; it may be whole.
    """
    checkpoint = _read(path)
    if isinstance(checkpoint, str):
        return checkpoint
    for name, (expected, _) in checkpoint.files.items():
        try:
            status = (path / name).stat()
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            raise UnreadableError(path / name, error) from error
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            return f"{name} is not a file"
        if status.st_size != expected:
            return f"{name} has {status.st_size} bytes, not {expected}"
    if not contents:
        return None
    number, of = share
    for name, (_, digest) in list(checkpoint.files.items())[number::of]:
        try:
            if sha256(path / name, progress) != digest:
                return f"{name} has changed since it was written"
        except OSError as error:
            raise UnreadableError(path / name, error) from error
    return None


def sha256(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def delete(path: Path) -> None:
    """Delete a checkpoint as far as can be; nothing happens when it is gone already."""
    with suppress(OSError):
        shutil.rmtree(_hidden(path), ignore_errors=True)


def delete_files(paths: list[Path]) -> None:
    """Delete checkpoints, complete or not, for a person who asks for it: all of them, or none.

    Raises:
        UserError: One cannot be deleted, and none is; or they are, and files of them are left.
    """
    hidden: list[tuple[Path, Path]] = []
    for path in paths:
        try:
            hidden.append((path, _hidden(path)))
        except FileNotFoundError:
            continue  # someone else was quicker
        except OSError as error:
            _put_back(hidden)
            raise UserError(f"cannot delete {path} ({error.strerror})") from error
    for _, aside in hidden:
        shutil.rmtree(aside, ignore_errors=True)
    if left := [aside for _, aside in hidden if aside.exists()]:
        raise UserError(
            f"{', '.join(path.name for path, _ in hidden)} deleted, but not all of "
            f"{', '.join(map(str, left))} could be",
            "the next start of the job tries again",
        )


def _put_back(hidden: list[tuple[Path, Path]]) -> None:
    for path, aside in hidden:
        with suppress(OSError):
            os.replace(aside, path)


def _hidden(path: Path) -> Path:
    """Rename what is to be deleted: one half deleted is neither complete nor in anyone's way.

    What a kill leaves is removed with saves that were cut off (`RunDir.forget_unfinished`).
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    os.replace(path, aside)
    return aside


def set_aside(path: Path, word: str) -> Path:
    """Rename a checkpoint so that no run takes it for one of its own; nothing is deleted.

    Args:
        path: Its directory.
        word: Why, such as "damaged": `step-4` becomes `step-4.damaged`, or `step-4.damaged-2`
            where that exists already.

    Returns:
        Its new directory.
    """
    target = _free_name(path, word)
    os.replace(path, target)
    return target


def _free_name(path: Path, word: str) -> Path:
    number, target = 1, path.with_name(f"{path.name}.{word}")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{word}-{number}")
    return target


def newer(run_dir: RunDir, step: int) -> list[tuple[int, Path]]:
    """Return the complete checkpoints of later steps."""
    return [(number, path) for number, path in run_dir.complete_checkpoints() if number > step]


def plan_rewind(run_dir: RunDir, step: int) -> list[tuple[Path, Path]]:
    """Where the checkpoints of later steps are, and where they are to be set aside."""
    return [(path, _free_name(path, REWOUND)) for _, path in newer(run_dir, step)]


def rewind(moves: list[tuple[Path, Path]]) -> None:
    """Set checkpoints aside as planned.

    Raises:
        UserError: One cannot be renamed; those before it are.
    """
    for before, now in moves:
        try:
            os.replace(before, now)
        except OSError as error:
            raise UserError(
                f"cannot rename a checkpoint in {before.parent} ({error.strerror})"
            ) from error


# -- checkpoint list ------------------------------------------------------------------------
# The checkpoints of a run as a person sees them: whole, damaged, and set aside.


_NAME: Final = re.compile(r"step-(?P<step>\d+)(?:\.(?P<word>[a-z]+)(?:-\d+)?)?")


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
        value: What it is judged by (`by`), at its step or the newest one before.
        value_step: The step at which that was measured.
        by: The criterion: its validation loss, or a score of its samples.
        best: Whether no other one of the run has a better one.
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
    value: float | None = None
    value_step: int | None = None
    by: str = LOSS
    best: bool = False

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
        own = [facts.pop(name) for name in ("value", "value_step", "by", "readable")]
        facts |= dict.fromkeys(("loss", "loss_step"))
        if self.by == LOSS:
            return facts | {"loss": own[0], "loss_step": own[1]}
        return facts | {"score": own[0], "score_step": own[1], "by": self.by}


def list_all(run_dir: RunDir, measured: Measurements = UNMEASURED) -> list[Listed]:
    """Every checkpoint of a run, oldest first; names and sizes of files are compared.

    Args:
        run_dir: The run.
        measured: What says which one is the best.
    """
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
    numbers = {checkpoints[number].step: number for number in whole}
    for place, judged in enumerate(judge(numbers, measured)):
        number = numbers[judged.step]
        checkpoints[number] = replace(
            checkpoints[number],
            value=judged.value,
            value_step=judged.measured,
            by=judged.by,
            best=place == 0,
        )
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
