"""The history tab: attempts, restarts, stops, and what happened in the run."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, ClassVar, Final

from jobs.queue.states import State
from tui.job.panes.text_pane import TextPane, clock, day
from tui.keys.key_table import Key, bindings_of, scrolling
from tui.text.format import Span
from tui.widgets.job_rows import GLYPHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Change
    from jobs.run.timeline import Moment
    from tui.look.job_look import Look
    from tui.text.format import Row


# -- history rows ---------------------------------------------------------------------------
# The rows of the history: state changes and run events by time. Pure.


_WHAT: Final = 14  # columns
_SIGNS: Final = {"error": ("! error", "bad"), "warning": ("! warning", "warn")}


def history_rows(
    history: Sequence[Change], moments: Sequence[Moment], width: int, *, states_only: bool = False
) -> list[Row]:
    """List events, the oldest first, each day under its date.

    Args:
        history: The job's states.
        moments: The run's events.
        width: Columns.
        states_only: Omit the run's events.
    """
    entries = [(change.t, 0, _state(change, number)) for change, number in _attempts(history)]
    if not states_only:
        entries += [(moment.t, 1, _moment(moment)) for moment in moments]
    entries.sort(key=lambda entry: entry[:2])
    rows: list[Row] = []
    date = ""
    for t, _, (what, role, words) in entries:
        if (today := day(t)) != date:
            date = today
            rows += [(), (Span(today, "title"),)] if rows else [(Span(today, "title"),)]
        room = max(20, width - 10 - _WHAT)
        first, *rest = _wrap(words, room)
        rows.append(
            (Span(f"{clock(t)}  ", "dim"), Span(what.ljust(_WHAT), role), Span(first, _tone(role)))
        )
        rows += [(Span(" " * (10 + _WHAT)), Span(line, _tone(role))) for line in rest]
    return rows


def _attempts(history: Sequence[Change]) -> list[tuple[Change, int]]:
    """Pair each change with the attempt that it starts; 0 for other changes."""
    numbered, number = [], 0
    for change in history:
        begins = change.after is State.STARTING
        number += begins
        numbered.append((change, number if begins else 0))
    return numbered


def _state(change: Change, attempt: int) -> tuple[str, str, str]:
    glyph, role = GLYPHS[change.after]
    words = change.reason or str(change.after)
    return f"{glyph} {change.after}", role, f"attempt {attempt}: {words}" if attempt else words


def _moment(moment: Moment) -> tuple[str, str, str]:
    what, role = _SIGNS.get(moment.kind, (f"  {moment.kind}", "dim"))
    return what, role, moment.words


def _tone(role: str) -> str:
    return role if role in ("bad", "warn") else ""


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False) or [""]


# -- history --------------------------------------------------------------------------------


class HistoryPane(TextPane):
    """Opens at its end, and follows it unless the user scrolls back."""

    KEYS: ClassVar = (
        *scrolling(),
        Key("toggle_events", "e", "e", "events", "Show or hide events of the run"),
        Key("copy_all", "y", "y", "copy", "Copy the full history as text"),
    )
    BINDINGS: ClassVar = bindings_of("history", KEYS)

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.states_only = False
        self._made: tuple[object, ...] = ()
        self._rows: list[Row] = []

    def rows_of(self, look: Look, width: int) -> Sequence[Row]:
        key = (look.history, look.moments, width, self.states_only)
        if key != self._made:
            self._made = key
            self._rows = history_rows(
                look.history, look.moments, width, states_only=self.states_only
            ) or [(Span("no events yet", "dim"),)]
        return self._rows

    def fill(self) -> None:
        follows = self.lines.scroll_offset.y >= self.lines.max_scroll_y
        before = len(self.lines.rows)
        super().fill()
        if follows and len(self.lines.rows) != before:
            # The size is known only after the layout.
            self.call_after_refresh(self.lines.scroll_end, animate=False)

    def action_toggle_events(self) -> None:
        self.states_only = not self.states_only
        self.fill()

    def action_copy_all(self) -> None:
        self.copy(self.as_text())
