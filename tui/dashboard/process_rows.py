"""The processes on GPUs, as the driver names them: whose, how much memory, what they do. Pure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.machine.gpu import HIDDEN_USE, hidden_use
from jobs.run.rundir import PHASES
from tui.dashboard.rank_lines import heartbeat
from tui.text.format import MISSING, Row, Span, cut, gib, left, right, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu, GpuProcess
    from tui.dashboard.rank_lines import Seat
    from tui.look.snapshot import Snapshot

TABLE_FROM: Final = 100  # cells of a line
_USER: Final = 10


class _Line(NamedTuple):
    """A process; `seat` if it is a rank of ours, `process` if the driver names it."""

    memory: int
    seat: Seat | None
    process: GpuProcess | None


def process_rows(snapshot: Snapshot, seats: Mapping[str, Sequence[Seat]], width: int) -> list[Row]:
    """Return a heading and a line for each process, by GPU; nothing where there are none.

    Args:
        snapshot: What to show.
        seats: Our ranks on each GPU, by its UUID.
        width: Cells of a line.
    """
    rows: list[Row] = []
    for gpu in snapshot.gpus:
        claimed = any(v.job.state.active and gpu.uuid in v.job.gpus for v in snapshot.jobs)
        for line in _lines(gpu, seats.get(gpu.uuid, ())):
            rows.append(_row(gpu, line, snapshot.t, width))
        hidden = 0 if claimed else hidden_use(gpu)
        if hidden >= HIDDEN_USE:
            rows.append(_hidden_row(gpu, hidden, width))
    if not rows:
        return []
    head = f" # {right('pid', 8)}  {left('user', _USER)} {right('memory', 9)}  process"
    return [(Span(head, "title"),), *rows]


def _lines(gpu: Gpu, seats: Sequence[Seat]) -> list[_Line]:
    """Return lines, the largest first; a rank whose pid the driver does not list has its own."""
    by_pid = {seat.rank.pid: seat for seat in seats}
    lines = [_Line(p.memory or 0, by_pid.pop(p.pid, None), p) for p in gpu.processes]
    if by_pid:  # in a container: what cannot be anyone else's is a rank that is listed already
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
        return Span(head, ""), Span(words, "warn")
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
