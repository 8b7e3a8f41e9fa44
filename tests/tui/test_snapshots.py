"""Every screen: how it looks, and where each of its keys leads.

How it looks, at two sizes, and some in light, against `__snapshots__`. Colors come from the theme
wherever they are used, so light is seen on one screen of each kind.
`pytest tests/tui/test_snapshots.py --snapshot-update` renews them; look at what changed.

Every key is pressed where it is shown: it reaches its action, and breaks nothing. What each action
does is tested where the action is; here nothing must stand in a key's way.

To open all screens takes longer than all else, so that one walk serves both.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from pytest_textual_snapshot import SVGImageExtension, normalize_svg
from textual import actions
from textual.screen import Screen

from tests.support.tui.pilot import rest
from tests.support.tui.scenes import SCENES, Scene, leave, opened, show
from tui.app.app import FsdpTui
from tui.app.themes import DARK, LIGHT
from tui.keys.keymap import known_bindings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syrupy.assertion import SnapshotAssertion
    from textual.dom import DOMNode
    from textual.pilot import Pilot

NAMED: Final = re.compile(r"server-[a-z0-9_]{1,8}")
SIZES: Final = {"80x24": (80, 24), "120x40": (120, 40)}
FIRST: Final = ("120x40", DARK.name)  # what a plain `pytest` takes
SLOW: Final = "80x24"
# Tables and bars, a search, curves, images, a diff, a form, a question.
LIT: Final = (
    *("dashboard", "log-search", "plots-compare", "job-samples", "job-diff"),
    *("job-copy-fsdp", "stop-question"),
)
# A slash is typed into the form's fields, and looks for one elsewhere; F1 closes help by way of the
# action that opens it.
OTHERWISE: Final = {("NewJobScreen", "slash"), ("HelpScreen", "f1")}
ENDS: Final = (
    "app.quit",
    "app.quit_app",
    "app.suspend_process",
)  # what leaves the dashboard, pressed elsewhere
STEERING: Final = ("jobs.start_job", "jobs.stop_job", "jobs.save_now", "jobs.sample_now")


class Pressed(NamedTuple):
    """A key, the first time that it was met on such a widget or screen.

    At any size but the first, keys are only looked for, and reach nothing.
    """

    scene: str
    node: str
    key: str
    id: str | None
    action: str
    reached: tuple[str, ...]


class Album:
    """The pictures of one size, by theme and scene, and which kinds of screen they show.

    Its keys, by widget or screen, and key; those of the first size were pressed.
    """

    def __init__(self) -> None:
        self.pictures: dict[tuple[str, str], str] = {}
        self.screens: set[type[Screen[Any]]] = set()
        self.pressed: dict[tuple[str, str], Pressed] = {}


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
    wanted: dict[str, list[str]] = {FIRST[0]: [FIRST[1]], SLOW: [FIRST[1]]}
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
                    press = size == FIRST[0]
                    await _press(pilot, scene.name, taken.pressed, really=press)
                    if press:
                        await pilot.press(*scene.leave)
                        await _back(pilot)  # a form that was typed into asks before it closes
                        await rest(pilot.app)
                    else:
                        await leave(pilot, scene)


async def _press(
    pilot: Pilot[None], scene: str, done: dict[tuple[str, str], Pressed], *, really: bool
) -> None:
    """Press the keys that no scene before had, with a record in place of their actions.

    Args:
        pilot: On the scene.
        scene: Its name.
        done: Takes the keys.
        really: Press them; else they are only looked for.
    """
    reached: list[str] = []

    async def record(action: Any, default_namespace: DOMNode | None = None, *more: Any) -> bool:
        _, name, values = actions.parse(action) if isinstance(action, str) else action
        if default_namespace is not None and not default_namespace.check_action(name, values):
            return False  # as the real one: another widget gets the key
        reached.append(f"{type(default_namespace).__name__}.{action}")
        return True

    screen, known = pilot.app.screen, known_bindings()
    begun = screen.focused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilot.app, "run_action", record)
        for focused in (begun, *screen.focus_chain):
            if focused is not begun:
                screen.set_focus(focused)
            for key, (node, binding, enabled, _) in list(screen.active_bindings.items()):
                where = type(node).__name__
                ours = enabled and binding.id in known
                if ours and (where, key) not in done:
                    reached.clear()
                    if really:
                        await pilot.press(key)
                    done[where, key] = Pressed(
                        scene, where, key, binding.id, f"{where}.{binding.action}", tuple(reached)
                    )
        screen.set_focus(begun)
        await rest(pilot.app)


async def _back(pilot: Pilot[None]) -> None:
    """To the dashboard, whatever is open."""
    app = pilot.app
    assert isinstance(app, FsdpTui)
    while app.screen is not app.dashboard:
        await app.pop_screen()


def _looks() -> list[Any]:
    """Scenes with sizes and themes: all but the first look is slow."""
    looks = (FIRST, (SLOW, DARK.name), (SLOW, LIGHT.name))
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


@pytest.fixture(scope="module")
def pressed(albums: Albums) -> list[Pressed]:
    """All keys, with the actions that ran in place of the real ones."""
    return list(albums.of(FIRST[0]).pressed.values())


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_every_key_reaches_its_action(pressed: list[Pressed]) -> None:
    wrong = [one for one in pressed if one.reached != (one.action,)]
    assert {(one.node, one.key) for one in wrong} <= OTHERWISE, wrong


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


@pytest.fixture(scope="module")
def listed(albums: Albums) -> list[Pressed]:
    """All keys, as the album shows them whose pictures the slow tests take anyway."""
    return list(albums.of(SLOW).pressed.values())


@pytest.mark.slow
def test_a_small_terminal_has_every_key(listed: list[Pressed]) -> None:
    assert set(known_bindings()) - {one.id for one in listed} <= {"app.command_palette"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")  # some keys start the engine's tools
async def test_every_key_leaves_the_dashboard_alive(root: Path, listed: list[Pressed]) -> None:
    """Really pressed, in any state that the keys before it have left; what fails ends the app.

    One key of each action: that all of them reach it is seen above.
    """
    first = {(one.node, one.action): one for one in reversed(listed)}
    async with opened(root, SIZES[FIRST[0]]) as pilot:
        app = pilot.app
        assert isinstance(app, FsdpTui)
        for scene in SCENES:
            keys = [
                one
                for one in listed
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
