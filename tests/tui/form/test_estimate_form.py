"""The form says whether its job fits, and asks before it queues one that does not."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from jobs.backends.slurm.commands import Partition
from jobs.machine.gpu import Gpu, GpuProcess
from jobs.memory import question
from jobs.memory.fit import Fit, Room
from tests.support.jobs.fake_memory import GIB
from tests.support.tui.made_up_runs import nothing_starts
from tests.support.tui.pilot import until
from tests.support.waiting import PATIENCE
from tui.app.app import FsdpTui
from tui.form import beside as form_fit
from tui.form.beside import FitBars, bar_lines, look
from tui.form.checks import Looks
from tui.form.screen import NewJobScreen
from tui.form.submission import Submission
from tui.look.snapshot import Snapshot
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from textual.pilot import Pilot

    from jobs.queue.store import Store

HUB_ID = "black-forest-labs/FLUX.1-dev"
VALUES = {
    "name": "cats",
    "pretrained_model_name_or_path": HUB_ID,
    "dataset": "pictures",
    "gpus": [0, 1],
    "strategy": "fsdp2",
}


def some_gpus() -> list[Gpu]:
    ann = GpuProcess(7, 30 * GIB, user="ann", command="python x.py")
    return [
        Gpu(
            n,
            f"GPU-{n:04}",
            "H100",
            80 * GIB,
            30 * GIB if n == 2 else GIB,
            processes=(ann,) if n == 2 else (),
        )
        for n in range(4)
    ]


@pytest.fixture(autouse=True)
def _fake_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_starts(monkeypatch)
    monkeypatch.setattr("jobs.machine.devices.gpus", some_gpus)
    monkeypatch.setattr(form_fit, "_SETTLES_IN", 0.02)
    monkeypatch.setattr("tui.form.draft.check_path", lambda *_: (True, ""))


@asynccontextmanager
async def form(
    store: Store, values: dict[str, Any], size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[FsdpTui, Pilot[None], FitBars]]:
    app = FsdpTui(store)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.dashboard.snapshot.t > 0)
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen) and app.screen.is_running)
        screen = app.screen
        assert isinstance(screen, NewJobScreen)
        screen.fill(values)
        yield app, pilot, screen.query_one(FitBars)


def text(bars: FitBars) -> str:
    return str(bars.content) if bars.has_class("-shown") else ""


async def test_bars_follow_the_options_and_say_it_in_words(store: Store) -> None:
    values = VALUES | {"gpus": [0, 1, 2], "gradient_checkpointing": True}
    async with form(store, values) as (app, pilot, bars):
        await until(pilot, lambda: "GPU 0,1" in text(bars))
        await until(pilot, lambda: "→" in text(bars))
        first, second, pace, faster = text(bars).splitlines()
        assert first.endswith("GiB spare")
        assert second.startswith("GPU 2 ")
        assert "▒" in second
        assert "s a step (computed), mostly matrix products" in pace
        assert faster.startswith("→ strategy: ddp")
        assert faster.endswith("s a step"), "it loses nothing"
        strategy = app.screen.query_one("#field-strategy")
        strategy.value = "auto"  # type: ignore[attr-defined]
        row = app.screen.query_one("#row-strategy .note")
        await until(pilot, lambda: str(row.content) == "→ ddp")  # type: ignore[attr-defined]
        assert "faster" not in text(bars)
        strategy.value = "fsdp2"  # type: ignore[attr-defined]
        app.screen.query_one("#field-train_batch_size").value = "32"
        await until(pilot, lambda: "does not fit by" in text(bars))
        # Half of that batch would help, and not be enough.
        await until(pilot, lambda: "train_batch_size: 8, gradient_acc" in text(bars))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_no_line_is_wider_than_its_box(store: Store, size: tuple[int, int]) -> None:
    async with form(store, VALUES | {"train_batch_size": 3}, size) as (_, pilot, bars):
        await until(pilot, lambda: "does not fit" in text(bars))
        lines = text(bars).splitlines()
        assert len(lines[0]) <= bars.content_size.width
        assert "gradient_checkpointing: true" in lines[-1]


@pytest.mark.slow
async def test_what_does_not_fit_is_asked_once_and_can_be_queued(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    queued: list[Any] = []
    go_on = threading.Event()

    def slow(*args: Any) -> form_fit.Look:
        assert go_on.wait(PATIENCE)
        return look(*args)

    def doubt(name: str, values: Any) -> str:
        return "2 of 3 images have no caption" if name == "dataset" else ""

    monkeypatch.setattr(Submission, "_submit", lambda self, purpose, job, swept: queued.append(job))
    monkeypatch.setattr(form_fit, "look", slow)
    monkeypatch.setattr("tui.form.draft.doubt_of", doubt)
    values = VALUES | {"train_batch_size": 3, "dataset": str(tmp_path)}
    async with form(store, values) as (app, pilot, bars):
        await pilot.press("ctrl+r")
        told = app.screen.query_one("#field-help")
        await until(pilot, lambda: "^r again queues" in str(told.content))  # type: ignore[attr-defined]
        assert not queued, "it waits until the memory is known"
        go_on.set()
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "does not fit" in text(bars)
        assert "Checking" not in str(told.content)  # type: ignore[attr-defined]
        detail = str(app.screen.query_one("#detail").content)  # type: ignore[attr-defined]
        assert "gradient_checkpointing: true" in detail
        assert "2 of 3 images have no caption" in detail
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        assert queued == []
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: queued)


async def test_who_types_on_waits_no_longer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[Any] = []
    go_on = threading.Event()

    def slow(*args: Any) -> form_fit.Look:
        assert go_on.wait(PATIENCE)
        return look(*args)

    monkeypatch.setattr(Submission, "_submit", lambda self, purpose, job, swept: queued.append(job))
    monkeypatch.setattr(form_fit, "look", slow)
    async with form(store, VALUES | {"gradient_checkpointing": True}) as (app, pilot, bars):
        app.screen.query_one("#field-name").focus()
        told = app.screen.query_one("#field-help")
        await until(pilot, lambda: "name: " in str(told.content))  # type: ignore[attr-defined]
        explained = str(told.content)  # type: ignore[attr-defined]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "Checking" in str(told.content))  # type: ignore[attr-defined]
        await pilot.press("2")
        go_on.set()
        await until(pilot, lambda: str(told.content) == explained)  # type: ignore[attr-defined]
        await until(pilot, lambda: "spare" in text(bars))
        assert queued == []


async def test_an_answer_that_comes_late_leaves_what_is_said_by_then(store: Store) -> None:
    async with form(store, VALUES) as (app, pilot, _):
        screen = app.screen
        assert isinstance(screen, NewJobScreen)
        late = Looks.Absent({"name": "other"}, {}, "")
        screen.tell("something newer")
        screen.submission.gate.ask_to_fetch(late)
        await pilot.pause()
        assert screen.said_below == "something newer"


async def test_what_fits_is_queued_without_a_question(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(Submission, "_submit", lambda self, purpose, job, swept: queued.append(job))
    async with form(store, VALUES | {"gradient_checkpointing": True}) as (_, pilot, bars):
        await until(pilot, lambda: "spare" in text(bars))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: queued)


@pytest.mark.slow
async def test_without_a_model_nothing_is_asked_and_nothing_shown(store: Store) -> None:
    async with form(store, VALUES) as (app, pilot, bars):
        await until(pilot, lambda: text(bars))
        app.screen.query_one("#field-pretrained_model_name_or_path").value = "/no/such/model"
        await until(pilot, lambda: not text(bars))
    question._shared.pop().close()
    assert look({}, Snapshot(0.0)).bars == ()
    assert question._shared == []


def test_a_job_on_the_cpu_is_held_against_host_memory() -> None:
    values = {**VALUES, "device": "cpu", "gpus": None, "num_processes": 2}
    found = look(values, Snapshot(0.0, gpus=tuple(some_gpus())))
    ((name, fit),) = found.bars
    assert (name, fit.low) == ("host", 4 * GIB)


def test_a_slurm_job_is_held_against_the_gpus_of_its_partition() -> None:
    values = VALUES | {"launcher": "slurm", "gpus": None, "num_processes": 2}
    here = Snapshot(0.0, gpus=tuple(some_gpus()))
    there = (Partition("small", gpus=("l4",)), Partition("gpu", default=True, gpus=("h200",)))
    found = look(values, here, partitions=there)
    ((name, fit),) = found.bars
    assert (name, fit.room) == ("any 2 GPUs", Room("h200", 143_771 << 20, kind="h200"))
    assert found.remark == "GPUs of partition gpu: h200"
    ((_, fit),) = look(values | {"slurm_partition": "small"}, here, partitions=there).bars
    assert fit.room.name == "l4"
    silent = look(values, Snapshot(0.0))
    assert silent.bars[0][1].room.name == "80 GB"
    assert silent.remark == (
        "the GPUs of the partition are unknown; held against GPUs of 80 GB each"
    )


def test_what_cannot_be_predicted_is_told() -> None:
    values = VALUES | {"name": "whole", "strategy": "ddp"}
    gpus = Snapshot(0.0, gpus=tuple(some_gpus()))
    assert look(values, gpus).bars
    assert look(VALUES | {"name": "refuse"}, gpus).remark == ""  # beside the fields, if anywhere
    found = look(VALUES | {"name": "crash", "resolution": 512}, gpus)
    assert found.remark.startswith("memory: python -m engine.memory failed: out of luck")


@pytest.mark.parametrize(
    ("low", "high", "held", "words"),
    [
        (10, 20, 0, "fits, 60.0 GiB spare"),
        (70, 90, 0, "tight: up to 10.0 GiB over"),
        (90, 95, 0, "does not fit by 10.0 GiB"),
        (60, 70, 30, "does not fit by 10.0 GiB"),
        (500, 900, 79, "does not fit by 499 GiB"),
    ],
)
def test_a_bar_has_its_length_whatever_is_needed(
    low: int, high: int, held: int, words: str
) -> None:
    fit = Fit(low * GIB, high * GIB, Room("GPU 0", 80 * GIB, held * GIB))
    (line,) = bar_lines([("GPU 0", fit)], 120)
    assert line.plain.endswith(words)
    assert sum(line.plain.count(cell) for cell in "━╍┄▒") == 40
    assert ("▒" in line.plain) == (held > 0)
