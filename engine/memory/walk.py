"""Walk along a trace, and add what units hold, gather and reduce. Pure arithmetic.

`work_and_traffic` adds up what a step computes and moves; `jobs.memory.seconds` turns that into
seconds, given a GPU's rates.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from engine.memory.tracing.live import rounded
from engine.memory.tracing.timeline import Mark, Span, work_of
from engine.parallel.block_swap import place_in_forward, spread
from jobs.memory.predicted import WORK_SCHEMA
from jobs.spec.rules.steps import accumulation_steps, base_forwards, passes
from jobs.spec.rules.strategy import SHARDING
from jobs.spec.values.value_types import on_card

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.memory.tracing.model import Unit, Weight
    from engine.memory.tracing.timeline import Entry
    from engine.memory.tracing.trace import Trace
    from jobs.memory.predicted import Parts
    from jobs.spec.job_spec import JobSpec, RecipeKeys


# -- sharding -------------------------------------------------------------------------------
# Memory of an FSDP2 unit at each of its marks: shards, gathered weights, and communication buffers.
#
# This follows torch 2.11 to 2.13 (`torch/distributed/fsdp/_fully_shard`), in the order in which
# they allocate and free. `tests/bench/memory.py` compares the results with theirs.


REDUCED: Final = 4  # bytes: gradients are reduced in fp32


@dataclass(frozen=True)
class Layout:
    """What memory and traffic depend on besides the trace: where weights are, and when.

    Attributes:
        shards: Ranks that share a copy of the sharded weights; 0 if nothing is sharded.
        lora_whole: Whether an adapter is replicated on every rank.
        casts: Whether weights are gathered in another precision than they are stored in.
        offload: Whether shards are kept in host memory.
        smaller: Ranks over which weights are resharded after forward; 0 for all of them.
        replicated: Whether there are several copies of the sharded weights (hsdp).
        reshard: Whether units free their weights after forward.
        ahead: Number of units that are prefetched in forward.
        behind: Number of units that are prefetched in backward; 0 for torch's default of one.
        context: Ranks that share a sample's tokens, and therefore its activations.
        swaps: Number of blocks that are swapped to host memory.
    """

    shards: int
    lora_whole: bool = True
    casts: bool = False
    offload: bool = False
    smaller: int = 0
    replicated: bool = False
    reshard: bool = True
    ahead: int = 0
    behind: int = 0
    context: int = 1
    swaps: int = 0

    def is_sharded(self, weight: Weight) -> bool:
        """Return whether a weight is sharded at all."""
        return bool(self.shards) and not weight.fp32 and not (weight.lora and self.lora_whole)

    def local(self, weight: Weight) -> int:
        """Return the elements of a weight on the rank that has the most of it."""
        if not self.is_sharded(weight):
            return weight.numel
        rows = weight.shape[0]
        return -(-rows // self.shards) * (weight.numel // rows) if rows else 0


def layout_of(spec: RecipeKeys, ranks: int, strategy: str) -> Layout:
    """Return how a job's weights are distributed over the ranks. Pure."""
    if strategy not in SHARDING:
        swaps = on_card(spec.swap_blocks, None) if spec.model_type == "lora" else 0
        return Layout(0, context=spec.context_parallel_size, swaps=swaps)
    replicas = (spec.dp_replicate_size or 1) if strategy == "hsdp" else 1
    again = spec.fsdp_reshard_after_forward
    return Layout(
        shards=max(1, ranks // replicas),
        lora_whole=spec.lora_placement == "replicated",
        casts=spec.model_type == "full" and spec.mixed_precision != "no",
        offload=spec.fsdp_cpu_offload,
        smaller=0 if isinstance(again, bool) else int(again),
        replicated=replicas > 1,
        reshard=bool(again),
        ahead=spec.fsdp_forward_prefetch,
        behind=spec.fsdp_backward_prefetch,
        context=spec.context_parallel_size,
    )


@dataclass(frozen=True)
class Cost:
    """The memory of a unit, in bytes.

    Attributes:
        held: Parameters that are always on the device.
        host: Shards in host memory.
        copied: Copies of shards, made when an all-gather starts, and freed once it is in flight.
        buffer: The all-gather's receive buffer.
        whole: The gathered weights.
        partial: Weights after forward, if they are resharded over fewer ranks.
        gradients: Unsharded gradients of sharded weights.
        kept_gradients: Gradients of replicated weights.
        reduce: The reduce-scatter's send buffer.
        output: The reduce-scatter's receive buffer.
        reduced: The part of it that stays: the gradients of the shards.
    """

    held: int
    host: int
    copied: int
    buffer: int
    whole: int
    partial: int
    gradients: int
    kept_gradients: int
    reduce: int
    output: int
    reduced: int


@lru_cache(maxsize=4096)
def cost_of(unit: Unit, layout: Layout) -> Cost:
    """Compute the memory of a unit. Pure."""
    mine = [w for w in unit.weights if layout.is_sharded(w)]
    others = [w for w in unit.weights if not layout.is_sharded(w)]
    ranks = layout.shards
    shards = [(w, layout.local(w)) for w in mine]
    held = sum(rounded(number * w.stored) for w, number in shards)
    trained = [(w, number) for w, number in shards if w.trained and not w.unused]
    padded = sum(number * ranks for _, number in trained)
    kept = sum(rounded(w.numel * w.stored) for w in others)
    output = rounded(padded // ranks * REDUCED) if ranks else 0
    return Cost(
        held=kept + (0 if layout.offload else held),
        host=held if layout.offload else 0,
        copied=_copied(shards, layout),
        # With a single shard, weights are copied into place without a buffer.
        buffer=rounded(sum(n * ranks * w.gathered for w, n in shards)) if ranks > 1 else 0,
        whole=sum(rounded(number * ranks * w.gathered) for w, number in shards),
        partial=sum(rounded(number * ranks * w.gathered // layout.smaller) for w, number in shards)
        if layout.smaller
        else 0,
        gradients=sum(rounded(w.numel * w.gathered) for w, _ in trained),
        kept_gradients=sum(
            rounded(w.numel * w.stored) for w in others if w.trained and not w.unused
        ),
        reduce=rounded(padded * REDUCED),
        output=output,
        reduced=0 if layout.offload else output,
    )


def order_of(units: Sequence[Unit], layout: Layout) -> list[str]:
    """Return the FSDP units but the root, ordered as `engine.parallel.sharding` does."""
    gathered = [unit.name for unit in units if unit.name and cost_of(unit, layout).whole]
    return sorted(gathered, key=place_in_forward)


def kept_unit(units: Sequence[Unit], layout: Layout) -> str:
    """Return the unit that stays gathered for backward, which begins with it; "" for none."""
    keeps = layout.shards and layout.reshard and not layout.smaller
    return next(iter(order_of(units, layout)[-1:]), "") if keeps else ""


def swapped_of(units: Sequence[Unit], layout: Layout) -> dict[str, int]:
    """Return the bytes of each swapped block in host memory, in the order of forward."""
    blocks = [unit for unit in units if unit.name[-1:].isdigit()]
    blocks.sort(key=lambda unit: place_in_forward(unit.name))
    chosen = [blocks[place] for place in spread(min(layout.swaps, len(blocks)), len(blocks))]
    return {
        unit.name: sum(rounded(w.numel * w.stored) for w in unit.weights if not w.lora)
        for unit in chosen
    }


def _copied(shards: list[tuple[Weight, int]], layout: Layout) -> int:
    """Return the bytes of shards copied for sending, in the precision that is sent."""
    if not layout.offload:
        return rounded(sum(n * w.gathered for w, n in shards)) if layout.casts else 0
    moved = sum(rounded(n * w.gathered) for w, n in shards)
    largest = max((rounded(n * w.stored) for w, n in shards), default=0)
    return moved + (largest if layout.casts else 0)


# -- walk -----------------------------------------------------------------------------------


_NOTHING = Span(0, 0, 0, 0)


@dataclass
class Walk:
    """The memory of a rank along a trace.

    Attributes:
        trace: Trace of a step, or of a forward.
        layout: The job's layout on its ranks.
        base: Memory that is always in use.
        peaks: Memory by purpose at the peak of each phase.
        gradients: Bytes of gradients at the end.
    """

    trace: Trace
    layout: Layout
    base: Parts
    peaks: dict[str, Parts] = field(default_factory=dict)
    gradients: int = 0

    def __post_init__(self) -> None:
        self._costs = {unit.name: cost_of(unit, self.layout) for unit in self.trace.units}
        self._order = order_of(self.trace.units, self.layout)
        self._kept_unit = kept_unit(self.trace.units, self.layout)
        self._swapped = swapped_of(self.trace.units, self.layout)
        self._kept = sum(cost.kept_gradients for cost in self._costs.values())
        self._sums = any(cost.gradients for cost in self._costs.values())
        self._reduced = 0  # gradients of shards
        self._phase = ""

    def step(self, micro_batches: int) -> None:
        """Walk all micro-batches of an optimizer step; more than two have the same peak as two.

        Where some have a forward of the base before them, others have none: what that one leaves
        gathered they gather on top of their activations.
        """
        kinds = dict.fromkeys((_without_base(self.trace.timeline), self.trace.timeline))
        for number in range(min(2, micro_batches)):
            for timeline in kinds:
                self.micro_batch(timeline, first=number == 0)

    def sample(self) -> None:
        """Walk two forwards: what the first keeps for a backward is there in the second."""
        self.micro_batch()
        kept = ("", self._kept_unit) if self._kept_unit else ("",)
        self.micro_batch(gathered={name: self._costs[name].whole for name in kept})

    def micro_batch(
        self,
        timeline: Sequence[Entry] | None = None,
        *,
        first: bool = True,
        gathered: Mapping[str, int] | None = None,
    ) -> None:
        """Walk one forward and backward. Unless it is the first, gradients accumulate."""
        self._first = first
        if first:
            self._reduced = 0
        self._gathered = dict(gathered or {})  # unit → its unsharded weights
        self._pending: dict[str, int] = {}  # unit → its receive buffer
        self._partial: dict[str, int] = {}  # unit → its weights, sharded over fewer ranks
        self._received = 0  # receive buffer of the previous unit
        self._sending = 0  # send buffer of the previous unit's gradients
        self._held = 0  # gradients summed over replicas, until backward ends
        self._freed = 0  # unsharded gradients of the trace freed so far
        self._forwards: list[str] = []
        self._ended: set[str] = set()
        self._now = _NOTHING
        for entry in self.trace.timeline if timeline is None else timeline:
            if isinstance(entry, Mark):
                self._mark(entry)
            else:
                self._span(entry)
        own = self._now.gradients - self._freed if first else self._kept
        if not self.layout.shards:
            own = self._now.gradients
        self.gradients = own + self._reduced

    # -- marks -----------------------------------------------------------------------------

    def _mark(self, mark: Mark) -> None:
        if mark.kind == "begin":
            self._phase = mark.name
            if self._phase != "backward":
                for name in self._swapped:  # a forward without a backward has released its last one
                    self._gathered.pop(name, None)
                self._copy(*list(self._swapped)[:1])
        elif mark.kind == "end":
            if mark.name == "backward":
                self._finish()
            self._phase = ""
        elif self.layout.shards and (cost := self._costs[mark.name]).whole:
            if mark.kind == "enter":
                self._enter(mark.name, cost)
            elif mark.kind == "leave":
                self._leave(mark.name, cost)
            elif mark.kind == "backward":
                self._backward(mark.name, cost)
            else:
                self._done(mark.name, cost)
        elif mark.name in self._swapped:
            self._swap(mark)

    def _swap(self, mark: Mark) -> None:
        """Follow `engine.parallel.block_swap`: the next block is copied while one computes."""
        order = list(self._swapped)
        place = order.index(mark.name)
        if mark.kind == "enter":
            self._copy(*order[place : place + 2])
        elif mark.kind == "backward":
            self._copy(*order[max(0, place - 1) : place + 1])
        elif mark.kind == "done" or self._phase != "forward" or mark.name != order[-1]:
            self._gathered.pop(mark.name, None)

    def _copy(self, *names: str) -> None:
        self._gathered |= {name: self._swapped[name] for name in names}
        self._compare_now()

    def _enter(self, name: str, cost: Cost) -> None:
        if name not in self._gathered:
            self._unshard(name, cost)
            self._received = cost.buffer  # freed when the next unit has been received
        if self.layout.ahead and name:
            place = self._order.index(name)
            for other in self._order[place + 1 : place + 1 + self.layout.ahead]:
                self._request(other)

    def _leave(self, name: str, cost: Cost) -> None:
        if not name:
            self._received = 0
        elif self.layout.reshard and name != self._kept_unit:
            del self._gathered[name]
            self._partial[name] = cost.partial
        self._forwards.append(name)

    def _backward(self, name: str, cost: Cost) -> None:
        self._unshard(name, cost)
        named: list[str] = []
        if self.layout.behind and name:
            place = self._order.index(name)
            named = self._order[max(0, place - self.layout.behind) : place][::-1]
        if not named and name in self._forwards:
            # As torch does, by the last of several forwards.
            place = len(self._forwards) - 1 - self._forwards[::-1].index(name)
            named = self._forwards[max(0, place - 1) : place]
        for other in named:
            self._request(other)

    def _done(self, name: str, cost: Cost) -> None:
        self._ended.add(name)
        self._gathered.pop(name, None)
        self._pending.pop(name, None)
        self._partial.pop(name, None)
        self._sending = 0
        if not self._first:
            self._freed += cost.kept_gradients  # accumulated into the existing ones
        if not cost.gradients:
            return
        self._compare_now(gradients=cost.reduce)
        self._freed += cost.gradients
        self._sending = cost.reduce
        self._compare_now(gradients=cost.output)
        if self.layout.replicated and self.layout.offload:
            self._held += cost.output
        if self._first:
            self._reduced += cost.reduced

    def _finish(self) -> None:
        """Finish backward as torch does: end the root, and units whose backward has not ended."""
        for name in ("", *self._order):
            if self.layout.shards and name not in self._ended and self._costs[name].whole:
                self._done(name, self._costs[name])
        self._sending = self._held = 0

    # -- gathering -------------------------------------------------------------------------

    def _request(self, name: str) -> None:
        """Start gathering a unit's weights."""
        if name in self._gathered or name in self._pending:
            return
        cost = self._costs[name]
        self._compare_now(gathered=cost.copied + cost.buffer)
        self._pending[name] = cost.buffer

    def _unshard(self, name: str, cost: Cost) -> None:
        """Gather a unit's weights and wait for them."""
        if name in self._gathered:
            return
        self._request(name)
        self._gathered[name] = cost.whole
        self._compare_now()
        del self._pending[name]
        self._received = 0
        self._partial.pop(name, None)

    # -- peaks -----------------------------------------------------------------------------

    def _span(self, span: Span) -> None:
        self._now = span
        if self._first or (self._sums and self.layout.shards):
            most, gradients = span.most, max(0, span.most - span.most_activations)
        else:
            # Gradients exist already, and new ones are added to them one by one.
            most, gradients = span.most_activations, 0
        self._compare(most - gradients, self._gradients(gradients), self._weights())

    def _compare_now(self, gathered: int = 0, gradients: int = 0) -> None:
        """Compare a moment between two spans, with additional gathered weights or gradients."""
        now = self._now
        own = now.gradients if self._first or self._sums else 0
        self._compare(now.activations, self._gradients(own) + gradients, self._weights() + gathered)

    def _weights(self) -> int:
        whole = sum(self._gathered.values()) + sum(self._pending.values())
        return whole + sum(self._partial.values()) + self._received

    def _gradients(self, of_trace: int) -> int:
        """Return the bytes of all gradients, given those of the trace."""
        if not self.layout.shards:
            return of_trace if self._first else self.gradients
        before = 0 if self._first else self._kept
        own = of_trace - self._freed if self._first or self._sums else 0
        return before + max(0, own) + self._sending + self._held + self._reduced

    def _compare(self, activations: int, gradients: int, gathered: int) -> None:
        if not self._phase:
            return
        activations //= self.layout.context
        here = replace(self.base, activations=activations, gradients=gradients, gathered=gathered)
        highest = self.peaks.get(self._phase)
        if highest is None or here.total > highest.total:
            self.peaks[self._phase] = here


def _without_base(timeline: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return a timeline without the forward of the base."""
    kept: list[Entry] = []
    inside = False
    for entry in timeline:
        if isinstance(entry, Mark) and (entry.kind, entry.name) == ("begin", "base"):
            inside = True
        if not inside:
            kept.append(entry)
        if isinstance(entry, Mark) and (entry.kind, entry.name) == ("end", "base"):
            inside = False
    return tuple(kept)


# -- traffic --------------------------------------------------------------------------------


# Bytes that the optimizer's kernels move for each trained element besides its state: the weight is
# read and written, the gradient read. Clipping reads it for the norm, and reads and writes it.
_UPDATE: Final = 12
_CLIP: Final = 12
_AVERAGE: Final = 12  # the moving average is read and written, the weight read
# Share of the small kernels, and of what they move, that Inductor's fusion leaves. A trace runs the
# operations one by one. FLUX.1 on an H200 (docs/gpu.md): 87 ms of them where 340 were counted.
_FUSED: Final = 0.3


def work_and_traffic(
    trace: Trace, spec: JobSpec, layout: Layout, ranks: int, *, trained: int, state: int
) -> dict[str, Any]:
    """Return the work of a micro-batch's forward and backward, and of the rest of a step.

    `linked` are bytes over a rank's link to the others, counted as nccl-tests counts its bus
    bandwidth: an all-gather of S bytes over n ranks counts S (n - 1) / n, and an all-reduce twice
    that. `copied` are bytes between host and device.

    Args:
        trace: Trace of the training step.
        spec: The job.
        layout: The job's layout on these ranks.
        ranks: World size.
        trained: Number of trained parameters on a rank.
        state: Bytes of the optimizer's state on a rank.
    """
    shards = max(1, layout.shards)
    received = {unit.name: _gathered(unit, layout) * _share(shards) for unit in trace.units}
    reduced = sum(_reduced(unit, layout) for unit in trace.units)
    costs = [cost_of(unit, layout) for unit in trace.units]
    # Without being freed after forward, weights are still there in backward, as the root's are.
    again = layout.reshard
    group = layout.smaller or shards
    share = (group - 1) / group / _share(shards) if again and shards > 1 else 0.0
    replicas = ranks // shards if layout.replicated else 1
    replicated = 2 * _share(replicas) * reduced / shards
    # The root's weights stay, and those of the unit that backward begins with.
    stay = {"", kept_unit(trace.units, layout)}
    of_blocks = sum(size for name, size in received.items() if name not in stay)
    of_backward = of_blocks * share + reduced * _share(shards)
    whole = sum(
        w.numel * w.stored
        for unit in trace.units
        for w in unit.weights
        if w.trained and not layout.is_sharded(w)
    )
    swapped = [*swapped_of(trace.units, layout).values()]
    offloaded = {unit.name: cost.host for unit, cost in zip(trace.units, costs, strict=True)}
    freed = sum(size for name, size in offloaded.items() if name not in stay)
    fetched = sum(swapped) + sum(offloaded.values())
    again_fetched = freed if again and not layout.smaller else 0  # else they stay on the device
    updated = trained * (_UPDATE + _CLIP * bool(spec.max_grad_norm)) + 2 * state
    if spec.use_ema:
        updated += trained * _AVERAGE
    each_time = layout.offload  # replicas then meet after each micro-batch

    def counted(phase: str) -> dict[str, Any]:
        work = work_of(trace.timeline, phase)
        if spec.torch_compile:
            small = {name: round(getattr(work, name) * _FUSED) for name in ("bytes", "kernels")}
            work = replace(work, **small)
        return asdict(work)

    return {
        "schema": WORK_SCHEMA,
        "micro_batches": accumulation_steps(spec, ranks) * passes(spec),
        "base_forwards": base_forwards(spec, ranks),
        "base": counted("base")
        # What it leaves gathered, the next forward finds.
        | {"linked": round(of_blocks * share), "copied": sum(swapped) + again_fetched},
        "forward": counted("forward")
        | {"linked": round(sum(received.values())), "copied": fetched},
        "backward": counted("backward")
        | {
            "linked": round(of_backward + replicated * each_time),
            "copied": sum(swapped[:-1])  # the last one stays
            + again_fetched
            + (sum(cost.output for cost in costs) if layout.offload else 0),
        },
        "step": {
            "linked": round(2 * _share(ranks) * whole + replicated * (not each_time)),
            "bytes": 0 if layout.offload else updated,
            "host_bytes": updated if layout.offload else 0,
        },
    }


def _share(ranks: int) -> float:
    """Return the share of a tensor that a rank receives from the others."""
    return (ranks - 1) / ranks


def _gathered(unit: Unit, layout: Layout) -> int:
    """Return the bytes of a unit's gathered weights, with the padding of uneven shards."""
    sharded = (w for w in unit.weights if layout.is_sharded(w))
    return sum(layout.local(w) * layout.shards * w.gathered for w in sharded)


def _reduced(unit: Unit, layout: Layout) -> int:
    """Return the bytes of a unit's gradients that are reduced and scattered."""
    trained = (w for w in unit.weights if layout.is_sharded(w) and w.trained and not w.unused)
    return sum(layout.local(w) * layout.shards * REDUCED for w in trained)
