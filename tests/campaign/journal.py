"""What a campaign has done: a line a piece of work, so that it can be broken off at any moment."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Journal:
    """Trials of one kind.

    Attributes:
        path: Its file; None keeps nothing.
        kind: Of trials: faults, real, fuzz, ….
        seed: Of the whole campaign.
    """

    path: Path | None
    kind: str
    seed: int
    done: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[int] = field(default_factory=list)
    broke: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            record = json.loads(line)
            if (record["kind"], record["seed"]) == (self.kind, self.seed):
                self._take(record)

    def trials(self, count: int, hours: float | None = None) -> Iterator[int]:
        """Numbers below `count` that were not done yet, until the time is over."""
        until = time.monotonic() + hours * 3600 if hours is not None else None
        for number in range(count):
            if number in self.done:
                continue
            if until is not None and time.monotonic() > until:
                return
            yield number

    def note(self, trial: int, what: str, found: str = "", **facts: Any) -> None:
        """A trial is done; `found` says what was broken in it."""
        record = {"kind": self.kind, "seed": self.seed, "trial": trial, "what": what} | facts
        if found:
            record["found"] = found
            print(
                f"BROKEN {what}: {found}\n"
                f"  again: python -m tests.campaign {self.kind} --seed {self.seed} --only {trial}",
                file=sys.stderr,
                flush=True,
            )
        self._take(record)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def summary(self) -> str:
        """Counts by what was tried."""
        each = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
        return (
            f"{self.kind}, seed {self.seed}: {sum(self.counts.values()):,} trials ({each}); "
            f"{len(self.broken)} broken {self.broken[:20] or ''}"
        )

    def _take(self, record: dict[str, Any]) -> None:
        self.done.add(record["trial"])
        self.counts[record["what"]] += record.get("count", 1)
        if "found" in record:
            self.broken.append(record["trial"])
            self.broke[record["what"]] += 1


def dice(kind: str, seed: int, trial: int) -> random.Random:
    """What a trial draws from."""
    return random.Random(f"{kind}/{seed}/{trial}")
