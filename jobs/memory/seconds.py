"""Turn what a step computes and moves into seconds, given a GPU's rates. Pure.

The engine counts (`engine.memory.walk`); the rates are those of a data sheet, or of this machine
where it measured them. Neither says how much of its rate a kernel reaches, nor how much of a
transfer hides behind computing, so the result is a band.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.memory.cards import Card, card_named, is_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.memory.fit import Room
    from jobs.memory.predicted import Predicted
    from jobs.spec.job_spec import RecipeKeys

    Band = tuple[float, float]

# Shares of the data sheet's rates that are reached: the most, and the least.
# The first four contain what was measured on an H200 (docs/gpu.md).
_PRODUCTS: Final = (0.80, 0.55)  # matrices of thousands of rows in cuBLAS
_ATTENTION: Final = (0.75, 0.50)  # flash attention 2, forward and backward
_MEMORY: Final = (0.85, 0.65)  # kernels that read and write large tensors
# Seconds of the CPU for each kernel, with Python, in eager mode: 24 to 55 µs on a machine whose
# bare launches take 11 µs, twice the usual, and 75 for UNets (docs/gpu.md).
_LAUNCH: Final = (12e-6, 55e-6)
_NVLINK: Final = (0.85, 0.60)  # collectives, of the links' sum in one direction
_PEERS: Final = (0.80, 0.50)  # collectives over PCIe, between GPUs that see each other's memory
_THROUGH_HOST: Final = (0.40, 0.20)  # collectives over PCIe through host memory
_COPIES: Final = (0.85, 0.60)  # copies from pinned host memory
_HOST_MEMORY: Final = (40e9, 10e9)  # bytes per second, of an optimizer on the CPU
_EXPOSED: Final = (0.0, 0.25)  # share of what could overlap that does not

_LANE: Final = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # bytes per second, by PCIe generation
_LANES: Final = 16
_MEASURED: Final = 0.1  # relative width of the band of a rate that was measured here

PARTS: Final = {
    "products": "matrix products",  # and attention
    "memory": "GPU memory",
    "links": "traffic between GPUs",
    "copies": "copies from host memory",
    "optimizer": "the optimizer",
    "launches": "kernel launches",
}


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a job.

    Attributes:
        name: As shown to users.
        rates: Bytes per second of a collective, the most and the least.
        host: Bytes per second of a copy from host memory, the most and the least.
        shared: Whether both go over the same wires.
        assumed: Whether neither the driver nor a measurement says so.
    """

    name: str
    rates: Band
    host: Band
    shared: bool
    assumed: bool


@dataclass(frozen=True)
class Seconds:
    """The seconds of an optimizer step.

    Attributes:
        low: If everything goes well.
        high: If it does not.
        parts: Of `PARTS`, as if each were alone.
        link: What connects the GPUs.
        moved: Bytes over a rank's link in a step.
    """

    low: float
    high: float
    parts: Mapping[str, Band]
    link: Link
    moved: int

    @property
    def middle(self) -> float:
        """Return the geometric mean, by which setups are compared."""
        return math.sqrt(self.low * self.high)

    @property
    def dominant(self) -> str:
        """Return the part that takes the longest."""
        return max(self.parts, key=lambda part: sum(self.parts[part]))

    @property
    def values(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "low": self.low,
            "high": self.high,
            "dominant": self.dominant,
            "parts": {name: list(band) for name, band in self.parts.items()},
            "link": self.link.name,
            "link_assumed": self.link.assumed,
            "moved": self.moved,
        }


def cards_of(rooms: Sequence[Room]) -> list[Card] | str:
    """Return the card of each of a job's devices, or why no rates are known."""
    cards = []
    for room in rooms:
        card = card_named(room.kind) if room.kind else None
        if card is None and is_part(room.kind):
            return f"no rates are known for {room.kind}, which is a part of a GPU"
        if card is None:
            what = room.kind or f"a GPU of {room.name}"
            return f"no rates are known for {what}; name one, such as --card 4090"
        cards.append(card)
    if not cards:
        return "no GPU is named; name one, such as --card 4090"
    return cards


def link_of(card: Card, rooms: Sequence[Room], measured: float | None = None) -> Link:
    """Return what connects GPUs.

    Args:
        card: Their model.
        rooms: The GPUs.
        measured: Bytes per second of an all-reduce's bus bandwidth on this machine.
    """
    counts = [room.link.nvlinks for room in rooms]
    lanes = min((room.link.lanes for room in rooms if room.link.lanes), default=0)
    wire = (lanes or _LANES) * _LANE[card.pcie]
    stated = any(count is not None for count in counts) or bool(lanes)
    by_nvlink = bool(card.nvlink) and (all(counts) if any(counts) else not (stated or card.bridged))
    name = "NVLink" if by_nvlink else f"PCIe {card.pcie} x{lanes or _LANES}"
    if measured is not None:
        rates = (measured * (1 + _MEASURED), measured * (1 - _MEASURED))
        name, stated = f"{name}, measured", True
    elif by_nvlink:
        rates = _scaled(_NVLINK, card.nvlink / 2 * 1e9)
    else:
        rates = _scaled(_PEERS if card.peers else _THROUGH_HOST, wire)
    return Link(name, rates, _scaled(_COPIES, wire), not by_nvlink, not stated)


def why_unknown(spec: RecipeKeys, predicted: Predicted, card: Card) -> str:
    """Return why the seconds of a step are not computed; "" if they are."""
    if not predicted.work:
        return "the prediction is of another version"
    if spec.context_parallel_size > 1:
        return "the exchange of context parallelism is not counted"
    if spec.num_machines > 1:
        return "the network between machines is not counted; see --nodes"
    if spec.mixed_precision == "bf16" and not card.bf16:
        return f"a {card.name} has no tensor cores for bf16; use mixed_precision: fp16"
    return ""


def seconds_of(
    predicted: Predicted,
    card: Card,
    link: Link,
    factor: float = 1.0,
    part: float = 1.0,
) -> Seconds:
    """Compute the seconds of an optimizer step.

    Args:
        predicted: Has the work of a step.
        card: The GPU.
        link: What connects the GPUs.
        factor: Measured over computed seconds of compute on this machine.
        part: The rank's forwards by those of a rank where all compute as many.
    """
    work = predicted.work
    times = int(work["micro_batches"]) * part
    more = int(work.get("base_forwards", 0)) * part
    forward, backward, step = work["forward"], work["backward"], work["step"]
    base = work["base"] if more else {}
    low, high = (
        (
            _step(forward, backward, step, card, link, times, end)
            + (more * _pass(base, card, link, end) if more else 0.0)
        )
        * (factor if end else 1.0)
        for end in (0, 1)
    )
    if factor < 1:  # measured faster than computed
        low *= factor
    alone = [
        (count, _parts(phase, card, link))
        for count, phase in ((times, forward), (times, backward), (more, base), (1, step))
    ]
    parts = {
        name: (
            sum(count * own[name][0] for count, own in alone),
            sum(count * own[name][1] for count, own in alone),
        )
        for name in PARTS
    }
    moved = times * (forward["linked"] + backward["linked"]) + step["linked"]
    moved += more * base.get("linked", 0) + step.get("exchanged", 0)
    return Seconds(low, max(low, high), parts, link, int(moved))


def _step(
    forward: Mapping[str, int],
    backward: Mapping[str, int],
    step: Mapping[str, int],
    card: Card,
    link: Link,
    times: float,
    end: int,
) -> float:
    """Return the seconds of a step at one end of the band: 0 for the fast one."""
    # Gradients that are averaged once a step are sent while the last backward runs.
    last = dict(backward) | {"linked": backward["linked"] + step["linked"]}
    passes = times * _pass(forward, card, link, end)
    passes += (times - 1) * _pass(backward, card, link, end) + _pass(last, card, link, end)
    return passes + _end_of(_parts(step, card, link)["optimizer"], end)


def _pass(work: Mapping[str, int], card: Card, link: Link, end: int) -> float:
    """Return the seconds of a forward or backward: transfers overlap with computing."""
    parts = {name: _end_of(band, end) for name, band in _parts(work, card, link).items()}
    computing = max(parts["products"] + parts["memory"], parts["launches"])
    transfers = [parts["links"], parts["copies"]]
    lanes = [computing, *([sum(transfers)] if link.shared else transfers)]
    longest = max(lanes)
    return float(longest + _end_of(_EXPOSED, end) * (sum(lanes) - longest))


def _parts(work: Mapping[str, int], card: Card, link: Link) -> dict[str, Band]:
    """Return the seconds of each part of some work, as if it were alone."""
    flops = {
        "half": card.half,
        "single": card.single,
        "eight": card.eight or card.half,
    }
    products = sum(work.get(name, 0) / (rate * 1e12) for name, rate in flops.items())
    attention = work.get("attention", 0) / ((card.flash or card.half) * 1e12)
    # Our kernel unpacks from Ampere on, the first that has bf16 (`engine.model.packing`).
    unpacked = work.get("unpacked" if card.bf16 else "unpacked_by_torch", 0)
    of_memory = (work.get("bytes", 0) + unpacked) / (card.bandwidth * 1e9)
    optimizer = "host_bytes" in work
    computed = _sum(_taken(products, _PRODUCTS), _taken(attention, _ATTENTION))
    exchanged = _taken(work.get("exchanged", 0), link.rates)  # while it computes
    orthogonalized = (max(computed[0], exchanged[0]), max(computed[1], exchanged[1]))
    memory = _taken(of_memory, _MEMORY)
    on_host = _taken(work.get("host_bytes", 0), _HOST_MEMORY)
    kernels = work.get("kernels", 0)
    return {
        "products": (0.0, 0.0) if optimizer else computed,
        "memory": (0.0, 0.0) if optimizer else memory,
        "links": _taken(work.get("linked", 0), link.rates),
        "copies": _taken(work.get("copied", 0), link.host),
        "optimizer": _sum(_sum(memory, on_host), orthogonalized) if optimizer else (0.0, 0.0),
        "launches": (kernels * _LAUNCH[0], kernels * _LAUNCH[1]),
    }


def _end_of(band: Band, end: int) -> float:
    return band[1] if end else band[0]


def _taken(amount: float, rates: Band) -> Band:
    return amount / rates[0], amount / rates[1]


def _scaled(shares: Band, rate: float) -> Band:
    return shares[0] * rate, shares[1] * rate


def _sum(first: Band, second: Band) -> Band:
    return first[0] + second[0], first[1] + second[1]
