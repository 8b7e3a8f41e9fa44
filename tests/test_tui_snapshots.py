"""Every screen at two sizes, dark and light, against the pictures in `__snapshots__`.

`pytest tests/test_tui_snapshots.py --snapshot-update` renews them; look at what changed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pytest_textual_snapshot import SVGImageExtension, normalize_svg
from tui_scenes import SCENES, Clock, Scene, make_up, nobody_starts

from jobs.store import Store
from tui.app import FsdpTui
from tui.themes import DARK, LIGHT

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion
    from textual.pilot import Pilot

THEMES: Final = (DARK.name, LIGHT.name)
SIZES: Final = {"80x24": (80, 24), "120x40": (120, 40)}
STILL: Final = 0.25  # seconds without change; what threads bring has come by then
WITHIN: Final = 30.0  # seconds; a slow machine under load, not an expectation

Pictures = dict[tuple[str, str, str], str]


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    """All of them: opening one screen after another takes far less time than an app for each."""
    taken: Pictures = {}
    for name, size in SIZES.items():
        # Of the same length wherever the tests run: what has no room is cut off.
        root = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
        try:
            with pytest.MonkeyPatch.context() as patch:
                asyncio.run(_take_all(root, name, size, taken, patch))
        finally:
            shutil.rmtree(root)
        for key, picture in taken.items():
            taken[key] = picture.replace(root.name, "server-0")
    time.tzset()
    return taken


async def _take_all(
    root: Path, name: str, size: tuple[int, int], taken: Pictures, patch: pytest.MonkeyPatch
) -> None:
    state = root / "state"
    state.mkdir(mode=0o700)
    patch.setenv("FSDP_TUI_HOST", "gpu-server")
    patch.setenv("FSDP_TUI_HOME", str(state))
    patch.setenv("FSDP_TUI_PICTURES", "blocks")
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        patch.setenv(variable, str(root / variable[4:9].lower()))
    for variable in ("NO_COLOR", "TMUX", "SSH_CONNECTION", "SSH_TTY"):
        patch.delenv(variable, raising=False)
    clock = Clock()
    patch.setattr("time.time", clock)
    store = Store(state)
    cards = make_up(store, root / "data", clock)
    nobody_starts(patch, cards)
    patch.setattr("textual.widgets.Input.cursor_blink", False)
    app = FsdpTui(store, select=3)
    async with app.run_test(size=size) as pilot:
        await _until(pilot, lambda: app.dashboard.snapshot.t > 0)
        await pilot.pause(3.0)  # the curve is drawn anew after two seconds at the earliest
        for theme in THEMES:
            app.theme = theme
            for scene in SCENES:
                await pilot.press(*scene.keys)
                taken[name, theme, scene.name] = await _still(pilot, scene)
                await pilot.press(*scene.leave)
                await _until(pilot, lambda: app.screen is app.dashboard)


async def _still(pilot: Pilot[Any], scene: Scene) -> str:
    """The picture, once the screen stands still."""
    last, deadline = None, time.monotonic() + WITHIN
    while pilot.app.screen.has_class("-looking") or last != (last := _sight(pilot)):
        assert time.monotonic() < deadline, f"{scene.name} does not stand still"
        await pilot.pause(STILL)
    return normalize_svg(pilot.app.export_screenshot(title="fsdp-tui"))


def _sight(pilot: Pilot[Any]) -> list[Any]:
    """What is shown, for comparison; a picture takes a tenth of a second to make."""
    lines = pilot.app.screen._compositor.render_strips()
    return [list(strip) for strip in lines]


async def _until(pilot: Pilot[Any], true: Any) -> None:
    deadline = time.monotonic() + WITHIN
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        await pilot.pause(0.02)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_screen_looks_as_it_did(
    pictures: Pictures, snapshot: SnapshotAssertion, scene: Scene, size: str, theme: str
) -> None:
    assert pictures[size, theme, scene.name] == snapshot.use_extension(SVGImageExtension)
