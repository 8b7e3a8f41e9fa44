"""Every screen at two sizes, and some in light, against `__snapshots__`.

Colors come from the theme wherever they are used, so light is seen on one screen of each kind.

`pytest tests/tui/test_snapshots.py --snapshot-update` renews them; look at what changed.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pytest_textual_snapshot import SVGImageExtension, normalize_svg
from textual.screen import Screen

from tests.support.tui.pilot import rest
from tests.support.tui.scenes import SCENES, Scene, leave, opened, show
from tui.app.themes import DARK, LIGHT

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

NAMED: Final = re.compile(r"server-[a-z0-9_]{1,8}")
SIZES: Final = {"80x24": (80, 24), "120x40": (120, 40)}
FIRST: Final = ("120x40", DARK.name)  # what a plain `pytest` takes
# Tables and bars, a search, curves, images, a diff, a form, a question.
LIT: Final = (
    *("dashboard", "log-search", "plots-compare", "job-samples", "job-diff"),
    *("job-copy-fsdp", "stop-question"),
)


class Album:
    """The pictures of one size, by theme and scene, and which kinds of screen they show."""

    def __init__(self) -> None:
        self.pictures: dict[tuple[str, str], str] = {}
        self.screens: set[type[Screen[Any]]] = set()


class Albums:
    """An album for each size, made when it is asked for.

    Opening one screen after another takes far less time than an app for each.
    """

    def __init__(self, themes: dict[str, list[str]]) -> None:
        """
        Args:
            themes: Those in which pictures will be asked for, by size.
        """
        self._themes = themes
        self._made: dict[str, Album] = {}

    def of(self, size: str) -> Album:
        if size not in self._made:
            self._made[size] = _take_both(size, self._themes[size])
        return self._made[size]


@pytest.fixture(scope="module")
def albums(request: pytest.FixtureRequest) -> Albums:
    wanted: dict[str, list[str]] = {FIRST[0]: [FIRST[1]]}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            chosen = getattr(item, "callspec", None)
            if chosen is not None:
                themes = wanted.setdefault(chosen.params["size"], [])
                if chosen.params["theme"] not in themes:
                    themes.append(chosen.params["theme"])
    return Albums(wanted)


def _take_both(size: str, themes: list[str]) -> Album:
    """Of a server with jobs, and of one without."""
    taken = Album()
    for jobs in (True, False):
        # Of the same length wherever the tests run: what has no room is cut off.
        root = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
        try:
            asyncio.run(_take_all(root, size, themes, jobs, taken))
        finally:
            shutil.rmtree(root)
    return taken


async def _take_all(root: Path, size: str, themes: list[str], jobs: bool, taken: Album) -> None:
    async with opened(root, SIZES[size], jobs=jobs) as pilot:
        for scene in (one for one in SCENES if one.jobs is jobs):
            shown_in = [theme for theme in themes if theme == DARK.name or scene.name in LIT]
            for theme in shown_in:
                pilot.app.theme = theme
                if theme == shown_in[0]:
                    await show(pilot, scene)
                await rest(pilot.app)
                picture = normalize_svg(pilot.app.export_screenshot(title="fsdp-tui"))
                taken.pictures[theme, scene.name] = NAMED.sub("server-0", picture)
                taken.screens.add(type(pilot.app.screen))
                if theme == shown_in[-1]:
                    await leave(pilot, scene)


def _looks() -> list[Any]:
    """Scenes with sizes and themes: all but the first look is slow."""
    looks = (FIRST, ("80x24", DARK.name), ("80x24", LIGHT.name))
    return [
        pytest.param(
            scene,
            size,
            theme,
            id=f"{scene.name}-{size}-{theme}",
            marks=() if (size, theme) == FIRST else pytest.mark.slow,
        )
        for size, theme in looks
        for scene in SCENES
        if theme == DARK.name or scene.name in LIT
    ]


@pytest.mark.parametrize(("scene", "size", "theme"), _looks())
def test_a_screen_looks_as_it_did(
    albums: Albums, snapshot: SnapshotAssertion, scene: Scene, size: str, theme: str
) -> None:
    picture = albums.of(size).pictures[theme, scene.name]
    assert picture == snapshot.use_extension(SVGImageExtension)


def test_every_screen_has_its_picture(albums: Albums) -> None:
    kinds = {kind for kind in _kinds(Screen) if kind.__module__.startswith("tui.")}
    ours = {kind for kind in kinds if not kind.__subclasses__()}  # the rest are bases of these
    assert not ours - albums.of(FIRST[0]).screens


def _kinds(of: type[Any]) -> set[type[Any]]:
    return {one for kind in of.__subclasses__() for one in (kind, *_kinds(kind))}
