"""Every key of every screen, pressed where it is shown: it reaches its action, and breaks nothing.

What each action does is tested where the action is; here nothing must stand in a key's way.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from tests.support.tui.pilot import rest
from tests.support.tui.scenes import SCENES, opened, show
from tui.app.app import FsdpTui
from tui.keys.keymap import known_bindings

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from textual.dom import DOMNode
    from textual.pilot import Pilot

SIZE: Final = (120, 40)
# A slash is typed into the form's fields, and looks for one elsewhere; F1 closes help by way of the
# action that opens it.
OTHERWISE: Final = {("NewJobScreen", "slash"), ("HelpScreen", "f1")}
ENDS: Final = (
    "app.quit_app",
    "app.suspend_process",
)  # what leaves the dashboard, pressed elsewhere


STEERING: Final = ("jobs.start_job", "jobs.stop_job", "jobs.save_now", "jobs.sample_now")


class Pressed(NamedTuple):
    """A key, the first time that it was met on such a widget or screen."""

    scene: str
    node: str
    key: str
    id: str | None
    action: str
    reached: tuple[str, ...]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def pressed(root: Path) -> list[Pressed]:
    """All of them, with the actions that ran in place of the real ones."""
    return asyncio.run(_press_all(root))


async def _press_all(root: Path) -> list[Pressed]:
    done: dict[tuple[str, str], Pressed] = {}
    known = known_bindings()
    for jobs in (True, False):
        folder = root / str(jobs)
        folder.mkdir()
        async with opened(folder, SIZE, jobs=jobs) as pilot:
            for scene in SCENES:
                if scene.jobs is jobs:
                    await show(pilot, scene)
                    await _press(pilot, scene.name, known, done)
                    await pilot.press(*scene.leave)
                    await _back(pilot)
    return list(done.values())


async def _back(pilot: Pilot[None]) -> None:
    """To the dashboard, whatever is open."""
    app = pilot.app
    assert isinstance(app, FsdpTui)
    while app.screen is not app.dashboard:
        await app.pop_screen()


async def _press(
    pilot: Pilot[None],
    scene: str,
    known: Container[str | None],
    done: dict[tuple[str, str], Pressed],
) -> None:
    reached: list[str] = []

    async def record(action: Any, default_namespace: DOMNode | None = None, *more: Any) -> bool:
        reached.append(f"{type(default_namespace).__name__}.{action}")
        return True

    screen = pilot.app.screen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilot.app, "run_action", record)
        for focused in (screen.focused, *screen.focus_chain):
            if focused is not screen.focused:
                screen.set_focus(focused)
            for key, (node, binding, enabled, _) in list(screen.active_bindings.items()):
                where = type(node).__name__
                ours = enabled and binding.id in known
                if ours and (where, key) not in done:
                    reached.clear()
                    await pilot.press(key)
                    done[where, key] = Pressed(
                        scene, where, key, binding.id, f"{where}.{binding.action}", tuple(reached)
                    )


@pytest.mark.slow
def test_every_key_reaches_its_action(pressed: list[Pressed]) -> None:
    wrong = [one for one in pressed if one.reached != (one.action,)]
    assert {(one.node, one.key) for one in wrong} <= OTHERWISE, wrong


@pytest.mark.slow
def test_every_binding_was_pressed(pressed: list[Pressed]) -> None:
    # Textual's own binding opens the palette.
    assert set(known_bindings()) - {one.id for one in pressed} <= {"app.command_palette"}


def test_the_keys_of_a_job_mean_nothing_else_anywhere() -> None:
    """Whoever presses x on any screen stops a job, or does nothing; and so with the others."""
    known = known_bindings()
    meant = {key: one.id for one in map(known.get, STEERING) for key in one.keys}  # type: ignore[union-attr]
    assert {*meant} == {*"sxmp"}
    others = {(key, one.id) for one in known.values() for key in one.keys if key in meant}
    assert others - set(meant.items()) == {
        ("s", "checkpoints.resume")  # starts the job too, from the chosen checkpoint
    }
    for name in STEERING:
        assert {"DashboardScreen", "JobScreen", "LogScreen"} < known[name].places
        assert {"PlotsScreen", "SampleScreen"} < known[name].places


@pytest.mark.slow
@pytest.mark.usefixtures("forked")  # some keys start the engine's tools
async def test_every_key_leaves_the_dashboard_alive(root: Path, pressed: list[Pressed]) -> None:
    """Really pressed, in any state that the keys before it have left; what fails ends the app.

    One key of each action: that all of them reach it is seen above.
    """
    folder = root / "alive"
    folder.mkdir()
    first = {(one.node, one.action): one for one in reversed(pressed)}
    async with opened(folder, SIZE) as pilot:
        app = pilot.app
        assert isinstance(app, FsdpTui)
        for scene in SCENES:
            keys = [
                one
                for one in pressed
                if one.scene == scene.name
                and one.id not in ENDS
                and first[one.node, one.action] is one
            ]
            for one in keys:
                if app.screen is app.dashboard:
                    await pilot.press(*(key for key in scene.keys if isinstance(key, str)))
                    await rest(app)
                begun = app.screen
                met = begun.active_bindings.get(one.key)
                if met is not None and met.binding.id in ENDS:
                    continue  # the keys before it have closed what it was met on
                await pilot.press(one.key)
                while app.screen is not begun and app.screen is not app.dashboard:
                    await app.pop_screen()
            await _back(pilot)
        assert app.is_running
