"""The whole main job by keyboard alone: real processes train a toy while the dashboard is used."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from textual.command import CommandPalette
from textual.events import Paste
from textual.widgets import Select

from jobs.machine.processes import with_run_id
from jobs.run.eventlog import EventLog
from tests.support.jobs.held_ranks import HeldRanks, has_done_more_than
from tests.support.tui.pilot import driven, shown_by
from tests.support.waiting import attempts
from tui.app.app import FsdpTui
from tui.form.screen import NewJobScreen
from tui.job.screen import JobScreen
from tui.job.tabs import TABS
from tui.log.screen import LogScreen
from tui.plots.screen import PlotsScreen
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from textual.pilot import Pilot

    from jobs.queue.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TRAINED = 400.0  # seconds; a slow machine under load, not an expectation
STEPS = 60  # many more than are trained between the first one and the stop
# The keys of what is typed, where they are not called as they are written.
_KEYS = {" ": "space", "_": "underscore", ".": "full_stop", "-": "minus", "/": "slash"}
# What each tab of the job screen shows of a job that was stopped once and has completed.
ON_TAB = {
    "overview": "completed",
    "ranks": "60",
    "logs": "rank 0",
    "plots": "loss",
    "samples": "a red circle",
    "checkpoints": "step-60",
    "config": "max_train_steps",
    "history": "attempt",
}


@pytest.fixture(autouse=True)
def _nothing_goes_on(store: Store, no_gpus: None) -> Iterator[None]:
    """A machine without GPUs; whatever was started ends with the test."""
    yield
    for job in store.all():
        for process in with_run_id(job.run_id):
            process.signal(signal.SIGKILL)


class Person:
    """Reads the screen and presses keys; knows nothing else."""

    def __init__(self, app: FsdpTui, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def screen(self) -> str:
        return shown_by(self.app)

    async def until(self, true: Callable[[], object], what: str = "it") -> None:
        for _ in attempts(true, TRAINED, told=lambda: f"{what}:\n{self.screen}"):
            await self.pilot.pause(0.05)

    async def sees(self, *texts: str) -> None:
        for text in texts:
            await self.until(lambda text=text: text in self.screen, f"“{text}”")

    async def is_on(self, kind: type[Any]) -> None:
        await self.until(lambda: isinstance(self.app.screen, kind), kind.__name__)

    async def is_home(self) -> None:
        await self.until(lambda: self.app.screen is self.app.dashboard, "the dashboard")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def write(self, text: str) -> None:
        """Write over what is in the field."""
        await self.press("end", "ctrl+u", *(_KEYS.get(char, char) for char in text))

    async def paste(self, text: str) -> None:
        """Write over what is in the field, all at once."""
        await self.press("end", "ctrl+u")
        self.app.post_message(Paste(text))
        await self.pilot.pause()

    async def find(self, field: str) -> None:
        """Go to a field of the form by its key."""
        await self.press("ctrl+f")
        await self.is_on(CommandPalette)
        await self.paste(field)
        await self.sees(f"{field} ")
        await self.press("enter")
        await self.is_on(NewJobScreen)
        await self.until(lambda: self.has_focus(f"field-{field}"), field)

    def has_focus(self, name: str) -> bool:
        return self.app.focused is not None and self.app.focused.id == name


async def test_a_model_is_trained_by_keys_alone(
    store: Store, toy: Path, monkeypatch: pytest.MonkeyPatch, forked: str
) -> None:
    monkeypatch.chdir(toy)
    app = FsdpTui(store)
    async with driven(app, (120, 40)) as pilot:
        me = Person(app, pilot)
        await me.sees("No jobs yet")
        await describe(me)
        held = HeldRanks(store, has_done_more_than(0), TRAINED)
        await me.press("ctrl+r")
        await me.is_home()
        await watch(me, store)
        await stop_and_resume(me, store, held)
        await look_through(me)
        await remove(me, store)
        await me.press("q")
        await me.until(lambda: app._exit, "the end")


async def describe(me: Person) -> None:
    """Fill the form in."""
    await me.press("n")
    await me.is_on(NewJobScreen)
    await me.until(lambda: me.has_focus("field-name"), "the first field")
    await me.write("walk")
    await me.press("down", "down", "enter")
    await me.until(lambda: me.app.screen.query_one("#field-model_family", Select).expanded)
    await me.press("down", "up", "enter")  # to the next family and back to FLUX.1
    await me.press("down", "down")
    for part, found in (("mo", "model/"), ("da", "data/")):
        await me.write(part)
        await me.sees(found)  # proposed, in grey
        await me.press("tab")
        await me.until(lambda found=found: me.app.focused.value == found, found)  # type: ignore[union-attr, misc]
        await me.press("down")
    await me.sees("✓ FLUX.1 model", "! no usable image in data")
    await me.press("down")  # past several datasets
    assert me.has_focus("field-max_train_steps")
    await me.find("resolution")
    await me.paste("64")
    await me.sees("✓ 24 images")
    await me.find("max_train_steps")
    await me.paste("many")
    await me.sees("! ")
    await me.press("ctrl+r")
    await me.is_on(NewJobScreen)
    await me.until(lambda: me.has_focus("field-max_train_steps"), "what is wrong")
    await me.write(str(STEPS))
    for field, text in {
        "num_processes": "2",
        "validation_prompts": "a red circle",
        "validation_num_inference_steps": "2",
        "max_sequence_length": "16",
    }.items():
        await me.find(field)
        await me.paste(text)
    await me.find("mixed_precision")
    await me.press("n")  # by its first letter
    await me.find("device")
    await me.press("left")  # from auto round to cpu


async def watch(me: Person, store: Store) -> None:
    """While it starts: its log, a search, its ranks; then the first step."""
    await me.sees("walk", "● running")
    await me.press("l")
    await me.is_on(LogScreen)
    await me.sees("DTensors over 2 ranks")
    await me.press("slash", *"dtensors", "enter")
    await me.sees("“dtensors” 1 of 1")
    await me.press("q")
    await me.is_home()
    await me.press("R")
    await me.sees("ranks of #1 walk · 2")
    await me.press("R")
    await me.sees("devices")
    (job,) = store.all()
    log = EventLog(job.run_dir.events)

    def trains() -> bool:
        log.poll()
        assert not store.get(job.id).state.ended, store.get(job.id).reason
        return log.last is not None

    await me.until(trains, "the first step")


async def stop_and_resume(me: Person, store: Store, held: HeldRanks) -> None:
    """Stopped with a checkpoint, it goes on after it while its curves are seen, and completes."""
    await me.until(held.are_suspended, "suspended ranks")
    (job,) = store.all()
    await me.press("x", "x")
    await me.until((job.run_dir.control / "stop").exists, "the request")
    held.let_go()
    await me.sees("■ stopped")
    (step,) = (step for step, _ in job.run_dir.complete_checkpoints())
    assert 0 < step < STEPS, "stopped on the way"
    await me.sees(f"{step}/{STEPS}")
    held = HeldRanks(store, has_done_more_than(step), TRAINED)
    await me.press("s")
    await me.sees("● running")
    await me.press("v")
    await me.is_on(PlotsScreen)
    await me.sees("loss")
    await me.press("2")
    await me.sees("learning rate")
    await me.press("escape")
    await me.is_home()
    await me.until(held.are_suspended, "suspended ranks")
    held.let_go()
    await me.sees("✓ completed", f"{STEPS}/{STEPS}")
    steps = [one.step for one in EventLog(job.run_dir.events).read_all().steps]
    assert steps == list(range(1, STEPS + 1)), "none is missing or twice"


async def look_through(me: Person) -> None:
    """Every tab of the job screen."""
    await me.press("enter")
    await me.is_on(JobScreen)
    for number, tab in enumerate(TABS, 1):
        await me.press(str(number))
        await me.sees(f" {number} {tab.title} ", ON_TAB[tab.name])
    await me.press("escape")
    await me.is_home()


async def remove(me: Person, store: Store) -> None:
    """Gone, with its files, after a question that was first answered with no."""
    (job,) = store.all()
    await me.press("r")
    await me.is_on(ConfirmScreen)
    await me.sees("Remove job 1")
    await me.press("n")
    await me.is_home()
    assert store.all() == [job]
    await me.press("r")
    await me.is_on(ConfirmScreen)
    await me.press("y")
    await me.sees("No jobs yet")
    assert store.all() == []
    await me.until(lambda: not job.run_dir.root.exists(), "no run directory")
