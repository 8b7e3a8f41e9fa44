"""A fleet as its screen would know it, without ssh and without boxes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from jobs.fleet.config import Box, Fleet
from jobs.fleet.lines import BoxGpu, BoxJob, Head, Snapshot
from jobs.fleet.watch import BoxView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

_NAMES: Final = ("trainer1", "trainer2", "workstation", "lab-a100", "lab-l40s", "old-box")


def made_up_views(count: int) -> tuple[BoxView, ...]:
    """So many boxes: most are here, the third is away, the fifth was never seen."""
    return tuple(_view(number) for number in range(count))


def _view(number: int) -> BoxView:
    name = _NAMES[number] if number < len(_NAMES) else f"node-{number:02}"
    box, now = Box(name=name), time.monotonic()
    if number == 4:
        why = f"ssh: connect to host {name} port 22: No route to host"
        return BoxView(box, "away", why)
    if number == 5:
        return BoxView(box)
    gpus = (8, 8, 2, 4)[number % 4] if number != 6 else 0
    snapshot = Snapshot(
        Head(fleet=1, version="0.2.0", host=f"{name}.lab", cores=64, interval=3600),
        tuple(_gpu(place, number) for place in range(gpus)),
        tuple(_jobs(number)) if number < 4 else (),
        paused=number == 3,
        newer=number == 1,
    )
    if number == 2:
        why = "ssh: connect to host workstation port 22: Connection timed out"
        return BoxView(box, "away", why, snapshot, heard=now - 200)
    return BoxView(box, "here", snapshot=snapshot, heard=now)


def _gpu(place: int, number: int) -> BoxGpu:
    busy = place < 6 - number and number < 5
    facts: dict[str, Any] = {"gpu": place, "name": "NVIDIA H200", "memory_total": 141 * 2**30}
    facts |= {"memory_used": (96 + place) * 2**30 if busy else 2**29}
    facts |= {"utilisation": 97 - place if busy else 0, "job": 3 if busy else None}
    if number == 1 and place == 7:
        facts |= {"others": True, "utilisation": 40}
    if number == 3 and place == 3:
        facts |= {"problem": "is lost (it fell off the bus); reboot the machine"}
    return BoxGpu(**facts)


def _jobs(number: int) -> Sequence[BoxJob]:
    running = {"state": "running", "step": 840 + number, "total_steps": 2000, "ranks": 6}
    return (
        BoxJob(id=1, name="hearts", state="completed", step=20, total_steps=20, loss=0.2, ranks=2),
        BoxJob(
            id=2,
            name="wan-clips",
            state="failed",
            step=12,
            total_steps=900,
            ranks=8,
            gpus=tuple(range(8)),
            reason="rank 1 ran out of GPU memory at step 12 during backward: 79.1 of 79.6 GiB",
        ),
        BoxJob(
            id=3,
            name="flux-night-run",
            **running,
            loss=0.4123,
            seconds_per_step=1.52,
            eta=1763,
            gpus=tuple(range(6 - number)),
        ),
        BoxJob(
            id=4,
            name="sd3-portraits",
            state="queued",
            ranks=4,
            total_steps=500,
            reason="waiting for 4 GPUs",
        ),
    )


def make_up_fleet(patch: pytest.MonkeyPatch, count: int) -> None:
    """Put such a fleet in the place of the real one."""

    class MadeUp:
        def __init__(self, fleet: Fleet) -> None:
            pass

        def run(self, publish: Callable[[tuple[BoxView, ...]], None]) -> None:
            publish(made_up_views(count))

        def retry(self) -> None:
            pass

        def close(self) -> None:
            pass

    machines = tuple(view.box for view in made_up_views(count))
    patch.setattr("tui.fleet.screen.read_fleet", lambda: Fleet(machines=machines))
    patch.setattr("tui.fleet.screen.FleetWatch", MadeUp)
