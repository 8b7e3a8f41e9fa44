"""The ranks tab: each rank's activity, memory and heartbeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.message import Message
from textual.widgets import Static

from jobs.run.rundir import PHASES
from tui.keys.key_table import Key, bindings_of, moving
from tui.look.snapshot import is_late
from tui.text.format import MISSING, Span, duration, left, right, size
from tui.widgets.bars import show
from tui.widgets.lines import PickList
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult

    from jobs.run.rundir import RankStatus
    from tui.look.job_look import Look
    from tui.text.format import Row


# -- rank rows ------------------------------------------------------------------------------
# The table of ranks. Pure.


_GAP: Final = "  "
_MOST_NAMED: Final = 6
_CALM: Final = 3.0  # seconds of heartbeat age below which nothing is repainted
_STILL: Final = 30.0  # seconds without progress that are worth mentioning

# Heading, columns, text; the rightmost are dropped first if they do not fit.
_MORE: Final[tuple[tuple[str, int, Callable[[RankStatus], str]], ...]] = (
    ("allocated", 9, lambda rank: size(rank.allocated)),
    ("peak", 9, lambda rank: size(rank.peak)),
    ("reserved", 9, lambda rank: size(rank.reserved)),
    ("resident", 9, lambda rank: size(rank.rss)),
    ("pid", 8, lambda rank: str(rank.pid)),
    ("device", 10, lambda rank: rank.device),
    ("host", 16, lambda rank: rank.host),
)
_CPU_MORE: Final = (_MORE[3], *_MORE[4:])  # torch measures no memory on a CPU


def late_words(ranks: Sequence[RankStatus], now: float) -> str:
    """Name the late ranks in a sentence; "" if there are none."""
    late = [rank for rank in ranks if is_late(rank, now)]
    if not late:
        return ""
    names = ", ".join(str(rank.rank) for rank in late[:_MOST_NAMED])
    names += f" and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    longest = duration(max(now - rank.heartbeat for rank in late))
    if len(late) == 1:
        return f"rank {names} is late: no heartbeat for {longest}; the others are waiting for it"
    return f"ranks {names} are late: no heartbeat for {longest}"


def rank_rows(ranks: Sequence[RankStatus], ended: bool, now: float, width: int) -> list[Row]:
    """Return a heading, and a row for each rank.

    Args:
        ranks: By number.
        ended: Whether the job has ended, so that no heartbeat is expected.
        now: Unix seconds.
        width: Columns.
    """
    numbers = max(4, *(len(str(rank.rank)) for rank in ranks))
    phases = max(8, *(len(_phase(rank)) for rank in ranks))
    more = list(_CPU_MORE if all(rank.allocated is None for rank in ranks) else _MORE)
    fixed = numbers + phases + 8 + 12 + 3 * len(_GAP)
    phases -= max(0, fixed - width)
    while more and fixed + sum(columns + len(_GAP) for _, columns, _ in more) > width:
        more.pop()
    heads = [right("rank", numbers), left("phase", phases), right("step", 8), left("heartbeat", 12)]
    heads += [right(name, columns) for name, columns, _ in more]
    rows: list[Row] = [(Span(_GAP.join(heads), "dim"),)]
    for rank in ranks:
        facts = [right(text(rank), columns) for _, columns, text in more]
        beat, role = ("ended", "dim") if ended else heartbeat(rank, now)
        rows.append(
            (
                Span(right(str(rank.rank), numbers) + _GAP, "strong"),
                Span(left(_phase(rank), phases) + _GAP),
                Span(right(str(rank.step) if rank.step else MISSING, 8) + _GAP),
                Span(left(beat, 12), role),
                *((Span(_GAP + _GAP.join(facts)),) if facts else ()),
            )
        )
    return rows


def heartbeat(rank: RankStatus, now: float) -> tuple[str, str]:
    """Show the heartbeat's age, in a color that is calm while it is fresh."""
    age = now - rank.heartbeat
    if is_late(rank, now):
        return f"! late {duration(age)}", "bad"
    if now - rank.progressed > _STILL:
        return f"still {duration(now - rank.progressed)}", "warn"
    return ("ok", "good") if age < _CALM else (f"{age:.0f} s ago", "warn")


def about_rank(rank: RankStatus, ended: bool, now: float) -> str:
    """Describe one rank in a few lines."""
    uuid = f" ({rank.device_uuid})" if rank.device_uuid else ""
    where = f"rank {rank.rank} · pid {rank.pid} on {rank.host} · {rank.device}{uuid}"
    sizes = [
        f"{name} {size(value)}"
        for name, value in (
            ("allocated", rank.allocated),
            ("reserved", rank.reserved),
            ("peak", rank.peak),
            ("resident", rank.rss),
        )
        if value is not None
    ]
    lines = [where, " · ".join(sizes)]
    if rank.peaks:
        each = " · ".join(f"{name} {size(value)}" for name, value in rank.peaks.items())
        lines.append(f"peak per phase: {each}")
    if not ended:
        lines.append(
            f"heartbeat {_ago(now - rank.heartbeat)}, progress {_ago(now - rank.progressed)}"
        )
    return "\n".join(line for line in lines if line)


def _ago(seconds: float) -> str:
    """Return an age in coarse units, so that it rarely changes."""
    return "just now" if seconds < _CALM else f"{duration(seconds)} ago"


def _phase(rank: RankStatus) -> str:
    words = PHASES.get(rank.phase, rank.phase)
    return f"{words} {rank.done}" if rank.done is not None else words


# -- ranks ----------------------------------------------------------------------------------


class RankList(PickList):
    """The ranks, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="rank-list")
        self.ranks: Sequence[RankStatus] = ()
        self.ended = False
        self.now = 0.0

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def highlighted(self) -> RankStatus | None:
        return self.ranks[self.index] if self.ranks else None

    def update_from(self, look: Look) -> None:
        self.ranks, self.ended, self.now = look.view.ranks, look.job.state.ended, look.t
        self.index = max(0, min(self.index, len(self.ranks) - 1))
        self.fill()

    def table(self, width: int) -> Sequence[Row]:
        return rank_rows(self.ranks, self.ended, self.now, width)

    def nothing(self) -> Sequence[Row]:
        return [(Span("no rank has reported yet", "dim"),)]


class RanksPane(Pane):
    """A table of the ranks, and details of the highlighted one."""

    KEYS: ClassVar = (
        *moving("rank"),
        Key("open_log", "enter,l", "enter", "its log", "Show the log of the selected rank"),
        Key("copy_pid", "y", "y", "copy pid", "Copy the pid of the selected rank"),
    )
    BINDINGS: ClassVar = bindings_of("ranks", KEYS)

    @dataclass
    class LogWanted(Message):
        """The user wants to read the log of a rank."""

        rank: int

    def __init__(self) -> None:
        super().__init__(id="ranks")
        self.list = RankList()

    def compose(self) -> ComposeResult:
        yield Static("", id="rank-late", markup=False)
        yield self.list
        yield Static("", id="rank-about", markup=False)

    def update_from(self, look: Look) -> None:
        self.list.update_from(look)
        late = late_words(look.view.ranks, look.t) if look.job.state.active else ""
        show(self.query_one("#rank-late", Static), f"! {late}" if late else "")
        self.query_one("#rank-late").display = bool(late)
        self._show_about()

    @on(RankList.Highlighted)
    def _show_about(self) -> None:
        rank = self.list.highlighted
        words = about_rank(rank, self.list.ended, self.list.now) if rank is not None else ""
        show(self.query_one("#rank-about", Static), words)

    def action_go(self, by: int) -> None:
        self.list.go(by)

    def action_open_log(self) -> None:
        if (rank := self.list.highlighted) is not None:
            self.post_message(self.LogWanted(rank.rank))

    def action_copy_pid(self) -> None:
        if (rank := self.list.highlighted) is not None:
            self.copy(str(rank.pid))
