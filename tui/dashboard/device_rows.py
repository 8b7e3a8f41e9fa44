"""The lines of the device panel. Pure functions of a snapshot and a width.

Values that change most often come first: Textual sends a line up to the last changed cell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.machine.devices import foreign_users
from tui.dashboard.rank_lines import (
    TABLE_FROM,
    Seat,
    Split,
    cpu_rank_row,
    gpu_rank_row,
    process_rows,
    rank_words,
    split_bar,
    split_of,
)
from tui.look.snapshot import is_late
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
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu, Host
    from tui.look.snapshot import JobView, Snapshot


# -- gpu tags -------------------------------------------------------------------------------
# The owner of a GPU, abbreviated. Pure.


_ROOMY: Final = 26  # cells from which the memory of another user's process is shown


def tag_of(gpu: Gpu, seats: Sequence[Seat], jobs: Sequence[JobView], room: int = 40) -> Span:
    """Return the owner of a GPU in `room` cells; names are cut before ranks."""
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
    if stranger := foreign_users([gpu], (), brief=room < _ROOMY).get(gpu.uuid):
        return Span(stranger, "warn")
    return Span("free", "dim")


def heat_role(celsius: int | None) -> str:
    """Return the color role of a temperature; "" if it is normal."""
    if celsius is None or celsius < 80:
        return ""
    return "warn" if celsius < 88 else "bad"


# -- device pairs ---------------------------------------------------------------------------
# Two GPUs per line, for screens with fewer lines than GPUs. Pure.


PAIRS_FROM: Final = 60  # cells of a line
_BETWEEN: Final = " │ "
_FIXED: Final = 21  # cells before the owner


def pair_head(width: int) -> Row:
    """Return the headings of both columns."""
    half = _half(width)
    words = cut(" #  use temp     GiB used by", half).ljust(half)
    return Span(words, "title"), Span(_BETWEEN, "faint"), Span(words, "title")


def pair_rows(
    snapshot: Snapshot,
    seats: Mapping[str, Sequence[Seat]],
    active: Sequence[JobView],
    width: int,
) -> list[Row]:
    """Return rows with the first half of the GPUs on the left and the others on the right.

    Args:
        snapshot: The snapshot to show.
        seats: Our ranks on each GPU, by its UUID.
        active: The running jobs.
        width: Cells of a line.
    """
    half = _half(width)
    cells = [_cell(gpu, seats[gpu.uuid], active, snapshot.t, half) for gpu in snapshot.gpus]
    lines = -(-len(cells) // 2)
    rows: list[Row] = []
    for line in range(lines):
        beside = cells[line + lines] if line + lines < len(cells) else ()
        rows.append((*cells[line], Span(_BETWEEN, "faint"), *beside))
    return rows


def _half(width: int) -> int:
    return (width - len(_BETWEEN)) // 2


def _cell(
    gpu: Gpu, seats: Sequence[Seat], active: Sequence[JobView], now: float, width: int
) -> Row:
    """Return ` 0  97%  60°  34/140 #2 cats-and-s… r0`."""
    calm = "" if (gpu.utilisation or 0) >= 5 else "dim"
    heat = MISSING if gpu.temperature is None else f"{gpu.temperature}°"
    room = width - _FIXED
    late = next((s for s in seats if is_late(s.rank, now)), None)
    tag = tag_of(gpu, seats, active, room)
    if late is not None:
        tag = Span(f"! #{late.view.job.id} r{late.rank.rank} late", "bad")
    return (
        Span(f"{gpu.index:>2} {right(percent(gpu.utilisation), 4)}", calm),
        Span(f" {right(heat, 4)}", heat_role(gpu.temperature) or calm),
        Span(f" {right(f'{_whole(gpu.memory_used)}/{_whole(gpu.memory_total)}', 7)} "),
        Span(cut(tag.text, room).ljust(room), tag.role),
    )


def _whole(count: int | None) -> str:
    return MISSING if count is None else f"{count / 2**30:.0f}"


# -- device rows ----------------------------------------------------------------------------


_SPARK: Final = 16  # cells
_GRAPH: Final = 28  # cells: a minute
_WIDE_NODES: Final = 110  # columns from which node names and node GPUs are shown


class Histories(NamedTuple):
    """A GPU's recent utilization and memory use: percentages, the oldest first."""

    busy: Sequence[int | None] = ()
    filled: Sequence[int | None] = ()


class Columns(NamedTuple):
    """Widths of a GPU's columns; 0 hides one. Chosen once for a width."""

    spark: int
    power: int
    clock: int
    slowed: int
    memory: int
    bar: int
    filled: int
    name: int
    links: int
    tag: int


def device_rows(
    snapshot: Snapshot, width: int, room: int, selected: int | None = None
) -> tuple[Row, ...]:
    """Return a line for each GPU (or one for the machine), its ranks and its processes.

    If the GPUs do not fit, two share a line. The processes follow below or, on a narrow screen,
    each rank under its GPU, provided that all of them fit; otherwise only late
    ranks are shown.

    Args:
        snapshot: The snapshot to show.
        width: Cells of a line.
        room: Visible lines.
        selected: The selected job; its memory has its own color.
    """
    if away := away_from_here(snapshot):
        nodes = [node_row(seat, snapshot.t, width) for seat in away]
        views = tuple(
            replace(view, ranks=tuple(r for r in view.ranks if Seat(view, r) not in away))
            if not view.job.here
            else view
            for view in snapshot.jobs
        )
        at_home = replace(snapshot, jobs=views)
        return (*device_rows(at_home, width, max(1, room - len(nodes)), selected), *nodes)
    seats = [Seat(view, rank) for view in snapshot.jobs for rank in view.ranks]
    if not snapshot.gpus:
        memory = snapshot.host.memory_total if snapshot.host else None
        rows = [_host_row(snapshot.host, width)] if snapshot.host else []
        return (*rows, *(cpu_rank_row(seat, memory, snapshot.t, width) for seat in seats))
    by_gpu = seats_by_gpu(snapshot)
    homeless = [s for s in seats if s.rank.device_uuid not in by_gpu]
    active = [view for view in snapshot.jobs if view.job.state.active]
    rest = [gpu_rank_row(seat, snapshot.t, width, indent=False) for seat in homeless]
    late = [seat for seat in seats if is_late(seat.rank, snapshot.t)]
    if is_paired(snapshot, width, room):
        return (*pair_rows(snapshot, by_gpu, active, width), *rest)
    processes = [row for row, _ in process_rows(snapshot, by_gpu, width)]
    tabled = width >= TABLE_FROM and len(snapshot.gpus) + len(processes) + len(rest) <= room
    together = not tabled and len(snapshot.gpus) + len(seats) <= room
    shape = columns(width, named=len({gpu.name for gpu in snapshot.gpus}) > 1)
    gpu_rows, mixed = [], []
    for gpu in snapshot.gpus:
        here = by_gpu[gpu.uuid]
        hint = hint_of(gpu, shape)
        tag = tag_of(gpu, here, active, shape.tag - 1 - len(hint))
        split = split_of(gpu, here, selected, tag.role == "accent")
        row = gpu_row(gpu, hint, tag, split, history_of(snapshot, gpu), shape)
        gpu_rows.append(row)
        mixed += [row, *(gpu_rank_row(seat, snapshot.t, width, indent=True) for seat in here)]
    if together:
        return (*mixed, *rest)
    if tabled:
        return (*gpu_rows, *processes, *rest)
    listed = [seat for seat in late if seat not in homeless]
    return (*gpu_rows, *(gpu_rank_row(s, snapshot.t, width, indent=False) for s in listed), *rest)


def away_from_here(snapshot: Snapshot) -> list[Seat]:
    """Return ranks of Slurm jobs on other machines, which no local measurement covers."""
    present = {gpu.uuid for gpu in snapshot.gpus}
    return [
        Seat(view, rank)
        for view in snapshot.jobs
        if not view.job.here
        for rank in view.ranks
        if rank.device_uuid not in present
    ]


def node_row(seat: Seat, now: float, width: int) -> Row:
    """Return `n1  H100 80GB HBM3   33.0/79.6 GiB  #12 demo r0  training  step 130  beat ok`.

    The rank on that node reports these: the memory torch holds or, on a CPU, the process's.
    """
    rank, wide = seat.rank, width >= _WIDE_NODES
    on_gpu = rank.device != "cpu"
    host, cells = rank.host.partition(".")[0], 16 if wide else 8
    if len(host) > cells:  # node names differ at the end
        host = f"…{host[1 - cells :]}"
    name = short_name(rank.gpu or "") or ("GPU" if on_gpu else "CPU")
    used = gib(rank.reserved if on_gpu else rank.rss)
    used += f"/{gib(rank.gpu_memory)}" if rank.gpu_memory else ""
    used += " GiB" if wide else "G"
    share = (rank.reserved or 0) / rank.gpu_memory if rank.gpu_memory else None
    return (
        Span(f" {left(host, cells)} ", "strong"),
        Span(f"{left(name, 20 if wide else 7)} ", "dim"),
        Span(
            f"{right(used, 15 if wide else 10)}  ",
            load_role(share),
        ),
        *rank_words(seat, now, width),
    )


def device_head(snapshot: Snapshot, width: int, room: int) -> Row | None:
    """Return the column headings; None without GPUs, or without a line for the headings."""
    if not snapshot.gpus or room < 2:
        return None
    if is_paired(snapshot, width, room - 1):
        return pair_head(width)
    if len(snapshot.gpus) >= room:
        return None
    return gpu_head(columns(width, named=len({gpu.name for gpu in snapshot.gpus}) > 1))


def is_paired(snapshot: Snapshot, width: int, room: int) -> bool:
    """Return whether two GPUs share a line."""
    return len(snapshot.gpus) > room and width >= PAIRS_FROM


def seats_by_gpu(snapshot: Snapshot) -> dict[str, list[Seat]]:
    """Return our ranks on each GPU, by its UUID."""
    seats: dict[str, list[Seat]] = {gpu.uuid: [] for gpu in snapshot.gpus}
    for view in snapshot.jobs:
        for rank in view.ranks:
            if rank.device_uuid in seats:
                seats[rank.device_uuid].append(Seat(view, rank))
    return seats


def history_of(snapshot: Snapshot, gpu: Gpu) -> Histories:
    """Return a GPU's recent utilization and memory use, in percent."""
    return Histories(snapshot.busy.get(gpu.uuid, ()), snapshot.filled.get(gpu.uuid, ()))


def devices_title(snapshot: Snapshot, what: str = "devices") -> str:
    """Return `devices · 8 H200 · late: #12 r3`."""
    names = {short_name(gpu.name) for gpu in snapshot.gpus}
    parts = [what]
    if len(names) == 1:
        parts.append(f"{len(snapshot.gpus)} {names.pop()}")
    late = [
        f"#{view.job.id} r{rank.rank}"
        for view in snapshot.jobs
        for rank in view.ranks
        if is_late(rank, snapshot.t)
    ]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        parts.append(f"late: {', '.join(late[:3])}{more}")
    return " · ".join(parts)


def columns(width: int, *, named: bool = False, graphs: bool = True) -> Columns:
    """Fit the columns; memory and tags always stay.

    Args:
        width: Cells of a line.
        named: Show the GPU's name on each line, because the GPUs differ.
        graphs: Show columns of recent use where they fit.
    """
    wide, long = width >= 110, width >= 170 and graphs
    shape = Columns(
        spark=(_GRAPH if long else _SPARK) + 1 if width >= 96 and graphs else 0,
        power=9 if wide else 5,
        clock=9 if width >= 140 else 0,
        slowed=13 if wide else 0,
        memory=16 if width >= 90 else 12,
        bar=0,
        filled=_GRAPH + 1 if long else 0,
        name=0,
        links=14 if width >= 190 else 0,
        tag=30 if width >= 76 else 20,
    )
    spare = width - 15 - sum(shape)  # index, percent, degrees and gaps
    name = (24 if width >= 150 else 12) if named and spare >= 22 else 0
    length = min(24 if long else 40, max(0, spare - name))
    return shape._replace(bar=length, name=name, tag=shape.tag + spare - name - length)


def gpu_head(shape: Columns) -> Row:
    """Return the headings of `gpu_row`."""
    cells = [
        " # " + right("use", 4),
        " " + right("temp", 4),
        " " + right("power", shape.power),
    ]
    if shape.spark:
        cells.append(" " + left("recent use", shape.spark - 1))
    if shape.clock:
        cells.append(right("clock", shape.clock))
    if shape.slowed:
        cells.append(" " + left("slowed by", shape.slowed - 1))
    cells.append(" " + right("memory", shape.memory) + " ")
    cells.append(" " * shape.bar)
    if shape.filled:
        cells.append(" " + left("recent memory", shape.filled - 1))
    if shape.links:
        cells.append(" " + left("links", shape.links - 1))
    if shape.name:
        cells.append(" " + left("model", shape.name - 1))
    cells.append(" used by")
    return (Span("".join(cells), "title"),)


def gpu_row(
    gpu: Gpu, hint: str, tag: Span, split: Split, history: Histories, shape: Columns
) -> Row:
    """Return `0  98%  64° 612/700W ▁▃▇█ power limit 41.2/139.8 GiB ━━━━┄┄┄┄ H200 #12 demo r0`."""
    heat = MISSING if gpu.temperature is None else f"{gpu.temperature}°"
    power = MISSING if gpu.power is None else f"{gpu.power:.0f}W"
    if shape.power >= 9 and gpu.power is not None and gpu.power_limit:
        power = f"{gpu.power:.0f}/{gpu.power_limit:.0f}W"
    unit = " GiB" if shape.memory >= 16 else "G"
    # Use few colors here: each costs forty bytes whenever one of these numbers changes.
    calm = "" if (gpu.utilisation or 0) >= 5 else "dim"
    spans = [
        Span(f"{gpu.index:>2} {right(percent(gpu.utilisation), 4)}", calm),
        Span(f" {right(heat, 4)}", heat_role(gpu.temperature) or calm),
        Span(f" {right(power, shape.power)}", calm),
    ]
    if shape.spark:
        spans.append(Span(f" {sparkline(history.busy, shape.spark - 1)}", "raw"))
    if shape.clock:
        spans.append(Span(right(f"{gpu.clock or MISSING} MHz", shape.clock), "dim"))
    if shape.slowed:
        spans.append(Span(f" {left(gpu.throttle or '', shape.slowed - 1)}", "warn"))
    spans.append(
        Span(f" {right(f'{gib(gpu.memory_used)}/{gib(gpu.memory_total)}{unit}', shape.memory)} ")
    )
    spans += split_bar(gpu, split, shape.bar)
    if shape.filled:
        spans.append(Span(f" {sparkline(history.filled, shape.filled - 1)}", "raw"))
    if shape.links:
        spans.append(Span(f" {left(links(gpu), shape.links - 1)}", "dim"))
    if shape.name:
        spans.append(Span(f" {left(short_name(gpu.name), shape.name - 1)}", "dim"))
    room = shape.tag - 1
    spans += [Span(" " + cut(hint, room), "warn"), Span(cut(tag.text, room - len(hint)), tag.role)]
    return tuple(spans)


def hint_of(gpu: Gpu, shape: Columns) -> str:
    """Name what throttles the GPU if that has no column: `power limit · PCIe x8 of x16 · `."""
    hints = [] if shape.slowed or not gpu.throttle else [gpu.throttle]
    if gpu.pcie_lanes and gpu.pcie_lanes_limit and gpu.pcie_lanes < gpu.pcie_lanes_limit:
        hints.append(f"PCIe x{gpu.pcie_lanes} of x{gpu.pcie_lanes_limit}")
    return "".join(f"{text} · " for text in hints)


def links(gpu: Gpu) -> str:
    """Describe how the GPU is connected: `18 NVLinks`, `PCIe 5 x16`."""
    if gpu.nvlinks:
        return f"{gpu.nvlinks} NVLink{'s' * (gpu.nvlinks != 1)}"
    if gpu.pcie_generation and gpu.pcie_lanes:
        return f"PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}"
    return ""


def _host_row(host: Host, width: int) -> Row:
    """Return `cpu ━━┄┄┄┄  23%  2 cores   memory ━━━┄┄┄  3.1/7.8 GiB`."""
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


def short_name(name: str) -> str:
    """Return a GPU's name without the common vendor prefixes."""
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    return name.strip()
