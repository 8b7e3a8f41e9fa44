"""What `tui.widgets.lines` paints again when something changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import App

from tests.support.tui.pilot import until
from tui.text.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.strip import Strip


class _Counted(Lines):
    """Remembers which lines were asked for."""

    DEFAULT_CSS = "_Counted { border: round white; padding: 0 1; height: 8; }"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def render_line(self, y: int) -> Strip:
        self.asked.append(y)
        return super().render_line(y)


class _Panels(App[None]):
    def compose(self) -> ComposeResult:
        yield _Counted()


def _lines_of(app: App[None]) -> list[str]:
    return [
        "".join(segment.text for segment in strip)
        for strip in app.screen._compositor.render_strips()
    ]


async def test_a_new_title_repaints_the_border_alone() -> None:
    app = _Panels()
    async with app.run_test(size=(40, 12)) as pilot:
        panel = app.query_one(_Counted)
        panel.show([(Span(f"row {n}"),) for n in range(6)])
        panel.show_titles("before", "below")
        await until(pilot, lambda: panel.asked)
        await pilot.pause()
        panel.asked.clear()
        panel.show_titles("after", "beneath")
        await pilot.pause()
        top, *rows, bottom = _lines_of(app)[:8]
        assert "after" in top
        assert "beneath" in bottom
        assert all(f"row {n}" in row for n, row in enumerate(rows))
        assert panel.asked == []
        panel.show([(Span("other"),), *panel.rows[1:]])
        await until(pilot, lambda: panel.asked == [0])
