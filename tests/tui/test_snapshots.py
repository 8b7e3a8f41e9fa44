"""Every screen at two sizes, dark and light, against the pictures in `__snapshots__`.

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

from tests.support.scenes import SCENES, Scene, leave, opened, show
from tui.themes import DARK, LIGHT

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

THEMES: Final = (DARK.name, LIGHT.name)
NAMED: Final = re.compile(r"server-[a-z0-9_]{1,8}")
SIZES: Final = {"80x24": (80, 24), "120x40": (120, 40)}


class Album:
    """The pictures, by size, theme and scene, and which kinds of screen they show."""

    def __init__(self) -> None:
        self.pictures: dict[tuple[str, str, str], str] = {}
        self.screens: set[type[Screen[Any]]] = set()


@pytest.fixture(scope="module")
def album() -> Album:
    """All of them: opening one screen after another takes far less time than an app for each."""
    taken = Album()
    for name in SIZES:
        for jobs in (True, False):
            # Of the same length wherever the tests run: what has no room is cut off.
            root = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
            try:
                asyncio.run(_take_all(root, name, jobs, taken))
            finally:
                shutil.rmtree(root)
            for key, picture in taken.pictures.items():  # the name may be cut off
                taken.pictures[key] = NAMED.sub("server-0", picture)
    return taken


async def _take_all(root: Path, name: str, jobs: bool, taken: Album) -> None:
    async with opened(root, SIZES[name], jobs=jobs) as pilot:
        for theme in THEMES:
            pilot.app.theme = theme
            for scene in SCENES:
                if scene.jobs is jobs:
                    await show(pilot, scene)
                    picture = pilot.app.export_screenshot(title="fsdp-tui")
                    taken.pictures[name, theme, scene.name] = normalize_svg(picture)
                    taken.screens.add(type(pilot.app.screen))
                    await leave(pilot, scene)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_screen_looks_as_it_did(
    album: Album, snapshot: SnapshotAssertion, scene: Scene, size: str, theme: str
) -> None:
    picture = album.pictures[size, theme, scene.name]
    assert picture == snapshot.use_extension(SVGImageExtension)


def test_every_screen_has_its_picture(album: Album) -> None:
    ours = {kind for kind in _kinds(Screen) if kind.__module__.startswith("tui.")}
    assert not ours - album.screens


def _kinds(of: type[Any]) -> set[type[Any]]:
    return {one for kind in of.__subclasses__() for one in (kind, *_kinds(kind))}
