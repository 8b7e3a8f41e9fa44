"""The lines of the device panel. Pure functions of a snapshot and a width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jobs.devices import foreign_users
from jobs.rundir import PHASES
from tui.format import (
    MISSING,
    Row,
    Span,
    bar,
    cut,
    duration,
    gib,
    left,
    load_role,
    percent,
    right,
    size,
)
from tui.snapshot import LATE_AFTER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.devices import Gpu, Host
    from jobs.rundir import RankStatus
    from tui.snapshot import JobView, Snapshot


class Seat(NamedTuple):
    """A rank of an active job."""

    view: JobView
    rank: RankStatus


def device_rows(snapshot: Snapshot, width: int, room: int) -> tuple[Row, ...]:
    """One line per GPU (or one for the machine), and one per rank.

    Args:
        snapshot: What to show.
        width: Cells of a line.
        room: Lines that can be seen; ranks stand under their GPU when all of them fit.
    """
    seats = [Seat(view, rank) for view in snapshot.jobs for rank in view.ranks]
    if not snapshot.gpus:
        memory = snapshot.host.memory_total if snapshot.host else None
        rows = [_host_row(snapshot.host, width)] if snapshot.host else []
        return (*rows, *(_cpu_rank_row(seat, memory, snapshot.t, width) for seat in seats))
    by_gpu = {
        gpu.uuid: [s for s in seats if s.rank.device_uuid == gpu.uuid] for gpu in snapshot.gpus
    }
    homeless = [s for s in seats if s.rank.device_uuid not in by_gpu]
    together = len(snapshot.gpus) + len(seats) <= room
    gpu_rows, rank_rows, mixed = [], [], []
    for gpu in snapshot.gpus:
        mine = [
            _gpu_rank_row(seat, snapshot.t, width, indent=together) for seat in by_gpu[gpu.uuid]
        ]
        row = _gpu_row(gpu, tag_of(gpu, by_gpu[gpu.uuid], snapshot.jobs), width)
        gpu_rows.append(row)
        rank_rows += mine
        mixed += [row, *mine]
    rest = [_gpu_rank_row(seat, snapshot.t, width, indent=False) for seat in homeless]
    return tuple(mixed + rest if together else gpu_rows + rank_rows + rest)


def tag_of(gpu: Gpu, seats: Sequence[Seat], jobs: Sequence[JobView]) -> Span:
    """Who sits on a GPU, in a few characters."""
    if seats:
        return Span(
            " ".join(f"#{s.view.job.id} {s.view.job.name} r{s.rank.rank}" for s in seats), "accent"
        )
    for view in jobs:
        if view.job.state.active and gpu.uuid in view.job.gpus:
            return Span(f"#{view.job.id} {view.job.name} …", "accent")
    if gpu.unusable:
        return Span(gpu.unusable, "bad")
    if stranger := foreign_users([gpu], ()).get(gpu.uuid):
        return Span(stranger, "warn")
    return Span("free", "dim")


def _gpu_row(gpu: Gpu, tag: Span, width: int) -> Row:
    """`0 NVIDIA H200 ━━━━┄┄┄┄ 41.2/139.8 GiB  98%  64°C  612W  #12 demo r0`."""
    share = (
        gpu.memory_used / gpu.memory_total
        if gpu.memory_used is not None and gpu.memory_total
        else None
    )
    name = short_name(gpu.name) if width >= 72 else ""
    name_width = (22 if width >= 110 else 10) if name else 0
    power = MISSING if gpu.power is None else f"{gpu.power:.0f}W"
    if width >= 110 and gpu.power is not None and gpu.power_limit:
        power = f"{gpu.power:.0f}/{gpu.power_limit:.0f}W"
    unit = " GiB" if width >= 90 else "G"
    heat = MISSING if gpu.temperature is None else f"{gpu.temperature}°"
    numbers = [
        Span(f" {right(f'{gib(gpu.memory_used)}/{gib(gpu.memory_total)}{unit}', 11 + len(unit))}"),
        Span(
            f" {right(percent(gpu.utilisation), 4)}",
            "good" if (gpu.utilisation or 0) >= 5 else "dim",
        ),
        Span(f" {right(heat, 4)}", _heat_role(gpu.temperature)),
        Span(f" {right(power, 9 if width >= 110 else 5)} ", "dim"),
    ]
    tag_width = min(30, max(9, width // 5))
    used = 3 + name_width + sum(len(span.text) for span in numbers) + 1 + tag_width
    bar_width = min(40, max(0, width - used))
    spare = max(0, width - used - bar_width)
    return (
        Span(f"{gpu.index:>2} ", "strong"),
        *((Span(left(cut(name, name_width - 1), name_width), "dim"),) if name else ()),
        *bar(share, bar_width, load_role(share)),
        *numbers,
        Span(" " + cut(tag.text, tag_width + spare), tag.role),
    )


def _gpu_rank_row(seat: Seat, now: float, width: int, *, indent: bool) -> Row:
    """`└ #12 demo r0  training  step 130  alloc 30.1  reserved 33.0  peak 38.2 GiB  beat now`."""
    rank = seat.rank
    lead = "   └ " if indent else "   "
    torch = (
        f"alloc {gib(rank.allocated)}  reserved {gib(rank.reserved)}  peak {gib(rank.peak)} GiB"
        if width >= 100
        else f"a{gib(rank.allocated)} r{gib(rank.reserved)} p{gib(rank.peak)}G"
    )
    return (
        Span(lead, "faint"),
        *_who(seat, width),
        *_where_in_work(seat, width),
        Span(torch + "  ", "dim"),
        _beat(rank, now),
    )


def _host_row(host: Host, width: int) -> Row:
    """`cpu ━━┄┄┄┄  23%  2 cores   memory ━━━┄┄┄  3.1/7.8 GiB`."""
    share = host.memory_used / host.memory_total if host.memory_total else None
    cores = f" of {host.cores} cores"
    memory = f" {gib(host.memory_used)}/{gib(host.memory_total)} GiB"
    bars = min(100, max(8, width - len("cpu ") - 5 - len(cores) - len("   mem ") - len(memory)))
    cpu = host.cpu_percent / 100
    return (
        Span("cpu ", "strong"),
        *bar(cpu, bars // 2, "bar"),
        Span(f" {right(percent(host.cpu_percent), 4)}"),
        Span(cores, "dim"),
        Span("   mem ", "strong"),
        *bar(share, bars - bars // 2, load_role(share)),
        Span(memory),
    )


def _cpu_rank_row(seat: Seat, memory_total: int | None, now: float, width: int) -> Row:
    """`#12 demo r0  training  step 130  ━━┄┄ 1.2 GiB  beat now`."""
    rank = seat.rank
    share = rank.rss / memory_total if rank.rss is not None and memory_total else None
    head = (*_who(seat, width), *_where_in_work(seat, width))
    beat = _beat(rank, now)
    used = sum(len(span.text) for span in head) + 11 + 12
    return (
        *head,
        *bar(share, min(30, max(0, width - used)), load_role(share)),
        Span(f" {right(size(rank.rss), 8)}  "),
        beat,
    )


def _who(seat: Seat, width: int) -> Row:
    name = 16 if width >= 100 else 10
    job = f"#{seat.view.job.id} {seat.view.job.name}"
    return Span(left(job, name) + " ", "accent"), Span(f"r{seat.rank.rank} ".ljust(4), "strong")


def _where_in_work(seat: Seat, width: int) -> Row:
    """Phase and step; a phase that has no steps may use the room of both."""
    rank = seat.rank
    phase = PHASES.get(rank.phase, rank.phase)
    words, numbers = (17, 12) if width >= 100 else (11, 11)
    if not rank.step:
        return (Span(left(phase, words + numbers) + " "),)
    return Span(left(phase, words) + " "), Span(left(f"step {rank.step}", numbers), "dim")


def _beat(rank: RankStatus, now: float) -> Span:
    """The age of the heartbeat; calm while it is fresh, so that nothing is repainted."""
    age = now - rank.heartbeat
    if age > LATE_AFTER:
        return Span(f"! late {duration(age)}", "bad")
    if age >= 3:
        return Span(f"beat {age:.0f}s", "warn" if age > LATE_AFTER / 2 else "dim")
    return Span("beat ok", "good")


def _heat_role(celsius: int | None) -> str:
    if celsius is None or celsius < 80:
        return "dim"
    return "warn" if celsius < 88 else "bad"


def short_name(name: str) -> str:
    """A GPU's name without what all of them have in common."""
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    return name.strip()
