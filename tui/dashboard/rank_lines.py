"""The lines about ranks: one beside its device, or a table of a whole job. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.run.rundir import PHASES
from tui.look.snapshot import LATE_AFTER, is_late
from tui.text.format import Row, Span, bar, duration, gib, left, load_role, ranges, right, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.machine.devices import Gpu
    from jobs.run.rundir import RankStatus
    from tui.look.snapshot import JobView

_STILL: Final = 60.0  # seconds without progress that are worth a word


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
    """`#12 demo r0  training  step 130  ━━┄┄ 1.2 GiB  beat ok`."""
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
    """`#12 demo r0  training  step 130  beat ok`: whose rank it is, and what it does."""
    return (*_who(seat, width), *_where_in_work(seat, width), heartbeat(seat.rank, now))


def heartbeat(rank: RankStatus, now: float) -> Span:
    """Return the age of the heartbeat; calm while it is fresh, so that nothing is repainted."""
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
        furthest: The step of the rank that is furthest.
        now: Unix seconds.
    """
    beat = heartbeat(rank, now)
    if beat.role != "good":
        return beat
    # One step apart is what a look in the middle of a step sees.
    if (behind := furthest - rank.step) > 1:
        return Span(f"! {behind} steps behind", "bad")
    if (still := now - rank.progressed) > _STILL:
        return Span(f"stalled {duration(still)}", "warn")
    return Span("ok", "good")


def rank_title(view: JobView, now: float) -> str:
    """`ranks of #12 demo · 8 of 8 · late: 3,5`."""
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
    """Phase and step; a phase that has no steps may use the room of both."""
    rank = seat.rank
    phase = PHASES.get(rank.phase, rank.phase)
    words, numbers = (17, 12) if width >= 100 else (11, 11)
    if not rank.step:
        return (Span(left(phase, words + numbers) + " "),)
    return (Span(f"{left(phase, words)} {left(f'step {rank.step}', numbers)}"),)
