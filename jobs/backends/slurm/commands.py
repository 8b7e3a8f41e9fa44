"""Call Slurm's commands: one `squeue` for all jobs, `sbatch`, `scancel`, `scontrol`.

Parses columns, because the schema of the JSON output has changed with nearly every version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.errors import UserError
from jobs.memory.estimate import Cards
from jobs.memory.fit import room_of_type
from jobs.supervise.port import UnreachableError
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.spec.keys.running import SlurmKeys


PATIENCE: Final = 20.0  # seconds; a controller that is down answers much later
_COLUMNS: Final = ("JobID", "Name", "State", "Reason", "RestartCnt", "StartTime", "NodeList")
_SEPARATOR: Final = "\x1f"  # occurs neither in node names nor in our job names
_ID: Final = re.compile(r"\d+")
# Messages about Slurm itself, not about a job: a retry may succeed.
_UNREACHABLE: Final = re.compile(
    r"Unable to contact slurm controller|Connection refused|Connection timed out|timed out"
    r"|Communication connection failure|Zero Bytes|Socket timed out|Transport endpoint"
    r"|slurm_load_jobs error|Protocol authentication error|Controller busy|backup controller"
    r"|temporarily unavailable|Resource temporarily",
    re.IGNORECASE,
)
# Prefixes of variables that set options of Slurm's commands, and variables that locate its
# controller.
_OPTIONS: Final = ("SALLOC_", "SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SLURM_", "SQUEUE_")
_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_GONE: Final = re.compile(r"Invalid job id|already completed|Job/step already", re.IGNORECASE)


@dataclass(frozen=True)
class Listed:
    """A Slurm job as `squeue` lists it.

    Attributes:
        id: Slurm's job id.
        name: The name we gave it.
        state: For example PENDING.
        reason: Why it waits or ended; "" if Slurm gives no reason.
        restarts: How often Slurm has requeued it.
        starts: When it started or is expected to start; "" if unknown.
        nodes: For example `n[1-2]`; "" if none are allocated.
        place: Position in the queue of its partition; see `jobs.backends.slurm.keeper`.
    """

    id: str
    name: str
    state: str
    reason: str = ""
    restarts: int = 0
    starts: str = ""
    nodes: str = ""
    place: str = ""


class Waiting(NamedTuple):
    """Any user's waiting job; `id` may be an array such as `7_[1-4]`."""

    id: str
    partitions: tuple[str, ...]
    priority: int
    reason: str


def installed() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def queue() -> dict[str, Listed]:
    """Return all our jobs that Slurm still knows, by id.

    Raises:
        UnreachableError: Slurm did not answer, or its output cannot be parsed.
    """
    columns = ",".join(f"{name}:{_SEPARATOR}" for name in _COLUMNS)
    text = _run(["squeue", "--noheader", "--me", "--states=all", "-O", columns])
    return {job.id: job for job in map(_listed, filter(str.strip, text.splitlines()))}


def waiting() -> list[Waiting]:
    """Return the waiting jobs of all users, as far as the site shows them.

    Raises:
        UnreachableError: Slurm did not answer.
    """
    text = _run(["squeue", "--noheader", "--states=PENDING", "-o", "%i|%P|%Q|%r"])
    jobs = []
    for line in text.splitlines():
        parts = one_line(line).strip().split("|", 3)
        if len(parts) == 4 and parts[2].isdecimal():
            jobs.append(Waiting(parts[0], tuple(parts[1].split(",")), int(parts[2]), parts[3]))
    return jobs


def state_of(slurm_id: str) -> str:
    """Return the state of one job; "" if Slurm does not know the job.

    Raises:
        UnreachableError: Slurm did not answer, or the answer is empty.
    """
    try:
        answer = _run(["squeue", "--noheader", "--jobs", slurm_id, "--states=all", "-o", "%T"])
    except UserError as error:
        if _GONE.search(str(error)):
            return ""
        raise UnreachableError(str(error)) from error
    if not answer.strip():
        raise UnreachableError(f"squeue says nothing of job {slurm_id}")
    return answer.strip()


def submit(script: Path, *, inherit: Sequence[int] = ()) -> str:
    """Submit a batch script; return Slurm's job id.

    Args:
        script: The file.
        inherit: File descriptors that `sbatch` keeps open while it runs.

    Raises:
        UnreachableError: Slurm did not answer; it may or may not have accepted the job.
        UserError: Slurm rejected the job; the message says why.
    """
    answer = _run(["sbatch", "--parsable", str(script)], inherit=inherit)
    match = _ID.match(answer.strip().splitlines()[-1] if answer.strip() else "")
    if match is None:
        raise UnreachableError(f"sbatch said {one_line(answer)[:200]!r} and no job id")
    return match[0]


def cancel(slurm_id: str) -> None:
    """End a job or remove it from Slurm's queue; does nothing if it has ended.

    Raises:
        UnreachableError: Slurm did not answer.
    """
    try:
        _run(["scancel", slurm_id])
    except UserError as error:
        if not _GONE.search(str(error)):
            raise UnreachableError(str(error)) from error


def requeue(slurm_id: str) -> None:
    """Requeue a running job, which ends this allocation.

    Raises:
        UnreachableError: Slurm did not answer.
        UserError: Slurm rejected the request.
    """
    _run(["scontrol", "requeue", slurm_id])


def signal_steps(slurm_id: str, name: str) -> None:
    """Send a signal to the ranks: to all steps of a job, but not to its batch script.

    Raises:
        UnreachableError: Slurm did not answer.
        UserError: Slurm rejected the request.
    """
    _run(["scancel", f"--signal={name}", slurm_id])


def environment() -> dict[str, str]:
    """Return our environment without the variables that change what Slurm's commands do.

    `SQUEUE_PARTITION` in a shell hides jobs in other partitions, and `SBATCH_*` override the lines
    of a batch script. The keeper also inherits the environment of the user who started it, who may
    not be the one who submitted.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(_OPTIONS)
    }


def _run(command: Sequence[str], *, inherit: Sequence[int] = ()) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
            env=environment(),
            pass_fds=tuple(inherit),
        )
    except FileNotFoundError:
        raise UnreachableError(f"{command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{command[0]} did not respond in {PATIENCE:g} s") from None
    except OSError as error:
        raise UnreachableError(f"{command[0]}: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    message = one_line(" ".join((done.stderr or done.stdout).split()))[:500]
    if not message or (_UNREACHABLE.search(message) and not _GONE.search(message)):
        raise UnreachableError(message or f"{command[0]} ended with status {done.returncode}")
    raise UserError(_plain(message))


def _plain(message: str) -> str:
    """Return Slurm's message without the names of its commands."""
    return re.sub(r"\b(sbatch|scancel|scontrol|squeue|slurm_\w+): (error: |fatal: )?", "", message)


def _listed(line: str) -> Listed:
    parts = [part.strip() for part in line.split(_SEPARATOR)]
    if len(parts) < len(_COLUMNS) or not _ID.fullmatch(parts[0]):
        raise UnreachableError(f"squeue said {one_line(line)[:200]!r}, which is not a job")
    name, state, reason, restarts, starts, nodes = (one_line(part) for part in parts[1:7])
    none = ("None", "N/A", "(null)", "Unknown")
    return Listed(
        parts[0],
        name,
        state.split()[0].upper() if state else "",
        "" if reason in none else reason,
        int(restarts) if restarts.isdecimal() else 0,
        "" if starts in none else starts,
        "" if nodes in none else nodes,
    )


# -- partitions -----------------------------------------------------------------------------
# The cluster's partitions and the GPUs in their nodes, according to `sinfo`.


_SINFO_PATIENCE: Final = 3.0  # seconds; only advice depends on the answer
_FORMAT: Final = "%P|%G"  # columns as wide as needed; one line per kind of node
_LISTED: Final = 6  # partitions listed in a sentence
# One entry of a list such as `gpu:a100:4(S:0-1),gpu:a30:2,shard:8`. Captures its type, if any.
_GPU: Final = re.compile(r"(?:^|,)gpu(?::([^:,()]*[^\d:,()][^:,()]*))?(?::\d+[KMG]?)?(?=[,(]|$)")


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster.

    Attributes:
        name: The name as in `slurm_partition`.
        default: Whether jobs without a partition go there.
        gpus: The site's GPU types; "" is a GPU without a type.
    """

    name: str
    default: bool = False
    gpus: tuple[str, ...] = ()


def ask_partitions() -> tuple[Partition, ...]:
    """Query Slurm's partitions, for at most `_SINFO_PATIENCE`; () without Slurm or an answer.

    Includes hidden partitions, because a job may name one.
    """
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--all", f"--format={_FORMAT}"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_SINFO_PATIENCE,
            check=True,
            env=environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return _read(done.stdout)


def chosen(spec: SlurmKeys, partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """Return the partitions that a job may use: the ones it names, or else the default."""
    if spec.slurm_partition is None:
        return tuple(partition for partition in partitions if partition.default)
    names = spec.slurm_partition.split(",")  # Slurm uses the one that is free first
    return tuple(partition for partition in partitions if partition.name in names)


def cards_of(spec: SlurmKeys, partitions: Sequence[Partition]) -> Cards:
    """Return the smallest GPU that a job may get.

    Unknown if the memory of any type is unknown, because that type may be the smallest.

    Args:
        spec: The job.
        partitions: The cluster's partitions; () if Slurm did not answer.
    """
    mine = chosen(spec, partitions)
    where = f"partition {','.join(partition.name for partition in mine)}"
    types = list(dict.fromkeys(name for partition in mine for name in partition.gpus))
    rooms = [room for name in types if (room := room_of_type(name)) is not None]
    if not mine:
        return Cards((), "the GPUs of the partition are unknown")
    if not types or not all(partition.gpus for partition in mine):
        return Cards((), f"Slurm lists no GPUs in {where}")
    if len(rooms) < len(types):
        named = [name for name in types if name and room_of_type(name) is None]
        kind = f": type {', '.join(named)}" if named else ", since they have no type"
        return Cards((), f"the memory of the GPUs in {where} is unknown{kind}")
    smallest = min(rooms, key=lambda room: room.total)
    least = ", the smallest there" if len(types) > 1 else ""
    return Cards((smallest,), f"GPUs of {where}: {smallest.name}{least}")


def unknown_partition(name: str | None, partitions: Sequence[Partition]) -> str:
    """Return a warning about a partition that the cluster does not have; "" if it has it or is
    unknown.
    """
    names = {partition.name for partition in partitions}
    missing = [part for part in (name or "").split(",") if part and part not in names]
    if not missing or not names:
        return ""
    what = f"partition {missing[0]}" if len(missing) == 1 else f"partitions {', '.join(missing)}"
    return f"slurm_partition: Slurm lists no {what}; it has {in_words(partitions)}"


def in_words(partitions: Sequence[Partition]) -> str:
    """Format partitions, as in `gpu (default), debug, long`."""
    names = [f"{partition.name}{' (default)' * partition.default}" for partition in partitions]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def _read(text: str) -> tuple[Partition, ...]:
    partitions: dict[str, Partition] = {}
    for line in text.splitlines():
        name, bar, gres = one_line(line).strip().partition("|")
        if not name or not bar:
            continue
        plain = name.removesuffix("*")
        before = partitions[plain].gpus if plain in partitions else ()
        gpus = dict.fromkeys([*before, *(match[1] or "" for match in _GPU.finditer(gres))])
        partitions[plain] = Partition(plain, name.endswith("*"), tuple(gpus))
    return tuple(
        sorted(partitions.values(), key=lambda partition: (not partition.default, partition.name))
    )
