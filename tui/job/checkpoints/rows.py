"""The rows of the checkpoints screen. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tui.text.checkpoint_text import NEXT, age, number, yes_no
from tui.text.format import MISSING, Row, Span, bar, cut, left, right, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.run.checkpoint_list import Listed

# Columns between the size and the health: heading, columns, text. Dropped from the right where
# there is no room.
_MORE: Final[tuple[tuple[str, int, Callable[[Listed], str]], ...]] = (
    ("layout", 7, lambda checkpoint: checkpoint.layout or MISSING),
    ("ranks", 5, lambda checkpoint: number(checkpoint.world_size)),
    ("EMA", 3, lambda checkpoint: yes_no(checkpoint.ema)),
    (
        "written",
        16,
        lambda checkpoint: time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.time)),
    ),
)
_AGE: Final = 7
_SIZE: Final = 8
_GAP: Final = "  "
_LEAST_HEALTH: Final = 20
_MOST_HEALTH: Final = 36  # the rest is shown below, of the highlighted one


def checkpoint_rows(listed: Sequence[Listed], width: int, now: float) -> list[Row]:
    """Return a heading, and a row for each checkpoint.

    Args:
        listed: In the order of the rows.
        width: Columns.
        now: In Unix seconds.
    """
    names = max(10, *(len(checkpoint.name) for checkpoint in listed))
    room = width - len(NEXT) - 1 - names - _AGE - _SIZE - 3 * len(_GAP)
    longest = max(len(checkpoint.health) for checkpoint in listed)
    needed = min(_MOST_HEALTH, max(_LEAST_HEALTH, longest))
    more = list(_MORE)
    while more and room - sum(columns + len(_GAP) for _, columns, _ in more) < needed:
        more.pop()
    room -= sum(columns + len(_GAP) for _, columns, _ in more)
    heading = [left("checkpoint", names), right("age", _AGE), right("size", _SIZE)]
    heading += [left(name, columns) for name, columns, _ in more]
    rows: list[Row] = [(Span("  " + _GAP.join([*heading, "health"]), "dim"),)]
    for checkpoint in listed:
        facts = [right(age(now - checkpoint.time), _AGE), right(size(checkpoint.bytes), _SIZE)]
        facts += [left(text(checkpoint), columns) for _, columns, text in more]
        role = "dim" if checkpoint.set_aside else ""
        rows.append(
            (
                Span(f"{NEXT} " if checkpoint.next else "  ", "good"),
                Span(left(checkpoint.name, names), role or "strong"),
                Span(_GAP + _GAP.join(facts) + _GAP, role),
                Span(cut(checkpoint.health, max(1, room)), _role(checkpoint)),
            )
        )
    return rows


def _role(checkpoint: Listed) -> str:
    if checkpoint.damage and checkpoint.set_aside != "damaged":
        return "bad"
    if checkpoint.verified:
        return "good"
    return "dim" if checkpoint.set_aside else ""


def progress_row(words: str, done: int, total: int, count: str, width: int) -> Row:
    """Show progress, such as `reading step-20 ━━━╸┄┄┄ 1.2 GiB of 4.0 GiB`."""
    if not total:
        return (Span(f"{words} …", "accent"),)
    room = width - len(words) - len(count) - 2
    return (
        Span(words + " ", "accent"),
        *bar(done / total, max(0, min(60, room))),
        Span(" " + count, "strong"),
    )
