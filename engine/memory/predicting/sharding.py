"""What a unit of FSDP2 takes at each of its marks: shards, gathered weights, what gathers them.

As torch 2.11 to 2.13 do it (`torch/distributed/fsdp/_fully_shard`), in the order in which they
allocate and free. `tests/bench/memory.py` compares it with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from engine.memory.tracing.live import rounded
from engine.parallel.block_swap import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.memory.tracing.model import Unit, Weight

_REDUCED: Final = 4  # bytes: gradients are reduced in fp32


@dataclass(frozen=True)
class Layout:
    """How weights lie on a rank.

    Attributes:
        shards: Ranks that share a copy of the sharded weights; 0 where nothing is sharded.
        lora_whole: Whether an adapter stays whole on every rank.
        casts: Whether weights are gathered in another precision than they are kept in.
        offload: Whether shards are kept in host memory.
        smaller: Ranks over which weights are sharded again after forward; 0 for all of them.
        replicated: Whether there are several copies of the sharded weights (hsdp).
    """

    shards: int
    lora_whole: bool = True
    casts: bool = False
    offload: bool = False
    smaller: int = 0
    replicated: bool = False

    def is_sharded(self, weight: Weight) -> bool:
        """Whether a weight is sharded at all."""
        return bool(self.shards) and not weight.fp32 and not (weight.lora and self.lora_whole)

    def local(self, weight: Weight) -> int:
        """Numbers of a weight on the rank that has the most of it."""
        if not self.is_sharded(weight):
            return weight.numel
        rows = weight.shape[0]
        return -(-rows // self.shards) * (weight.numel // rows) if rows else 0


@dataclass(frozen=True)
class Cost:
    """Of a unit, in bytes.

    Attributes:
        held: Parameters on the device all the time.
        host: Shards in host memory.
        copied: Made while a gathering begins, and freed when it is under way.
        buffer: What is received into.
        whole: The gathered weights.
        again: Weights after forward where they are sharded again over fewer ranks.
        gradients: Whole gradients of what is sharded.
        kept_gradients: Gradients of what is whole on every rank.
        reduce: What gradients are sent from.
        output: What they are received into.
        reduced: Of that, what stays: the gradients of the shards.
    """

    held: int
    host: int
    copied: int
    buffer: int
    whole: int
    again: int
    gradients: int
    kept_gradients: int
    reduce: int
    output: int
    reduced: int


@lru_cache(maxsize=4096)
def cost_of(unit: Unit, layout: Layout) -> Cost:
    """Compute what a unit takes. Pure."""
    mine = [w for w in unit.weights if layout.is_sharded(w)]
    others = [w for w in unit.weights if not layout.is_sharded(w)]
    ranks = layout.shards
    shards = [(w, layout.local(w)) for w in mine]
    held = sum(rounded(number * w.stored) for w, number in shards)
    trained = [(w, number) for w, number in shards if w.trained and not w.unused]
    padded = sum(number * ranks for _, number in trained)
    kept = sum(rounded(w.numel * w.stored) for w in others)
    output = rounded(padded // ranks * _REDUCED) if ranks else 0
    return Cost(
        held=kept + (0 if layout.offload else held),
        host=held if layout.offload else 0,
        copied=_copied(shards, layout),
        # A single shard is copied into place.
        buffer=rounded(sum(n * ranks * w.gathered for w, n in shards)) if ranks > 1 else 0,
        whole=sum(rounded(number * ranks * w.gathered) for w, number in shards),
        again=sum(rounded(number * ranks * w.gathered // layout.smaller) for w, number in shards)
        if layout.smaller
        else 0,
        gradients=sum(rounded(w.numel * w.gathered) for w, _ in trained),
        kept_gradients=sum(
            rounded(w.numel * w.stored) for w in others if w.trained and not w.unused
        ),
        reduce=rounded(padded * _REDUCED),
        output=output,
        reduced=0 if layout.offload else output,
    )


def swapped_of(units: Sequence[Unit], count: int) -> tuple[int, int]:
    """Bytes of swapped blocks in host memory, and of those on the device at a time.

    While one computes, the next one is being copied (`engine.parallel.block_swap`).

    Args:
        units: Of a model that is whole on its one rank.
        count: How many blocks are swapped; no more than there are.

    Returns:
        Bytes in host memory, and the most that is on the device at a time.
    """
    blocks = [unit for unit in units if unit.name[-1:].isdigit()]
    chosen = [blocks[place] for place in spread(min(count, len(blocks)), len(blocks))]
    sizes = [sum(rounded(w.numel * w.stored) for w in u.weights if not w.lora) for u in chosen]
    return sum(sizes), max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)


def _copied(shards: list[tuple[Weight, int]], layout: Layout) -> int:
    """Shards in the precision and on the device that they are sent from."""
    if not layout.offload:
        return rounded(sum(n * w.gathered for w, n in shards)) if layout.casts else 0
    moved = sum(rounded(n * w.gathered) for w, n in shards)
    largest = max((rounded(n * w.stored) for w, n in shards), default=0)
    return moved + (largest if layout.casts else 0)
