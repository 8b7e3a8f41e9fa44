"""What happens to memory while something runs: stretches between marks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.memory.tracing.live import Live

Kind = Literal["begin", "end", "enter", "leave", "backward", "done"]


@dataclass(frozen=True)
class Mark:
    """A moment.

    Attributes:
        kind: A phase's `begin` or `end`; of a unit, `enter` and `leave` of its forward,
            `backward` and `done` of its backward.
        name: The phase's or the unit's; the root's is empty.
    """

    kind: Kind
    name: str


@dataclass(frozen=True)
class Span:
    """A stretch between two marks, in bytes.

    Attributes:
        most: The most that activations and gradients took together.
        most_activations: The most that activations took.
        activations: What they take at its end.
        gradients: What gradients of parameters take at its end; none is ever freed.
    """

    most: int
    most_activations: int
    activations: int
    gradients: int


Entry = Mark | Span


class Recorder:
    """Writes a timeline down.

    Args:
        live: What counts.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.entries: list[Entry] = []
        self._base = (0, 0)

    def begin(self) -> None:
        """Count from what is alive now."""
        self._base = (self.live.activations, self.live.gradients)
        self.live.reset()

    def flush(self) -> None:
        """End a stretch."""
        live, (activations, gradients) = self.live, self._base
        live.simulate(0)
        self.entries.append(
            Span(
                live.most - activations - gradients,
                live.most_activations - activations,
                live.activations - activations,
                live.gradients - gradients,
            )
        )
        live.reset()

    def mark(self, kind: Kind, name: str) -> None:
        """End a stretch with a mark."""
        self.flush()
        self.entries.append(Mark(kind, name))

    def replay(self, entries: Sequence[Entry], rename: Callable[[str], str]) -> None:
        """Have what was recorded elsewhere happen here, without its lasting effects."""
        self.flush()
        above = self.live.activations - self._base[0], self.live.gradients - self._base[1]
        for entry in entries:
            if isinstance(entry, Mark):
                self.entries.append(Mark(entry.kind, rename(entry.name)))
            else:
                self.entries.append(
                    Span(
                        entry.most + sum(above),
                        entry.most_activations + above[0],
                        entry.activations + above[0],
                        entry.gradients + above[1],
                    )
                )

    @contextmanager
    def apart(self) -> Iterator[list[Entry]]:
        """Within, a timeline of its own is written, from what is alive at its beginning on."""
        outer, base = self.entries, self._base
        inner: list[Entry] = []
        self.entries = inner
        self.begin()
        try:
            yield inner
        finally:
            self.entries, self._base = outer, base
            self.live.reset()
