"""The lines of the device panel. Pure functions of a snapshot and a width.

What changes most stands in front: Textual sends a line up to the last cell that changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.machine.devices import foreign_users
from tui.dashboard.memory_split import Split, split_bar, split_of
from tui.dashboard.rank_lines import Seat, cpu_rank_row, gpu_rank_row, heartbeat
from tui.text.format import (
    MISSING,
    Row,
    Span,
    bar,
    cut,
    gib,
    left,
    load_role,
    percent,
    right,
    sparkline,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.machine.devices import Gpu, Host
    from tui.look.snapshot import JobView, Snapshot

_SPARK: Final = 16  # cells


class Columns(NamedTuple):
    """Widths of a GPU's columns; 0 leaves one out. Chosen once for a width."""

    spark: int
    power: int
    clock: int
    slowed: int
    memory: int
    bar: int
    name: int
    links: int
    tag: int


def device_rows(
    snapshot: Snapshot, width: int, room: int, selected: int | None = None
) -> tuple[Row, ...]:
    """One line per GPU (or one for the machine), and one per rank.

    Args:
        snapshot: What to show.
        width: Cells of a line.
        room: Lines that can be seen; ranks stand under their GPU when all of them fit.
        selected: The job that is looked at; its memory is told from that of the others.
    """
    seats = [Seat(view, rank) for view in snapshot.jobs for rank in view.ranks]
    if not snapshot.gpus:
        memory = snapshot.host.memory_total if snapshot.host else None
        rows = [_host_row(snapshot.host, width)] if snapshot.host else []
        return (*rows, *(cpu_rank_row(seat, memory, snapshot.t, width) for seat in seats))
    by_gpu = {
        gpu.uuid: [s for s in seats if s.rank.device_uuid == gpu.uuid] for gpu in snapshot.gpus
    }
    homeless = [s for s in seats if s.rank.device_uuid not in by_gpu]
    together = len(snapshot.gpus) + len(seats) <= room
    shape = columns(width, named=len({gpu.name for gpu in snapshot.gpus}) > 1)
    active = [view for view in snapshot.jobs if view.job.state.active]
    gpu_rows, rank_rows, mixed = [], [], []
    for gpu in snapshot.gpus:
        here = by_gpu[gpu.uuid]
        mine = [gpu_rank_row(seat, snapshot.t, width, indent=together) for seat in here]
        hint = hint_of(gpu, shape)
        tag = tag_of(gpu, here, active, shape.tag - 1 - len(hint))
        split = split_of(gpu, here, selected, tag.role == "accent")
        row = gpu_row(gpu, hint, tag, split, snapshot.busy.get(gpu.uuid, ()), shape)
        gpu_rows.append(row)
        rank_rows += mine
        mixed += [row, *mine]
    rest = [gpu_rank_row(seat, snapshot.t, width, indent=False) for seat in homeless]
    if together:
        return (*mixed, *rest)
    # Where not all can be seen, those that do not keep up come first.
    return (*gpu_rows, *sorted(rank_rows + rest, key=lambda row: row[-2].role != "bad"))


def devices_title(snapshot: Snapshot) -> str:
    """`devices · 8 H200 · late: #12 r3`."""
    names = {short_name(gpu.name) for gpu in snapshot.gpus}
    parts = ["devices"]
    if len(names) == 1:
        parts.append(f"{len(snapshot.gpus)} {names.pop()}")
    late = [
        f"#{view.job.id} r{rank.rank}"
        for view in snapshot.jobs
        for rank in view.ranks
        if heartbeat(rank, snapshot.t).role == "bad"
    ]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        parts.append(f"late: {', '.join(late[:3])}{more}")
    return " · ".join(parts)


def columns(width: int, *, named: bool = False) -> Columns:
    """Fit the columns; memory, and who is there, are never left out.

    Args:
        width: Cells of a line.
        named: Whether each line has its GPU's name, since they are not all the same.
    """
    wide = width >= 110
    shape = Columns(
        spark=_SPARK + 1 if width >= 96 else 0,
        power=9 if wide else 5,
        clock=9 if width >= 140 else 0,
        slowed=13 if wide else 0,
        memory=16 if width >= 90 else 12,
        bar=0,
        name=0,
        links=14 if width >= 170 else 0,
        tag=30 if width >= 76 else 20,
    )
    spare = width - 15 - sum(shape)  # index, percent, degrees and gaps
    name = (24 if width >= 150 else 12) if named and spare >= 22 else 0
    length = min(40, max(0, spare - name))
    return shape._replace(bar=length, name=name, tag=shape.tag + spare - name - length)


def tag_of(gpu: Gpu, seats: Sequence[Seat], jobs: Sequence[JobView], room: int = 40) -> Span:
    """Who sits on a GPU, in `room` cells; a name is cut before a rank."""
    if seats:
        fixed = sum(len(f"#{s.view.job.id}  r{s.rank.rank} ") for s in seats) - 1
        each = max(1, (room - fixed) // len(seats))
        words = (f"#{s.view.job.id} {cut(s.view.job.name, each)} r{s.rank.rank}" for s in seats)
        return Span(" ".join(words), "accent")
    for view in jobs:
        if view.job.state.active and gpu.uuid in view.job.gpus:
            return Span(f"#{view.job.id} {view.job.name} …", "accent")
    if gpu.unusable:
        return Span(gpu.unusable, "bad")
    if stranger := foreign_users([gpu], ()).get(gpu.uuid):
        return Span(stranger, "warn")
    return Span("free", "dim")


def gpu_row(
    gpu: Gpu, hint: str, tag: Span, split: Split, history: Sequence[int | None], shape: Columns
) -> Row:
    """`0  98%  64° 612/700W ▁▃▇█ power limit 41.2/139.8 GiB ━━━━┄┄┄┄ H200 #12 demo r0`."""
    heat = MISSING if gpu.temperature is None else f"{gpu.temperature}°"
    power = MISSING if gpu.power is None else f"{gpu.power:.0f}W"
    if shape.power >= 9 and gpu.power is not None and gpu.power_limit:
        power = f"{gpu.power:.0f}/{gpu.power_limit:.0f}W"
    unit = " GiB" if shape.memory >= 16 else "G"
    # Few colours in front: each costs forty bytes whenever one of these numbers changes.
    calm = "" if (gpu.utilisation or 0) >= 5 else "dim"
    spans = [
        Span(f"{gpu.index:>2} {right(percent(gpu.utilisation), 4)}", calm),
        Span(f" {right(heat, 4)}", heat_role(gpu.temperature) or calm),
        Span(f" {right(power, shape.power)}", calm),
    ]
    if shape.spark:
        spans.append(Span(f" {sparkline(history, shape.spark - 1)}", "raw"))
    if shape.clock:
        spans.append(Span(right(f"{gpu.clock or MISSING} MHz", shape.clock), "dim"))
    if shape.slowed:
        spans.append(Span(f" {left(gpu.throttle or '', shape.slowed - 1)}", "warn"))
    spans.append(
        Span(f" {right(f'{gib(gpu.memory_used)}/{gib(gpu.memory_total)}{unit}', shape.memory)} ")
    )
    spans += split_bar(gpu, split, shape.bar)
    if shape.links:
        spans.append(Span(f" {left(links(gpu), shape.links - 1)}", "dim"))
    if shape.name:
        spans.append(Span(f" {left(short_name(gpu.name), shape.name - 1)}", "dim"))
    room = shape.tag - 1
    spans += [Span(" " + cut(hint, room), "warn"), Span(cut(tag.text, room - len(hint)), tag.role)]
    return tuple(spans)


def hint_of(gpu: Gpu, shape: Columns) -> str:
    """What holds the GPU back, where it has no column: `power limit · PCIe x8 of x16 · `."""
    hints = [] if shape.slowed or not gpu.throttle else [gpu.throttle]
    if gpu.pcie_lanes and gpu.pcie_lanes_limit and gpu.pcie_lanes < gpu.pcie_lanes_limit:
        hints.append(f"PCIe x{gpu.pcie_lanes} of x{gpu.pcie_lanes_limit}")
    return "".join(f"{text} · " for text in hints)


def links(gpu: Gpu) -> str:
    """Return how the GPU is connected: `18 NVLinks`, `PCIe 5 x16`."""
    if gpu.nvlinks:
        return f"{gpu.nvlinks} NVLink{'s' * (gpu.nvlinks != 1)}"
    if gpu.pcie_generation and gpu.pcie_lanes:
        return f"PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}"
    return ""


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


def heat_role(celsius: int | None) -> str:
    """Return the color role of a temperature; "" if it is normal."""
    if celsius is None or celsius < 80:
        return ""
    return "warn" if celsius < 88 else "bad"


def short_name(name: str) -> str:
    """A GPU's name without what all of them have in common."""
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    return name.strip()
