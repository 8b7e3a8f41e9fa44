"""Which partitions the cluster has and which GPUs are in their nodes, as `sinfo` says."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.backends.slurm.commands import environment
from jobs.memory.cards import room_of_type
from jobs.memory.estimate import Cards
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.keys.slurm import SlurmKeys

PATIENCE: Final = 3.0  # seconds; only advice depends on the answer
_FORMAT: Final = "%P|%G"  # columns as wide as needed; a line for each kind of node
_LISTED: Final = 6  # partitions that are named in a line
# One kind in a list such as `gpu:a100:4(S:0-1),gpu:a30:2,shard:8`: its type, if the site has types.
_GPU: Final = re.compile(r"(?:^|,)gpu(?::([^:,()]*[^\d:,()][^:,()]*))?(?::\d+[KMG]?)?(?=[,(]|$)")


@dataclass(frozen=True)
class Partition:
    """A part of the cluster.

    Attributes:
        name: As `slurm_partition` has it.
        default: Whether a job that names none goes there.
        gpus: The types of its GPUs, as the site calls them; "" is one without a type.
    """

    name: str
    default: bool = False
    gpus: tuple[str, ...] = ()


def ask_partitions() -> tuple[Partition, ...]:
    """Ask Slurm, for at most `PATIENCE`; () where there is no Slurm, or no answer.

    Hidden partitions are among them: a job may name one.
    """
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--all", f"--format={_FORMAT}"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=True,
            env=environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return _read(done.stdout)


def chosen(spec: SlurmKeys, partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """Return the partitions that a job may use: those that it names, or else the default."""
    if spec.slurm_partition is None:
        return tuple(partition for partition in partitions if partition.default)
    names = spec.slurm_partition.split(",")  # Slurm takes the one that is free first
    return tuple(partition for partition in partitions if partition.name in names)


def cards_of(spec: SlurmKeys, partitions: Sequence[Partition]) -> Cards:
    """Return the smallest GPU that a job may get.

    Nothing is known if one of the types is not: it may be the smallest.

    Args:
        spec: The job.
        partitions: Those of the cluster; () if Slurm did not answer.
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
    """Warn of a partition that the cluster does not have; "" while that is not known."""
    names = {partition.name for partition in partitions}
    missing = [part for part in (name or "").split(",") if part and part not in names]
    if not missing or not names:
        return ""
    what = f"partition {missing[0]}" if len(missing) == 1 else f"partitions {', '.join(missing)}"
    return f"slurm_partition: Slurm lists no {what}; it has {in_words(partitions)}"


def in_words(partitions: Sequence[Partition]) -> str:
    """`gpu (default), debug, long`."""
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
