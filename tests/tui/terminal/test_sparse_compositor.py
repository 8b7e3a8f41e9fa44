"""Pictures put together from few lines are those that Textual puts together from all."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from textual._compositor import Compositor

from tests.support.tui.scenes import SCENES, leave, opened, show
from tui.terminal.sparse_compositor import SparseCompositor

if TYPE_CHECKING:
    from pathlib import Path

    from textual.screen import Screen

SHOWN = ("dashboard", "ranks", "job-overview", "job-checkpoints", "job-samples")


def pieces(
    kind: type[Compositor], screen: Screen[Any], lines: set[int]
) -> dict[int, dict[int, Any]]:
    """The pieces of these lines, by line and column."""
    compositor = screen._compositor
    found = kind._render_chops(compositor, compositor.size.region, lines.__contains__)
    return {y: dict(found[y]) for y in lines}


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((80, 24), id="80x24"),
        pytest.param((120, 40), id="120x40", marks=pytest.mark.slow),
    ],
)
async def test_few_lines_are_those_of_the_whole_picture(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    draw = random.Random(1)
    async with opened(tmp_path, size) as pilot:
        for scene in (scene for scene in SCENES if scene.name in SHOWN):
            await show(pilot, scene)
            screen = pilot.app.screen
            assert isinstance(screen._compositor, SparseCompositor)
            for count in (1, 2, 5, size[1]):
                lines = set(draw.sample(range(size[1]), count))
                wanted = pieces(Compositor, screen, lines)
                for widget in screen.walk_children():
                    widget._styles_cache.clear()  # what was rendered before is not found again
                assert pieces(SparseCompositor, screen, lines) == wanted
            await leave(pilot, scene)


async def test_lines_that_are_not_painted_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, (120, 40)) as pilot:
        screen = pilot.app.screen
        asked: list[int] = []
        for widget in {type(one) for one in screen.walk_children()}:
            whole = widget.render_lines
            monkeypatch.setattr(
                widget, "render_lines",
                lambda self, crop, whole=whole: asked.append(crop.height) or whole(self, crop),
            )  # fmt: skip
        pieces(SparseCompositor, screen, {7})
        assert asked
        assert set(asked) == {1}
