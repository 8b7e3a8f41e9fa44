"""Check the file systems that jobs write to: free space, kind, and whether writing works."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.doctor.examine import Finding, fail, ok, warn
from jobs.errors import UserError
from jobs.machine.residence import LOCAL, kind_of
from jobs.memory.host_memory import STATE_BYTES
from jobs.models.find_model import count_parameters, find_denoiser, read_shapes
from jobs.paths import cache_home, expand, nearest, state_home
from jobs.queue.tables import journal_of
from jobs.spec.rules.averages import has_average
from jobs.spec.rules.steps import periodic_saves
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs.doctor.examine import Patient
    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.lora import LoraKeys


_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_GIB: Final = 2**30
_FULL: Final = 1 * _GIB
_TIGHT: Final = 20 * _GIB
_FEW_INODES: Final = 10_000
_PROBE: Final = 1 << 20  # bytes
_SKEW: Final = 2.0  # seconds


@dataclass(frozen=True)
class Disk:
    """The file system at a path.

    Attributes:
        path: The nearest existing directory.
        kind: ext4, nfs4, …; "?" if unknown.
        free: Bytes that this user may still write.
        inodes: Files that may still be created; None if the file system does not count them.
        problem: Why writing failed; None if it worked.
        skew: Seconds by which its clock is ahead of this machine's.
    """

    path: Path
    kind: str
    free: int
    inodes: int | None
    problem: str | None
    skew: float = 0.0


def check_state_disk(_: Patient) -> Iterator[Finding]:
    """Check the disk of the database and the run directories."""
    disk = look(state_home())
    yield from judge_disk("state", state_home(), disk)
    if disk.kind not in (*LOCAL, "?"):
        yield from judge_journal(disk.kind)
    elif disk.kind in _VOLATILE:
        yield warn(
            "state",
            f"{state_home()} is in memory ({disk.kind}) and is lost at a reboot",
            "point FSDP_TUI_HOME at a disk",
        )
    yield from judge_clock(disk)


def judge_journal(kind: str) -> Iterator[Finding]:
    """Check that the database's journal is safe on a file system that machines may share."""
    path = state_home() / "jobs.db"
    where = f"{state_home()} is on a file system that machines may share ({kind})"
    if path.exists() and (mode := journal_of(path)) == "wal":
        yield warn(
            "database",
            f"{where}, where SQLite's write-ahead log is not safe across machines",
            "stop jobs and dashboards, then `fsdp-tui doctor --repair` uses a rollback journal",
            journal=mode,
        )
    else:
        yield ok("database", f"{where}; it uses a rollback journal, which is safe there")


def check_cache_disk(patient: Patient) -> Iterator[Finding]:
    """Check the disk where latents and embeddings are cached."""
    spec = patient.spec
    place = expand(spec.cache_dir) if spec is not None and spec.cache_dir else cache_home()
    yield from judge_disk("cache", place, look(place))


def check_room(patient: Patient) -> Iterator[Finding]:
    """Check that the job's checkpoints will fit."""
    if patient.spec is not None:
        yield from judge_room(patient.spec, look(state_home()).free)


def judge_disk(name: str, place: Path, disk: Disk) -> Iterator[Finding]:
    """Judge a file system. Pure."""
    facts = {"path": str(place), "kind": disk.kind, "free": disk.free, "inodes": disk.inodes}
    room = f"{size(disk.free)} free on {disk.kind} ({place})"
    if disk.problem is not None:
        yield fail(
            name,
            f"{disk.path} is not writable: {disk.problem}",
            "point FSDP_TUI_HOME, or cache_dir of the job, elsewhere",
            **facts,
        )
    elif disk.free < _FULL:
        yield fail(
            name,
            f"only {size(disk.free)} free ({place})",
            "free space: `fsdp-tui cache list`, `fsdp-tui prune --keep-last N`",
            **facts,
        )
    elif disk.free < _TIGHT:
        yield warn(
            name,
            room,
            "free space before training: a checkpoint of a full model takes tens of GiB",
            **facts,
        )
    elif disk.inodes is not None and disk.inodes < _FEW_INODES:
        yield warn(
            name,
            f"only {disk.inodes} more files can be created there ({place})",
            "delete small files; every cached image is one",
            **facts,
        )
    else:
        yield ok(name, room, **facts)


def judge_clock(disk: Disk) -> Iterator[Finding]:
    """Judge the clock skew, which matters because heartbeats and files are compared by time.

    Pure.
    """
    if disk.problem is not None:
        return
    if abs(disk.skew) > _SKEW:
        way = "ahead of" if disk.skew > 0 else "behind"
        yield warn(
            "clock",
            f"the file system's clock is {abs(disk.skew):.0f} s {way} this machine's",
            "sync both to the same time server (chrony or systemd-timesyncd)",
            skew=disk.skew,
        )
    else:
        yield ok("clock", "the clocks of the machine and the file system agree", skew=disk.skew)


def judge_room(spec: JobSpec, free: int) -> Iterator[Finding]:
    """Judge the space for checkpoints. Pure except for reading the headers of the model's files."""
    each = checkpoint_bytes(spec)
    if each is None:
        return
    count = checkpoints_kept(spec)
    facts = {"each": each, "count": count, "free": free}
    words = f"{count} of about {size(each)} each; {size(free)} free"
    if each > free:
        yield fail(
            "checkpoints", words, "free space, or point FSDP_TUI_HOME at a larger disk", **facts
        )
    elif each * count > free:
        yield warn(
            "checkpoints",
            words,
            "set checkpoints_total_limit, or raise checkpointing_steps",
            **facts,
        )
    else:
        yield ok("checkpoints", words, **facts)


def look(place: Path) -> Disk:
    """Inspect the file system of a directory, which need not exist, by writing a temporary file."""
    path = nearest(place)
    facts = os.statvfs(path)
    problem, skew = None, 0.0
    try:
        skew = _write(path)
    except OSError as error:
        problem = error.strerror or str(error)
    return Disk(
        path=path,
        kind=kind_of(path),
        free=shutil.disk_usage(path).free,
        inodes=facts.f_favail if facts.f_files else None,
        problem=problem,
        skew=skew,
    )


def _write(folder: Path) -> float:
    """Write a file like a job would, because a quota may reject it in spite of free space.

    Returns:
        Seconds by which the file's modification time is ahead of this machine's clock.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fsdp-tui-doctor-") as file:
        before = time.time()
        file.write(bytes(_PROBE))
        file.flush()
        os.fsync(file.fileno())
        after = time.time()
        changed = os.stat(file.name).st_mtime
    return changed - min(max(changed, before), after)


# larger than any real factor, to bound the work for a damaged header
_LARGEST_FACTOR: Final = 1 << 16


def count_adapter(spec: LoraKeys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Estimate the number of parameters of a job's adapter.

    Assumes one on every linear layer of the model's blocks, which is what most families adapt, all
    with the job's rank.

    Args:
        spec: The job.
        shapes: Name → shape of the model's tensors.
    """
    return sum(
        _count_lokr(spec, *shape) if spec.lora_variant == "lokr" else spec.lora_rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and _is_adapted(spec, name.split("."))
    )


def _is_adapted(spec: LoraKeys, parts: list[str]) -> bool:
    """Return whether a tensor is the weight of a layer in a block; a block has a number in its
    name.
    """
    routed = "experts" in parts and not spec.lora_experts
    return parts[-1] == "weight" and any(map(str.isdigit, parts)) and not routed


def _count_lokr(spec: LoraKeys, rows: int, columns: int) -> int:
    """Count the Kronecker factors' elements for a `(rows, columns)` matrix; the second factor may
    be decomposed.
    """
    (a, c), (b, d) = _divide(rows, spec.lokr_factor), _divide(columns, spec.lokr_factor)
    whole = spec.lokr_full_matrix or 2 * spec.lora_rank >= max(c, d)
    return a * b + (c * d if whole else spec.lora_rank * (c + d))


@cache
def _divide(side: int, factor: int) -> tuple[int, int]:
    """Factor a side the way LyCORIS and peft do.

    The first number is `factor` if it divides the side, or else the largest divisor that exceeds
    neither `factor` nor the square root of the side.
    """
    if factor > 0 and side % factor == 0:
        return factor, side // factor
    largest = min(math.isqrt(side), _LARGEST_FACTOR, factor if factor > 0 else side)
    first = next((number for number in range(largest, 0, -1) if side % number == 0), 1)
    return first, side // first


_WEIGHT: Final = 4  # bytes of a parameter in a checkpoint, fp32


def checkpoint_bytes(spec: RecipeKeys) -> int | None:
    """Estimate the bytes of a checkpoint; None if the model cannot be read."""
    try:
        component = find_denoiser(spec)
    except UserError:
        return None
    if spec.model_type == "full":
        parameters = count_parameters(component)
    else:
        parameters = count_adapter(spec, read_shapes(component) or {})
    if not parameters:
        return None
    each = _WEIGHT * (2 if has_average(spec) else 1) + STATE_BYTES[spec.optimizer]
    return parameters * each


def checkpoints_kept(spec: JobSpec) -> int:
    """Count the checkpoints that exist at once: the limit plus the one being written."""
    limit = spec.checkpoints_total_limit
    count = periodic_saves(spec) or (1 if limit is None else limit + 1)
    return count if limit is None else min(count, limit + 1)


# -- hub ------------------------------------------------------------------------------------
# The Hugging Face hub: the token and the download cache. No network access.


_COUNTING: Final = 5.0  # seconds; a cache may have very many files on a slow disk
_OTHERS_MAY_READ: Final = 0o077
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_hub(_: Patient) -> Iterator[Finding]:
    """Check the token and the cache."""
    # This import takes half a second; pay for it only here.
    from huggingface_hub import constants, get_token

    token = get_token()
    yield from judge_token(token, Path(constants.HF_TOKEN_PATH), dict(os.environ))
    yield _judge_cache(Path(constants.HF_HUB_CACHE))
    offline = [
        name for name in _OFFLINE if os.environ.get(name, "").lower() in ("1", "true", "on", "yes")
    ]
    if offline:
        yield ok("offline", f"{' and '.join(offline)} set: nothing is downloaded", set=offline)


def judge_token(token: str | None, file: Path, environ: dict[str, str]) -> Iterator[Finding]:
    """Judge the token without revealing it."""
    if token is None:
        yield ok(
            "token",
            "none; only gated models need one (`hf auth login`)",
            present=False,
        )
        return
    where = next((n for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if environ.get(n)), None)
    source = where or str(file)
    if not token.isascii() or any(character.isspace() for character in token):
        yield fail(
            "token",
            f"the one in {source} has invalid characters",
            "create a new one: `hf auth login`",
            present=True,
        )
    elif where is None and file.exists() and file.stat().st_mode & _OTHERS_MAY_READ:
        yield warn(
            "token",
            f"set, but other users can read it in {file}",
            f"chmod 600 {file}",
            present=True,
        )
    else:
        yield ok("token", f"set, from {source}", present=True)


def _judge_cache(place: Path) -> Finding:
    folder = nearest(place)
    total, whole = measure(place)
    words = f"{'' if whole else 'more than '}{size(total)} in {place}"
    facts = {"path": str(place), "bytes": total, "counted_all": whole}
    if not os.access(folder, os.W_OK | os.X_OK):
        return warn(
            "hub cache",
            f"{words}, not writable",
            "point HF_HOME elsewhere before downloading models",
            **facts,
        )
    return ok("hub cache", words, **facts)


def measure(place: Path, seconds: float = _COUNTING) -> tuple[int, bool]:
    """Return the bytes below a directory, and whether there was time to count all of them."""
    deadline = time.monotonic() + seconds
    total = 0
    for folder, _, files in os.walk(place):
        if time.monotonic() > deadline:
            return total, False
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # deleted in the meantime
                continue
    return total, True
