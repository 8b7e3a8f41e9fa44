"""`python tests/bench/placement.py`: how long it takes to decide about a long queue.

Placement runs whenever someone looks, under a lock that all others wait for.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING, Final

from jobs.backends.local.placement import Request, Start, place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Make = Callable[[int, Sequence[str], random.Random], int | list[str]]

REPEATS = 3
KINDS: dict[str, Make] = {
    "one GPU each": lambda number, devices, dice: 1,
    "any 1 to 8": lambda number, devices, dice: dice.choice([1, 2, 4, 8]),
    "two by name": lambda number, devices, dice: dice.sample(devices, min(2, len(devices))),
    "two thirds by name": lambda number, devices, dice: (
        4 if number % 3 == 0 else dice.sample(devices, min(2, len(devices)))
    ),
    "all GPUs each": lambda number, devices, dice: len(devices),
}


MACHINES: Final = ("idle", "all busy", "others'")


def seconds(jobs: int, gpus: int, make: Make, machine: str) -> tuple[float, int]:
    """The best time of a few, and how many jobs could start."""
    dice = random.Random(7)
    devices = [f"GPU-{number}" for number in range(gpus)]
    queue = [Request(number, make(number, devices, dice)) for number in range(1, jobs + 1)]
    claims = dict.fromkeys(devices, jobs + 1) if machine == "all busy" else {}
    foreign = dict.fromkeys(devices, "ann's python") if machine == "others'" else {}
    best, started = float("inf"), 0
    for _ in range(REPEATS):
        begun = time.perf_counter()
        decisions = place(queue, claims, devices, foreign=foreign)
        best = min(best, time.perf_counter() - begun)
        started = sum(isinstance(decision, Start) for decision in decisions)
    return best, started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=1_024)
    asked = parser.parse_args()
    print(f"{asked.jobs:,} queued jobs, {asked.gpus:,} GPUs; the best of {REPEATS}")
    print(f"{'queue':20}{'machine':10}{'started':>8}{'seconds':>10}")
    for name, make in KINDS.items():
        for machine in MACHINES:
            took, started = seconds(asked.jobs, asked.gpus, make, machine)
            print(f"{name:20}{machine:10}{started:8}{took:10.4f}")


if __name__ == "__main__":
    main()
