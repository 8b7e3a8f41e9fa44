"""Every screen of the dashboard with the keys that open it, on a made-up server.

For snapshot tests and for `screenshots/make.py`.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
from textual._context import visible_screen_stack
from textual.command import CommandPalette

from jobs.memory.fit import Verdict
from jobs.queue.store import Store
from tests.support.tui.made_up_fleet import make_up_fleet
from tests.support.tui.made_up_runs import look_every
from tests.support.tui.made_up_server import (
    Clock,
    idle_gpus,
    look_back,
    make_up,
    make_up_sweep,
    nobody_starts,
)
from tests.support.tui.pilot import driven, rest, until
from tui.app.app import FsdpTui
from tui.form.beside import FitBars

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from textual.app import App
    from textual.pilot import Pilot
    from textual.strip import Strip

_HOUR: Final = 3600.0
RUNNING: Final = 3  # the job that is selected
_UNSET: Final = ("NO_COLOR", "TMUX", "SSH_CONNECTION", "SSH_TTY")
_HOMES: Final = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")


@dataclass(frozen=True)
class Scene:
    """A screen.

    Attributes:
        name: Of its pictures.
        keys: What opens it from the dashboard; a function must be true before the next key.
        leave: What closes it again.
        jobs: Whether the server has any.
    """

    name: str
    keys: tuple[str | Callable[[FsdpTui], object], ...] = ()
    leave: tuple[str, ...] = ("escape",)
    jobs: bool = True


def sees(text: str) -> Callable[[FsdpTui], bool]:
    """Whether this stands on the screen."""

    def seen(app: FsdpTui) -> bool:
        return any(text in "".join(segment.text for segment in line) for line in _strips(app))

    return seen


def _strips(app: App[Any]) -> list[Strip]:
    """The lines of the screen. What shines through a question is remembered, once it is drawn."""
    visible_screen_stack.set(app._background_screens)
    return app.screen._compositor.render_strips()


def has_left_palette(app: FsdpTui) -> bool:
    return not isinstance(app.screen, CommandPalette)


def does_not_fit(app: FsdpTui) -> bool:
    """Whether the form knows that its job is too large."""
    found = app.screen.query_one(FitBars).prediction
    return found is not None and getattr(found.worst, "verdict", None) is Verdict.TOO_LARGE


def has_curves(app: FsdpTui) -> bool:
    """Whether a curve is on the screen; the thread that reads what is plotted may begin late."""
    text = "".join(segment.text for line in _strips(app) for segment in line)
    return any("\u2801" <= sign <= "\u28ff" for sign in text)


def stopped_twice(app: FsdpTui) -> bool:
    """The job that runs was asked to stop, and got SIGTERM; the dashboard has seen it."""
    if app.store.get(RUNNING).stop_level < 2:
        app.store.raise_stop_level(RUNNING, 2)
    app.collector.wake()
    view = app.dashboard.selected
    return view is not None and view.job.stop_level >= 2


def has_sweep(app: FsdpTui) -> bool:
    """Whether the dashboard shows a sweep; the first look queues one."""
    if not app.store.sweeps():
        make_up_sweep(app.store)
    app.collector.wake()
    return sees("★ lr")(app)


_NEW: Final = ("n", sees("8 running"))  # drawn before something lies over it
_COPY: Final = ("D", sees("8 running"))
_FIND_BATCH: Final = (
    *("ctrl+f", *"train_batch_size", sees("train_batch_size ")),
    *("enter", has_left_palette),
)
_FIND_FAILED: Final = ("slash", *"large", sees("1 of"), "enter")
_SAVE_TEMPLATE: Final = ("ctrl+t", *"save as", sees("Save as"), "enter", has_left_palette)

SCENES: Final = (
    Scene("dashboard", (), ()),
    Scene("ranks", ("R",), ("R",)),
    Scene("log", ("l",)),
    Scene("log-search", ("l", "slash", *"WARN", "enter"), ("escape", "escape")),
    Scene("log-filter", ("l", "ampersand", *"WARN", "enter"), ("escape", "escape")),
    Scene("log-go-to", ("l", "colon"), ("escape", "escape")),
    Scene("plots", ("v", has_curves)),
    Scene("plots-all", ("v", has_curves, "a")),
    Scene("plots-compare", ("v", has_curves, "c"), ("escape", "escape")),
    Scene("job-overview", ("i", "1")),
    Scene("job-ranks", ("i", "2")),
    Scene("job-logs", ("i", "3")),
    Scene("job-plots", ("i", "4", has_curves)),
    Scene("job-samples", ("i", "5")),
    Scene("job-sample", ("i", "5", "enter"), ("escape", "escape")),
    Scene("job-sample-compare", ("i", "5", "enter", "v"), ("escape", "escape")),
    Scene("job-checkpoints", ("i", "6")),
    Scene("job-config", ("i", "7")),
    Scene("job-compare", ("i", "7", "o"), ("escape", "escape")),
    Scene("job-diff", ("i", "7", "o", sees("flux-night-run"), "G", "enter")),
    Scene("job-history", ("i", "8")),
    Scene("new-job", ("n",)),
    Scene("job-copy", ("D",)),
    Scene("job-copy-fsdp", ("D", "alt+2")),
    Scene("job-copy-command", ("D", "f3")),
    Scene("detect", (*_COPY, "f2"), ("escape", "escape")),
    Scene("fields", (*_COPY, "ctrl+f", *"lora"), ("escape", "escape")),
    Scene("templates", (*_NEW, "ctrl+t"), ("escape", "escape")),
    Scene("ask-path", (*_COPY, "ctrl+s"), ("escape", "escape")),
    Scene("ask-jobs", (*_COPY, "f8", *"2, "), ("escape", "escape")),
    Scene("ask-template", (*_COPY, *_SAVE_TEMPLATE), ("escape", "escape")),
    Scene("leave-question", (*_NEW, "x", "escape"), ("y",)),
    Scene(
        "too-large-question",
        (
            *(*_COPY, *_FIND_BATCH, "end", "ctrl+u", *"64", does_not_fit),
            *("ctrl+r", sees("queue it anyway")),
        ),
        ("n", "escape", "y"),
    ),
    Scene("edit-question", ("e",)),
    Scene("data", ("d",)),
    Scene("gpus", ("u",)),
    Scene("fleet", ("F",)),
    Scene("caches", ("C",)),
    Scene("help", ("question_mark",)),
    Scene("palette", ("ctrl+p", *"check")),
    Scene("themes", ("ctrl+p", *"theme", sees("Choose a theme"))),
    Scene("jobs-filter", ("slash", *"flux"), ("escape", "g")),
    Scene("job-failure", (*_FIND_FAILED, "i", sees("would fit")), ("escape", "escape", "g")),
    Scene("remove-question", ("G", "r"), ("n", "g")),
    Scene("stop", ("x", sees("Stop job")), ("n",)),
    Scene("stop-question", (stopped_twice, "x", sees("Kill job"))),
    Scene("sweep", (has_sweep, "g"), ()),
    Scene("no-jobs", (), (), jobs=False),
    Scene("no-jobs-new", ("n",), jobs=False),
)


@asynccontextmanager
async def opened(
    root: Path,
    size: tuple[int, int],
    *,
    jobs: bool = True,
    host: str = "gpu-server",
    machines: int = 4,
) -> AsyncIterator[Pilot[None]]:
    """The dashboard of a made-up server, with all of its panels filled.

    Args:
        root: An empty directory.
        size: Columns and lines.
        jobs: Whether there are any.
        host: What the machine is called.
        machines: How many others there are.
    """
    state = root / "state"
    state.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_TUI_HOST", host)
        patch.setenv("FSDP_TUI_HOME", str(state))
        patch.setenv("FSDP_TUI_PICTURES", "blocks")
        for variable in _HOMES:
            patch.setenv(variable, str(root / variable[4:9].lower()))
        for variable in _UNSET:
            patch.delenv(variable, raising=False)
        patch.chdir(root)
        patch.setattr("time.time", clock := Clock())
        patch.setattr("textual.widgets.Input.cursor_blink", False)
        store = Store(state)
        cards = make_up(store, root / "data", clock) if jobs else idle_gpus()
        clock.pace = 0.0
        nobody_starts(patch, cards)
        make_up_fleet(patch, machines)
        look_every(patch, _HOUR)  # nothing changes; what is opened is looked at once
        app = FsdpTui(store, select=RUNNING if jobs else None)
        look_back(app.collector._history, cards.gpus, clock.now)
        async with running(app, size) as pilot:
            yield pilot
    time.tzset()


@asynccontextmanager
async def running(app: FsdpTui, size: tuple[int, int]) -> AsyncIterator[Pilot[None]]:
    """The app, once all of its panels have something to show."""
    async with driven(app, size) as pilot:
        await until(pilot, lambda: app.dashboard.snapshot.t > 0)
        await rest(app)
        yield pilot


async def show(pilot: Pilot[None], scene: Scene) -> None:
    """Open a scene, and wait until nothing on it will change any more."""
    app = pilot.app
    assert isinstance(app, FsdpTui)
    for key in scene.keys:
        if isinstance(key, str):
            await pilot.press(key)
            await rest(app)
        else:
            await until(pilot, lambda true=key: true(app))  # type: ignore[misc]
    await rest(app)


async def leave(pilot: Pilot[None], scene: Scene) -> None:
    """Back to the dashboard."""
    app = pilot.app
    assert isinstance(app, FsdpTui)
    for key in scene.leave:
        await pilot.press(key)
        await rest(app)
    await until(pilot, lambda: app.screen is app.dashboard)
