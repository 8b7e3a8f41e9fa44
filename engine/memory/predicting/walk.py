"""Walk along a trace, and add what units hold, gather and reduce. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.memory.predicting.sharding import Cost, Layout, cost_of
from engine.memory.tracing.timeline import Mark, Span

if TYPE_CHECKING:
    from engine.memory.predicting.prediction import Parts
    from engine.memory.tracing.trace import Trace

_NOTHING = Span(0, 0, 0, 0)


@dataclass
class Walk:
    """The memory of a rank while it goes along a trace.

    Attributes:
        trace: Of the step, or of a forward.
        layout: How weights lie on the rank.
        base: What is there all the time.
        reshard: Whether units free their weights after forward.
        ahead: Units that are gathered ahead in forward.
        behind: Units that are gathered ahead in backward; 0 for the one that torch gathers.
        context: Ranks that share a sample's tokens, and so its activations.
        peaks: Phase → parts at its peak.
        gradients: Bytes of gradients when it has ended.
    """

    trace: Trace
    layout: Layout
    base: Parts
    reshard: bool = True
    ahead: int = 0
    behind: int = 0
    context: int = 1
    peaks: dict[str, Parts] = field(default_factory=dict)
    gradients: int = 0

    def __post_init__(self) -> None:
        self._costs = {unit.name: cost_of(unit, self.layout) for unit in self.trace.units}
        gathered = [name for name, cost in self._costs.items() if cost.whole and name]
        # As `engine.parallel.sharding` has them: UNets register what is in the middle last.
        self._order = sorted(gathered, key=lambda name: name.startswith("up_blocks."))
        self._kept = sum(cost.kept_gradients for cost in self._costs.values())
        self._sums = any(cost.gradients for cost in self._costs.values())
        self._reduced = 0  # gradients of shards
        self._phase = ""

    def step(self, micro_batches: int) -> None:
        """All forwards and backwards of an optimizer step; more than two are like two."""
        for number in range(min(2, micro_batches)):
            self.micro_batch(first=number == 0)

    def micro_batch(self, *, first: bool = True) -> None:
        """One forward and backward; where it is not the first, it adds to what is there."""
        self._first = first
        self._gathered: dict[str, int] = {}  # unit → its whole weights
        self._pending: dict[str, int] = {}  # unit → what is received for it
        self._again: dict[str, int] = {}  # unit → its weights, sharded over fewer ranks
        self._received = 0  # what the unit before was received into
        self._sending = 0  # what gradients of the unit before are sent from
        self._held = 0  # what replicas have summed up, until backward ends
        self._taken = 0  # gradients of the trace that are whole no more
        self._forwards: list[str] = []
        self._ended: set[str] = set()
        self._now = _NOTHING
        for entry in self.trace.timeline:
            if isinstance(entry, Mark):
                self._mark(entry)
            else:
                self._span(entry)
        own = self._now.gradients - self._taken if first else self._kept
        if not self.layout.shards:
            own = self._now.gradients
        self.gradients = own + self._reduced

    # -- marks -----------------------------------------------------------------------------

    def _mark(self, mark: Mark) -> None:
        if mark.kind == "begin":
            self._phase = mark.name
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

    def _enter(self, name: str, cost: Cost) -> None:
        self._unshard(name, cost)
        self._received = cost.buffer  # freed when the next unit has received
        if self.ahead and name:
            place = self._order.index(name)
            for other in self._order[place + 1 : place + 1 + self.ahead]:
                self._request(other)

    def _leave(self, name: str, cost: Cost) -> None:
        if not name:
            self._received = 0
        elif self.reshard:
            del self._gathered[name]
            self._again[name] = cost.again
        self._forwards.append(name)

    def _backward(self, name: str, cost: Cost) -> None:
        self._unshard(name, cost)
        named: list[str] = []
        if self.behind and name:
            place = self._order.index(name)
            named = self._order[max(0, place - self.behind) : place][::-1]
        if not named and name in self._forwards and (place := self._forwards.index(name)):
            named = [self._forwards[place - 1]]
        for other in named:
            self._request(other)

    def _done(self, name: str, cost: Cost) -> None:
        self._ended.add(name)
        self._gathered.pop(name, None)
        self._pending.pop(name, None)
        self._again.pop(name, None)
        self._sending = 0
        if not self._first:
            self._taken += cost.kept_gradients  # added to those that are there
        if not cost.gradients:
            return
        self._look(gradients=cost.reduce)
        self._taken += cost.gradients
        self._sending = cost.reduce
        self._look(gradients=cost.output)
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
        """Begin to gather a unit's weights."""
        if name in self._gathered or name in self._pending:
            return
        cost = self._costs[name]
        self._look(gathered=cost.copied + cost.buffer)
        self._pending[name] = cost.buffer

    def _unshard(self, name: str, cost: Cost) -> None:
        """Gather a unit's weights, and wait for them."""
        if name in self._gathered:
            return
        self._request(name)
        self._gathered[name] = cost.whole
        self._look()
        del self._pending[name]
        self._received = 0
        self._again.pop(name, None)

    # -- peaks -----------------------------------------------------------------------------

    def _span(self, span: Span) -> None:
        self._now = span
        if self._first or (self._sums and self.layout.shards):
            most, gradients = span.most, max(0, span.most - span.most_activations)
        else:
            # Gradients are there already, and new ones are added to them one by one.
            most, gradients = span.most_activations, 0
        self._compare(most - gradients, self._gradients(gradients), self._weights())

    def _look(self, gathered: int = 0, gradients: int = 0) -> None:
        """Compare a moment between two stretches, with so much more of something."""
        now = self._now
        own = now.gradients if self._first or self._sums else 0
        self._compare(now.activations, self._gradients(own) + gradients, self._weights() + gathered)

    def _weights(self) -> int:
        whole = sum(self._gathered.values()) + sum(self._pending.values())
        return whole + sum(self._again.values()) + self._received

    def _gradients(self, of_trace: int) -> int:
        """All gradients, while the trace has that number of them."""
        if not self.layout.shards:
            return of_trace if self._first else self.gradients
        before = 0 if self._first else self._kept
        own = of_trace - self._taken if self._first or self._sums else 0
        return before + max(0, own) + self._sending + self._held + self._reduced

    def _compare(self, activations: int, gradients: int, gathered: int) -> None:
        if not self._phase:
            return
        activations //= self.context
        here = replace(self.base, activations=activations, gradients=gradients, gathered=gathered)
        highest = self.peaks.get(self._phase)
        if highest is None or here.total > highest.total:
            self.peaks[self._phase] = here
