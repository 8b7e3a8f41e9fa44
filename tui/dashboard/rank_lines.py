"""Lines about a GPU's contents: ranks, other processes, and the owners of its memory. Pure."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from jobs.machine.devices import foreign_users
from jobs.machine.gpu import HIDDEN_USE, hidden_use
from jobs.run.rundir import PHASES
from tui.look.snapshot import LATE_AFTER, is_late
from tui.text.format import (
    MISSING,
    Row,
    Span,
    bar,
    cut,
    duration,
    gib,
    left,
    load_role,
    ranges,
    right,
    size,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu, GpuProcess
    from jobs.run.rundir import RankStatus
    from tui.look.snapshot import JobView, Snapshot


# -- memory split ---------------------------------------------------------------------------
# Split a GPU's used memory: selected job, our other jobs, other processes. Pure.


SELECTED: Final = "━"
OURS: Final = "╍"
OTHERS: Final = "▒"
_FREE: Final = "┄"
LEGEND: Final = f"{SELECTED} this job  {OURS} our other jobs  {OTHERS} other processes"


class Split(NamedTuple):
    """Used bytes of a GPU, by owner."""

    selected: int
    ours: int
    others: int


def split_of(gpu: Gpu, seats: Sequence[Seat], selected: int | None, claimed: bool) -> Split:
    """Split the used memory by owner.

    Use the driver's numbers if its pid belongs to a rank; if pids do not match (in a container
    they may be the host's), use torch's reserved bytes. Attribute the rest to the other known
    process, or else to our job.

    Args:
        gpu: The GPU.
        seats: Our ranks on it.
        selected: The selected job.
        claimed: Whether one of our jobs holds the GPU, with or without ranks on it yet.
    """
    used = gpu.memory_used or 0
    held = {process.pid: process.memory or 0 for process in gpu.processes}
    mine, ours = 0, 0
    for seat in seats:
        bytes_held = max(held.get(seat.rank.pid, 0), seat.rank.reserved or 0)
        if seat.view.job.id == selected:
            mine += bytes_held
        else:
            ours += bytes_held
    mine, ours = min(mine, used), min(ours, max(0, used - mine))
    rest = used - mine - ours
    strangers = foreign_users([gpu], {seat.rank.pid for seat in seats}).get(gpu.uuid)
    if not seats and not claimed:
        return Split(0, 0, used)
    visible = sum(
        process.memory or 0
        for process in gpu.processes
        if process.command is not None and process.pid not in {seat.rank.pid for seat in seats}
    )
    others = min(rest, visible) if strangers else 0
    rest -= others  # CUDA's own memory beyond what torch reserved
    if mine or not ours:
        return Split(mine + rest, ours, others)
    return Split(mine, ours + rest, others)


def split_bar(gpu: Gpu, split: Split, width: int) -> Row:
    """Draw a bar of `width` cells; parts differ in shape, not only in color."""
    if gpu.memory_used is None or not gpu.memory_total:
        return bar(None, width)
    share = gpu.memory_used / gpu.memory_total
    if not (split.ours or split.others):
        return bar(share, width, load_role(share))
    spans, end, reached = [], 0, 0
    for amount, glyph, role in (
        (split.selected, SELECTED, load_role(share)),
        (split.ours, OURS, "accent"),
        (split.others, OTHERS, "warn"),
    ):
        reached += amount
        cells = min(width, round(reached / gpu.memory_total * width)) - end
        if amount and not cells and end < width and amount > gpu.memory_total // 50:
            cells = 1  # small, but visible
        if cells > 0:
            spans.append(Span(glyph * cells, role))
            end += cells
    if end < width:
        spans.append(Span(_FREE * (width - end), "faint"))
    return tuple(spans)


# -- rank lines -----------------------------------------------------------------------------
# The lines about ranks: one beside its device, or a table of a whole job. Pure functions.


_STILL: Final = 60.0  # seconds without progress that are worth mentioning


class Seat(NamedTuple):
    """A rank of an active job."""

    view: JobView
    rank: RankStatus


def gpu_rank_row(seat: Seat, now: float, width: int, *, indent: bool) -> Row:
    """`└ #12 demo r0  training  step 130  beat ok  alloc 30.1  reserved 33.0  peak 38.2 GiB`."""
    rank = seat.rank
    torch = (
        f"alloc {gib(rank.allocated)}  reserved {gib(rank.reserved)}  peak {gib(rank.peak)} GiB"
        if width >= 100
        else f"a{gib(rank.allocated)} r{gib(rank.reserved)} p{gib(rank.peak)}G"
    )
    beat = heartbeat(rank, now)
    return (
        Span("   └ " if indent else "   ", "accent"),
        *_who(seat, width),
        *_where_in_work(seat, width),
        Span(left(beat.text, max(9, len(beat.text))), beat.role),
        Span(torch, "dim"),
    )


def cpu_rank_row(seat: Seat, memory_total: int | None, now: float, width: int) -> Row:
    """Return `#12 demo r0  training  step 130  ━━┄┄ 1.2 GiB  beat ok`."""
    rank = seat.rank
    share = rank.rss / memory_total if rank.rss is not None and memory_total else None
    head = (*_who(seat, width), *_where_in_work(seat, width))
    used = sum(len(span.text) for span in head) + 11 + 12
    return (
        *head,
        *bar(share, min(30, max(0, width - used)), load_role(share)),
        Span(f" {right(size(rank.rss), 8)}  "),
        heartbeat(rank, now),
    )


def rank_words(seat: Seat, now: float, width: int) -> Row:
    """Return a rank's owner and activity: `#12 demo r0  training  step 130  beat ok`."""
    return (*_who(seat, width), *_where_in_work(seat, width), heartbeat(seat.rank, now))


def heartbeat(rank: RankStatus, now: float) -> Span:
    """Return the heartbeat's age; constant while it is fresh, so that nothing is repainted."""
    age = now - rank.heartbeat
    if is_late(rank, now):
        return Span(f"! late {duration(age)}", "bad")
    if age >= 3:
        return Span(f"beat {age:.0f}s", "warn" if age > LATE_AFTER / 2 else "dim")
    return Span("beat ok", "good")


# -- the table of a job ------------------------------------------------------------------------


def rank_table(view: JobView, gpus: Sequence[Gpu], now: float, width: int) -> tuple[Row, ...]:
    """Return a heading and one line per rank: activity, lag, memory.

    Args:
        view: The job.
        gpus: The machine's GPUs, for their indices.
        now: Unix seconds.
        width: Cells of a line.
    """
    index = {gpu.uuid: str(gpu.index) for gpu in gpus}
    wide, on_gpu = width >= 100, any(rank.allocated is not None for rank in view.ranks)
    heads = ("alloc", "reserved", "peak") if on_gpu else ("memory",)
    title = (
        f"{'rank':>4} {'gpu':<4}{'step':>7}  {'heartbeat':<15}{'phase':<{18 if wide else 13}}"
        + "".join(f"{head:>9}" for head in heads)
        + (f"{'pid':>9}  host" if wide else "")
    )
    furthest = max((rank.step for rank in view.ranks), default=0)
    rows: list[Row] = [(Span(title[:width], "title"),)]
    for rank in view.ranks:
        sizes = (
            (gib(rank.allocated), gib(rank.reserved), gib(rank.peak))
            if on_gpu
            else (size(rank.rss),)
        )
        state = keeping_up(rank, furthest, now)
        phase = PHASES.get(rank.phase, rank.phase)
        place = f"{rank.pid:>9}  {rank.host}" if wide else ""
        rows.append(
            (
                Span(f"{rank.rank:>4} ", "strong"),
                Span(left(index.get(rank.device_uuid or "", "cpu"), 3) + " ", "accent"),
                Span(f"{rank.step:>7}  "),
                Span(left(state.text, 14) + " ", state.role),
                Span(left(phase, 17 if wide else 12) + " "),
                Span("".join(f"{text:>9}" for text in sizes)),
                Span(place[: max(0, width - len(title) + 4)], "dim"),
            )
        )
    return tuple(rows)


def keeping_up(rank: RankStatus, furthest: int, now: float) -> Span:
    """Say whether a rank is alive and keeps up with the others.

    Args:
        rank: The rank.
        furthest: The highest step of any rank.
        now: Unix seconds.
    """
    beat = heartbeat(rank, now)
    if beat.role != "good":
        return beat
    # Ranks sampled in the middle of a step may be one step apart.
    if (behind := furthest - rank.step) > 1:
        return Span(f"! {behind} steps behind", "bad")
    if (still := now - rank.progressed) > _STILL:
        return Span(f"stalled {duration(still)}", "warn")
    return Span("ok", "good")


def rank_title(view: JobView, now: float) -> str:
    """Return `ranks of #12 demo · 8 of 8 · late: 3,5`."""
    furthest = max((rank.step for rank in view.ranks), default=0)
    bad = [rank.rank for rank in view.ranks if keeping_up(rank, furthest, now).role == "bad"]
    none = "ended" if view.job.state.ended else "none yet"
    count = f"{len(view.ranks)} of {view.job.ranks}" if view.ranks else none
    late = f" · late: {ranges(bad)}" if bad else ""
    return f"ranks of #{view.job.id} {view.job.name} · {count}{late}"


# -- pieces ------------------------------------------------------------------------------------


def _who(seat: Seat, width: int) -> Row:
    name = 16 if width >= 100 else 10
    job = f"#{seat.view.job.id} {seat.view.job.name}"
    return (Span(f"{left(job, name)} {f'r{seat.rank.rank}':<3} ", "accent"),)


def _where_in_work(seat: Seat, width: int) -> Row:
    """Return phase and step; a phase without steps may use the room of both."""
    rank = seat.rank
    phase = PHASES.get(rank.phase, rank.phase)
    words, numbers = (17, 12) if width >= 100 else (11, 11)
    if not rank.step:
        return (Span(left(phase, words + numbers) + " "),)
    return (Span(f"{left(phase, words)} {left(f'step {rank.step}', numbers)}"),)


# -- process rows ---------------------------------------------------------------------------
# GPU processes as the driver reports them: owner, memory, activity. Pure.


TABLE_FROM: Final = 100  # cells of a line
_USER: Final = 10


class _Line(NamedTuple):
    """A process; `seat` if it is one of our ranks, `process` if the driver lists it."""

    memory: int
    seat: Seat | None
    process: GpuProcess | None


class Target(NamedTuple):
    """The target of a row on the GPU screen: a GPU, or a process on it.

    Attributes:
        gpu: The GPU's UUID.
        job: Our job that the rank belongs to, or that holds the GPU.
        process: A process that belongs to no job; None for GPUs and ranks.
    """

    gpu: str
    job: int | None
    process: GpuProcess | None = None

    @property
    def is_stray(self) -> bool:
        """Return whether it is a process of this user that belongs to none of our jobs."""
        return self.process is not None and self.process.user == whoami()


@cache
def whoami() -> str:
    """Return this user's name as GPU processes report it."""
    return psutil.Process().username()


def process_rows(
    snapshot: Snapshot, seats: Mapping[str, Sequence[Seat]], width: int
) -> list[tuple[Row, Target | None]]:
    """Return a heading and a line for each process, by GPU; [] if there are none.

    Args:
        snapshot: The snapshot to show.
        seats: Our ranks on each GPU, by its UUID.
        width: Cells of a line.
    """
    rows: list[tuple[Row, Target | None]] = []
    for gpu in snapshot.gpus:
        claimed = any(v.job.state.active and gpu.uuid in v.job.gpus for v in snapshot.jobs)
        for line in _lines(gpu, seats.get(gpu.uuid, ())):
            job = line.seat.view.job.id if line.seat is not None else None
            target = Target(gpu.uuid, job, line.process if line.seat is None else None)
            rows.append((_row(gpu, line, snapshot.t, width), target))
        hidden = 0 if claimed else hidden_use(gpu)
        if hidden >= HIDDEN_USE:
            rows.append((_hidden_row(gpu, hidden, width), None))
    if not rows:
        return []
    head = f" # {right('pid', 8)}  {left('user', _USER)} {right('memory', 9)}  process"
    return [((Span(head, "title"),), None), *rows]


def _lines(gpu: Gpu, seats: Sequence[Seat]) -> list[_Line]:
    """Return lines, the largest first, also for ranks whose pid the driver does not list."""
    by_pid = {seat.rank.pid: seat for seat in seats}
    lines = [_Line(p.memory or 0, by_pid.pop(p.pid, None), p) for p in gpu.processes]
    if by_pid:  # in a container, an unknown process of ours must be a rank that is listed already
        lines = [line for line in lines if line.seat or (line.process and line.process.command)]
    lines += [_Line(seat.rank.reserved or 0, seat, None) for seat in by_pid.values()]
    return sorted(lines, key=lambda line: (line.seat is None, -line.memory))


def _row(gpu: Gpu, line: _Line, now: float, width: int) -> Row:
    seat, process = line.seat, line.process
    pid = process.pid if process is not None else seat.rank.pid if seat is not None else 0
    user = process.user if process is not None and process.user else MISSING
    memory = size(process.memory) if process is not None else MISSING
    head = f"{gpu.index:>2} {pid:>8}  {left(user, _USER)} {right(memory, 9)}  "
    if seat is None:
        words = cut(_command(process), max(0, width - len(head)))
        others = process is not None and process.user not in (None, whoami())
        return Span(head, "dim" if others else ""), Span(words, "dim" if others else "warn")
    beat = heartbeat(seat.rank, now)
    name = f"#{seat.view.job.id} {seat.view.job.name}"
    rank = seat.rank
    peak = f"peak {gib(rank.peak)} GiB"
    alloc, reserved = f"alloc {gib(rank.allocated)}  ", f"reserved {gib(rank.reserved)}  "
    phase = PHASES.get(rank.phase, rank.phase)
    doing = f"{phase} {rank.step}" if rank.phase == "train" and rank.step else phase
    job, phases = (24, 18) if width >= TABLE_FROM else (18, 13)
    used = len(head) + job + phases + 12
    tails = (alloc + reserved + peak, alloc + peak, peak)
    return (
        Span(head, "accent"),
        Span(left(name, job - 5) + f" {f'r{rank.rank}':<4}", "accent"),
        Span(left(doing, phases - 1) + " "),
        Span(left(beat.text, 11) + " ", beat.role),
        Span(next((tail for tail in tails if len(tail) <= width - used), ""), "dim"),
    )


def _hidden_row(gpu: Gpu, hidden: int, width: int) -> Row:
    head = f"{gpu.index:>2} {right(MISSING, 8)}  {left(MISSING, _USER)} {right(size(hidden), 9)}  "
    return Span(head), Span(cut("hidden processes", width - len(head)), "warn")


def _command(process: GpuProcess | None) -> str:
    if process is None or process.command is None:
        return "not visible from here"
    program, _, rest = process.command.partition(" ")
    return f"{os.path.basename(program)} {rest}".strip()
