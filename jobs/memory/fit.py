"""Compare a prediction with the memory of a GPU or of the machine. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.machine.gpu import foreign_users
from jobs.memory.cards import CARDS as KNOWN
from jobs.memory.cards import card_named
from jobs.run.rundir import read_json
from jobs.spec.rules.strategy import SHARDING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from jobs.machine.devices import Gpu
    from jobs.memory.predicted import Predicted
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys


class Verdict(StrEnum):
    """Whether a prediction fits, as the word shown to users."""

    FITS = "fits"
    TIGHT = "tight"
    TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class Wires:
    """What connects a GPU.

    Attributes:
        nvlinks: Number of active NVLinks to other GPUs; None if it is unknown.
        lanes: Of PCI Express; None if it is unknown.
    """

    nvlinks: int | None = None
    lanes: int | None = None


@dataclass(frozen=True)
class Room:
    """Memory of one device, in bytes.

    Attributes:
        name: The display name.
        total: The total.
        held: Used by others, and not going to be freed for the job.
        passing: Used by others now; the job waits until it is free.
        gpu: The GPU index; None for anything but a GPU of this machine.
        kind: Name of the GPU's model, as the driver or Slurm has it; "" if it is unknown.
        link: How it is connected to other GPUs and the host, as far as the driver knows.
    """

    name: str
    total: int
    held: int = 0
    passing: int = 0
    gpu: int | None = None
    kind: str = ""
    link: Wires = Wires()

    @property
    def free(self) -> int:
        """Return the bytes that a job can use."""
        return max(0, self.total - self.held)


@dataclass(frozen=True)
class Fit:
    """How a prediction compares with a device, in bytes.

    Attributes:
        low: The least it needs.
        high: The most it needs.
        room: The device.
    """

    low: int
    high: int
    room: Room

    @property
    def verdict(self) -> Verdict:
        """Return FITS if the whole band fits, TOO_LARGE if not even its lower end does."""
        if self.high <= self.room.free:
            return Verdict.FITS
        return Verdict.TIGHT if self.low <= self.room.free else Verdict.TOO_LARGE

    @property
    def spare(self) -> int:
        """Return the headroom over the upper end of the band; negative if that does not fit."""
        return self.room.free - self.high


def fit_of(predicted: Predicted, room: Room, *, on_gpus: bool, factor: float = 1.0) -> Fit:
    """Compare a prediction with one device.

    Args:
        predicted: The prediction for one rank, or for those on each size of GPU.
        room: A GPU, or the machine's memory if the ranks run on its CPU.
        on_gpus: Whether `room` is a GPU.
        factor: Measured over predicted memory on this machine; raises the upper end of the band.
    """
    if on_gpus:
        low, high = predicted.on(room.total).device
        return Fit(low, round(high * max(1.0, factor)), room)
    needed = predicted.host.get("machine") or predicted.reserved[1] * predicted.ranks
    return Fit(needed, needed, room)


def worst(fits: Iterable[Fit]) -> Fit:
    """Return the tightest fit; among equals, the one that has to wait for others."""
    return min(fits, key=lambda fit: (fit.spare, -fit.room.passing))


def room_of(
    gpu: Gpu, ours: Collection[int], claims: Mapping[str, int], *, shares: bool = False
) -> Room:
    """Compute the memory a GPU has for a job that starts there.

    Args:
        gpu: A snapshot of the GPU.
        ours: Pids of our jobs' processes.
        claims: GPU UUID → id of our job that holds it; a job waits for our own jobs to end.
        shares: Whether the job may share a GPU; otherwise it waits for the processes computing
            there.
    """
    used = gpu.memory_used or 0
    if gpu.uuid in claims:
        # In a container, pids may belong to the host's namespace. On a GPU that we hold, count only
        # processes known not to be ours.
        strangers = (
            process for process in gpu.processes if process.pid not in ours and process.command
        )
        used = min(used, sum(process.memory or 0 for process in strangers))
    waits = not shares and bool(foreign_users([gpu], ours, ()))
    held, passing = (0, used) if waits else (used, 0)
    # The generation is that of now, and lower while a GPU is idle; the limit of the lanes is not.
    wires = Wires(gpu.nvlinks, lanes=gpu.pcie_lanes_limit)
    return Room(f"GPU {gpu.index}", gpu.memory_total, held, passing, gpu.index, gpu.name, wires)


# -- candidates -----------------------------------------------------------------------------
# Select the fastest strategy that fits, and the fewest GPUs that are enough. Pure.


FASTEST_FIRST: Final = ("single", "ddp", "hsdp", "fsdp2")
"""Each moves more bytes between GPUs in a step than the one before it, and keeps fewer on each."""

MOST_RANKS: Final = 1024


@dataclass(frozen=True)
class Candidate:
    """A strategy and its fit. `fit` is None if the job cannot run this way; `reason` says why."""

    strategy: str
    fit: Fit | None
    reason: str = ""


def candidates(spec: RecipeKeys, ranks: int) -> tuple[str, ...]:
    """Return the strategies that a job could run with, fastest first.

    Context parallelism, offload and a sharded adapter need sharding and rule out the others;
    swapped blocks rule out sharding.
    """
    if ranks == 1:
        return ("single",)
    needs_shards = (
        spec.context_parallel_size > 1
        or spec.fsdp_cpu_offload
        or (spec.model_type == "lora" and spec.lora_placement == "sharded")
    )
    able: Sequence[str] = SHARDING if needs_shards else FASTEST_FIRST[1:]
    if (spec.model_type == "lora" and spec.swap_blocks) or isinstance(spec.batch_shares, dict):
        able = ("ddp",)
    replicas = spec.dp_replicate_size or 2
    divides = ranks % (replicas * spec.context_parallel_size) == 0
    return tuple(
        strategy
        for strategy in FASTEST_FIRST
        if strategy in able and (strategy != "hsdp" or (divides and ranks > replicas))
    )


def fastest(options: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest strategy that surely fits, or else the fastest that may fit.

    None if none does.
    """
    for verdict in (Verdict.FITS, Verdict.TIGHT):
        for option in sorted(options, key=lambda option: FASTEST_FIRST.index(option.strategy)):
            if option.fit is not None and option.fit.verdict is verdict:
                return option
    return None


def group_of(spec: DeviceKeys) -> int:
    """Return the number that the job's rank count must be a multiple of.

    It is the least common multiple of the number of machines and the ranks per sample.
    """
    return math.lcm(spec.context_parallel_size, spec.num_machines)


def fewest(fits: Callable[[int], bool], group: int = 1, most: int = MOST_RANKS) -> int | None:
    """Return the smallest number of ranks that fits.

    More ranks never need more memory each, so this is a bisection: powers of two first, then
        between

    Args:
        fits: Whether a job fits on a number of ranks.
        group: Only multiples of this are tried.
        most: The largest number to try.

    Returns:
        The number, or None if none fits.
    """
    too_few, enough = 0, 1  # in units of `group`
    while enough * group <= most and not fits(enough * group):
        too_few, enough = enough, enough * 2
    if enough * group > most:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(middle * group):
            enough = middle
        else:
            too_few = middle
    return enough * group


# -- cards ----------------------------------------------------------------------------------
# Memory of common GPU models.


_MIB: Final = 1 << 20

# Totals as the driver reports them, which are less than the advertised sizes.
CARDS: Final[dict[int, Room]] = {
    24: Room("24 GB", 24_564 * _MIB),  # RTX 4090; a 3090 and an A10 differ slightly
    48: Room("48 GB", 46_068 * _MIB),  # L40S and A6000 with ECC; without it 49,140
    80: Room("80 GB", 81_559 * _MIB),  # H100; an A100 has 81,920
    141: Room("141 GB", 143_771 * _MIB),  # H200
}

# Sizes that no table shows.
_OTHER_SIZES: Final = {12: 12_282, 16: 16_303, 32: 32_607, 40: 40_960, 96: 97_887}

CARD_ROOMS: Final = {
    **{str(size): room for size, room in CARDS.items()},
    **{str(n): Room(f"{n} GB", total * _MIB) for n, total in _OTHER_SIZES.items()},
    **{key: Room(card.name, card.mebibytes * _MIB, kind=card.key) for key, card in KNOWN.items()},
}
"""What can be named instead of this machine's GPUs: sizes without rates, and cards."""

USUAL: Final = 80
"""What most people train large models on: held against where there is no GPU and none is named."""

IN_TABLES: Final = (24, 48, 80)

KINDS: Final[dict[str, dict[str, str]]] = {
    "lora": {"model_type": "lora"},
    "lora_8bit": {"model_type": "lora", "base_precision": "int8"},
    "lora_4bit": {"model_type": "lora", "base_precision": "nf4"},
    "full": {"model_type": "full"},
}
"""What is trained, by its name in the table, and the keys of a job that say so."""

# GPUs that each family needs; generated by `python tests/bench/cards.py`.
CARDS_FILE: Final = Path(__file__).resolve().parent.parent / "models" / "published" / "cards.json"

_SIZES: Final = {24: 24_564, 40: 40_960, 48: 46_068, 80: 81_559, 141: 143_771}


def room_of_type(name: str) -> Room | None:
    """Return the memory of a GPU by its Slurm type; None if the type does not imply one.

    Args:
        name: For example `a100`, `rtx_4090`, `nvidia_a100-sxm4-80gb` or `1g.10gb`.
    """
    # Ignore vendor prefixes. A size in the name takes precedence, also that of a MIG slice.
    words = re.split(r"[^a-z0-9]+", name.lower())
    if printed := [int(word[:-2]) for word in words if re.fullmatch(r"[1-9]\d{0,2}gb", word)]:
        mebibytes = _SIZES.get(printed[-1])
        total = mebibytes * _MIB if mebibytes else printed[-1] * 10**9
        return Room(name, total, kind=name)
    card = card_named(name, alike=True)
    return Room(name, card.mebibytes * _MIB, kind=name) if card is not None else None


_SOLD_AS: Final = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192)


def size_sold_as(total: int) -> int:
    """Return the size in GB as which a GPU with this many bytes is sold."""
    return next((size for size in _SOLD_AS if total <= size << 30), -(-total >> 30))


@cache
def read_smallest() -> dict[str, Any]:
    """Return family → its `flavour` and, for each of `KINDS`, GPU size → smallest number of them.

    The numbers are for the family's first flavour at its default resolution, batch 1, with
    activation checkpointing.
    """
    stored = read_json(CARDS_FILE) or {}
    families = stored.get("families") if stored.get("schema") == 1 else None
    return families if isinstance(families, dict) else {}
