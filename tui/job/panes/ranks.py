"""The ranks tab: what each rank does, holds, and when it was heard of last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.message import Message
from textual.widgets import Static

from tui.job.panes.rank_rows import about_rank, late_words, rank_rows
from tui.keys.key_table import Key, bindings_of, moving
from tui.text.format import Span
from tui.widgets.pane import Pane
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.run.rundir import RankStatus
    from tui.look.job_look import Look
    from tui.text.format import Row


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
    """A table of the ranks, and more about the highlighted one."""

    KEYS: ClassVar = (
        *moving("rank"),
        Key("open_log", "enter,l", "enter", "its log", "Show the log of the selected rank"),
        Key("copy_pid", "y", "y", "copy pid", "Copy the pid of the selected rank"),
    )
    BINDINGS: ClassVar = bindings_of("ranks", KEYS)

    @dataclass
    class LogWanted(Message):
        """Someone wants to read the log of a rank."""

        rank: int

    def __init__(self) -> None:
        super().__init__(id="ranks")
        self.list = RankList()
        self._texts = {"rank-late": "", "rank-about": ""}

    def compose(self) -> ComposeResult:
        yield Static("", id="rank-late", markup=False)
        yield self.list
        yield Static("", id="rank-about", markup=False)

    def update_from(self, look: Look) -> None:
        self.list.update_from(look)
        late = late_words(look.view.ranks, look.t) if look.job.state.active else ""
        self._put("rank-late", f"! {late}" if late else "")
        self.query_one("#rank-late").display = bool(late)
        self._show_about()

    @on(RankList.Highlighted)
    def _show_about(self) -> None:
        rank = self.list.highlighted
        words = about_rank(rank, self.list.ended, self.list.now) if rank is not None else ""
        self._put("rank-about", words)

    def _put(self, name: str, text: str) -> None:
        """Change a text; one that stays the same is not sent to the terminal again."""
        if self._texts[name] != text:
            self._texts[name] = text
            self.query_one(f"#{name}", Static).update(text)

    def action_go(self, by: int) -> None:
        self.list.go(by)

    def action_open_log(self) -> None:
        if (rank := self.list.highlighted) is not None:
            self.post_message(self.LogWanted(rank.rank))

    def action_copy_pid(self) -> None:
        if (rank := self.list.highlighted) is not None:
            self.copy(str(rank.pid))
