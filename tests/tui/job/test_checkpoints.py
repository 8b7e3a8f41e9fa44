"""The checkpoints screen, driven by keys; what the dashboard asks before a job goes on."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from textual.geometry import Region

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled
from jobs.queue.states import State
from jobs.run.checkpoint_files import Listed, set_aside
from jobs.service.plan import plan_resume
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.driven_app import all_said, question, running, shown
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.pilot import until
from tui.form.screen import NewJobScreen
from tui.job.checkpoints import CheckpointsPane, checkpoint_rows, progress_row
from tui.text.checkpoint_text import about
from tui.text.format import plain
from tui.widgets.bars import KeyBar
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.pilot import Pilot
    from textual.widget import Widget

    from jobs.queue.store import Job, Store
    from tui.app.app import FsdpTui

SIZES = [(80, 24), (120, 40), (200, 60)]


pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.fixture
def job(store: Store, job_values: dict[str, Any]) -> Job:
    """A stopped job with checkpoints of steps 10, 20 and 30."""
    spec = load_spec(None, job_values | {"max_train_steps": 100})
    job = add_job(store, "cats", state=State.STOPPED, job_file=dump_spec(spec), total_steps=100)
    for step in (10, 20, 30):
        save_checkpoint(job.run_dir, step, spec.to_dict())
    return job


async def opened(app: FsdpTui, pilot: Pilot[None]) -> CheckpointsPane:
    """Open the tab and wait for what it finds."""
    await pilot.press("c")
    await until(pilot, lambda: app.screen.query(CheckpointsPane))
    screen = app.screen.query_one(CheckpointsPane)
    await until(pilot, lambda: screen.panel.rows or screen.has_class("-nothing"))
    return screen


def text_of(screen: CheckpointsPane, name: str) -> str:
    return str(line_of(screen, name).content)  # type: ignore[attr-defined]


def line_of(pane: CheckpointsPane, name: str) -> Widget:
    """A line of the tab; title and keys are the job screen's."""
    whose = "job" if name in ("title", "keys") else "ckpt"
    return pane.screen.query_one(f"#{whose}-{name}")


def status_of(screen: CheckpointsPane) -> str:
    return "\n".join(plain(row) for row in screen.status.rows)


def names(job: Job) -> list[str]:
    return sorted(path.name for path in job.run_dir.checkpoints.glob("step-*"))


# -- looking -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_the_list_has_room_and_marks_what_a_resume_takes(
    store: Store, job: Job, size: tuple[int, int]
) -> None:
    for step in range(40, 140):
        save_checkpoint(job.run_dir, step, {})
    set_aside(job.run_dir.checkpoint(139), "rewound")
    async with running(store, size) as (app, pilot):
        screen = await opened(app, pilot)
        assert text_of(screen, "title").startswith("job 1 cats  ■ stopped")
        assert text_of(screen, "totals").startswith("103 checkpoints, ")
        assert len(text_of(screen, "totals")) <= 78
        heading, newest, following, *_ = shown(screen.panel).splitlines()
        assert heading.split()[:3] == ["checkpoint", "age", "size"]
        assert newest.split()[0] == "step-139.rewound"
        assert newest.rstrip().endswith("set aside (rewound)")
        assert following.startswith("▸ → step-138")
        assert "a resume starts here" in text_of(screen, "about")
        whole = Region(0, 0, *size)
        for name in ("title", "totals", "about", "keys"):
            assert line_of(screen, name).region in whole
        assert screen.panel.region in whole
        assert screen.panel.region.width == size[0]
        assert screen.panel.size.height > size[1] // 2
        await pilot.press("G")
        await until(pilot, lambda: screen.panel.index == 102)
        lines = [screen.panel.render_line(y).text for y in range(screen.panel.size.height)]
        assert lines[0].split()[0] == "checkpoint", "the heading stays"
        assert any(line.startswith("▸") and "step-10" in line for line in lines)


async def test_new_ones_appear_while_the_job_runs(store: Store, job: Job) -> None:
    store.requeue(job.id, "")
    store.claim(job.id, [], "")
    store.change(job.id, State.RUNNING, "")
    async with running(store) as (app, pilot):
        screen = await opened(app, pilot)
        assert "running" in text_of(screen, "title")
        await pilot.press("j")
        await until(pilot, lambda: "▸   step-20" in shown(screen.panel))
        save_checkpoint(job.run_dir, 40)
        await until(pilot, lambda: "  → step-40" in shown(screen.panel))
        assert "▸   step-20" in shown(screen.panel), "the same one stays highlighted"
        await pilot.press("s")
        await until(pilot, lambda: "job 1 is running; stop it first" in all_said(app))
        store.change(job.id, State.STOPPED, "")
        await until(pilot, lambda: "stopped" in text_of(screen, "title"))


@pytest.mark.slow
async def test_there_may_be_nothing_to_see(store: Store, job: Job) -> None:
    shutil.rmtree(job.run_dir.checkpoints)
    async with running(store, (80, 24)) as (app, pilot):
        screen = await opened(app, pilot)
        assert text_of(screen, "problem").startswith("No checkpoints yet.")
        await pilot.press("s", "v", "e", "r", "j", "G")
        assert app.screen is screen.screen
        save_checkpoint(job.run_dir, 10)
        await until(pilot, lambda: "step-10" in shown(screen.panel))
        assert not screen.query_one("#ckpt-problem").display
        shutil.rmtree(job.run_dir.root)
        await until(
            pilot, lambda: "the run directory of the job is gone" in text_of(screen, "problem")
        )
        await pilot.press("s", "r")
        assert app.screen is screen.screen
        store.remove(job.id)
        await until(pilot, lambda: "no job 1" in text_of(screen, "problem"))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)


# -- going on ------------------------------------------------------------------------------


async def test_a_job_goes_back_after_a_question(store: Store, job: Job) -> None:
    job.run_dir.job_file.write_text(
        dump_spec(load_spec(job.run_dir.job_file, {"learning_rate": "0.0005"}))
    )
    async with running(store, (80, 24)) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("j", "j", "s")
        asked = await question(app, pilot)
        assert asked.question == "Resume job 1 “cats” after step 10?"
        for words in ("step-20", "step-30", "learning_rate: 0.0001 → 0.0005", "to step 100"):
            assert words in asked.detail
        await pilot.press("n")
        await until(pilot, lambda: app.screen is screen.screen)
        assert names(job) == ["step-10", "step-20", "step-30"]
        assert store.get(job.id).state is State.STOPPED
        await pilot.press("enter")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(
            pilot, lambda: "resumed after step 10" in all_said(app) or "job 1 is" in all_said(app)
        )
        assert names(job) == ["step-10", "step-20.rewound", "step-30.rewound"]


@pytest.mark.slow
async def test_what_cannot_be_is_told_and_nothing_is_asked(store: Store, job: Job) -> None:
    job.run_dir.job_file.write_text(dump_spec(load_spec(job.run_dir.job_file, {"lora_rank": "4"})))
    set_aside(job.run_dir.checkpoint(30), "rewound")
    async with running(store) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("s")
        await until(pilot, lambda: "cannot resume from step-20: lora_rank" in all_said(app))
        await pilot.press("k", "s")
        await until(pilot, lambda: "step-30.rewound is set aside; rename it" in all_said(app))
        assert app.screen is screen.screen


@pytest.mark.slow
async def test_the_start_key_tells_what_changes(store: Store, job: Job) -> None:
    async with running(store) as (app, pilot):
        job.run_dir.job_file.write_text(dump_spec(load_spec(job.run_dir.job_file, {"seed": "7"})))
        await pilot.press("s")
        asked = await question(app, pilot)
        assert "seed: 42 → 7" in asked.detail
        app.dashboard.post_message(app.dashboard.Planned(plan_resume(store, job.id)))
        assert len(app.screen_stack) == 2, "whoever presses the key twice is asked once"
        await pilot.press("y")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: store.get(job.id).state is State.STARTING)
        assert names(job) == ["step-10", "step-20", "step-30"]


@pytest.mark.slow
async def test_the_start_key_asks_nothing_where_nothing_changes(store: Store, job: Job) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: store.get(job.id).state is State.STARTING)
        assert app.screen is app.dashboard


@pytest.mark.slow
async def test_a_long_list_of_changes_leaves_room_for_the_answers(store: Store) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        detail = "\n".join(f"learning_rate: {n} → {n + 1}" for n in range(60))
        answers: list[bool | None] = []
        app.push_screen(ConfirmScreen("Go on?", detail, "go on", refuse="do not"), answers.append)
        screen = await question(app, pilot)
        assert screen.query_one("#yes").region in Region(0, 0, 80, 24)
        await pilot.press("j", "down")
        assert screen.query_one("#answers-detail").scroll_offset.y == 2
        await pilot.press("enter")
        await until(pilot, lambda: answers == [False])


# -- verifying -----------------------------------------------------------------------------


async def test_every_byte_is_read_when_asked(store: Store, job: Job) -> None:
    file = job.run_dir.checkpoint(20) / "__0_0.distcp"
    file.write_bytes(b"!" + file.read_bytes()[1:])
    async with running(store) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("v")
        await until(pilot, lambda: "step-30: verified" in all_said(app))
        await until(pilot, lambda: "verified" in shown(screen.panel).splitlines()[1])
        await pilot.press("j", "v")
        await until(pilot, lambda: "step-20: damaged: __0_0.distcp has changed" in all_said(app))
        await until(pilot, lambda: "damaged: __0_0" in shown(screen.panel).splitlines()[2])
        shutil.rmtree(job.run_dir.checkpoint(30))
        save_checkpoint(job.run_dir, 30)
        await until(pilot, lambda: "complete" in shown(screen.panel).splitlines()[1])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reading that stands still half way, until `go` is set."""
    state = SimpleNamespace(go=threading.Event(), ended=threading.Event(), reads=0)

    def verify(one: Listed, progress: Callable[[int], None]) -> Listed:
        state.reads += 1
        try:
            progress(one.bytes // 2)
            while not state.go.wait(0.01):
                progress(0)
        finally:
            state.ended.set()
        return one

    monkeypatch.setattr("tui.job.checkpoints.verify", verify)
    yield state
    state.go.set()


@pytest.mark.slow
async def test_reading_shows_how_far_it_is_and_can_be_given_up(
    store: Store, job: Job, slow: Any
) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("v")
        await until(pilot, lambda: "reading step-30 ━" in status_of(screen))
        assert len(status_of(screen)) <= 78
        await until(pilot, lambda: "cancel verify" in text_of(screen, "keys"))
        await pilot.press("j", "v")
        await until(pilot, slow.ended.is_set)
        await until(pilot, lambda: not screen.status.rows)
        assert slow.reads == 1
        assert "verified" not in all_said(app)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["escape", "quit"])
async def test_leaving_ends_the_reading(store: Store, job: Job, slow: Any, key: str) -> None:
    async with running(store) as (app, pilot):
        await opened(app, pilot)
        await pilot.press("v")
        await until(pilot, lambda: slow.reads)
        if key == "quit":
            app.exit()
        else:
            await pilot.press(key)
        await until(pilot, slow.ended.is_set)


# -- exporting -----------------------------------------------------------------------------


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for exporting: goes on until `go` is set, and ends as `outcome` says."""
    state = SimpleNamespace(go=threading.Event(), calls=[], outcome=None)

    def export(job: Job, step: int, *, progress: Any, cancelled: Any) -> Any:
        state.calls.append((job.id, step))
        progress(30, 100)
        while not state.go.wait(0.01):
            if cancelled():
                raise Cancelled
        if isinstance(state.outcome, Exception):
            raise state.outcome
        return SimpleNamespace(path=job.run_dir.export, warnings=("this is a warning",))

    monkeypatch.setattr("jobs.export.export_checkpoint", export)
    yield state
    state.go.set()


@pytest.mark.slow
async def test_an_export_goes_on_when_the_screen_is_closed(
    store: Store, job: Job, exporter: Any
) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("j", "e")
        await until(pilot, lambda: "exporting step-20 ━" in status_of(screen))
        assert "30%" in status_of(screen)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)
        screen = await opened(app, pilot)
        await until(pilot, lambda: "exporting step-20 ━" in status_of(screen))
        exporter.go.set()
        await until(pilot, lambda: "step 20 of job 1 exported to " in all_said(app))
        assert "this is a warning" in all_said(app)
        await until(pilot, lambda: not screen.status.rows)
        assert exporter.calls == [(1, 20)]


@pytest.mark.slow
async def test_an_export_is_given_up_by_the_same_key(store: Store, job: Job, exporter: Any) -> None:
    async with running(store) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("e")
        await until(pilot, lambda: "cancel export" in text_of(screen, "keys"))
        await pilot.press("e")
        await until(pilot, lambda: "the export of step 30 of job 1 was cancelled" in all_said(app))
        assert len(exporter.calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (UserError("the disk is full"), "step 30 of job 1 cannot be exported: the disk is full"),
        (OSError("gone"), "the export of step 30 of job 1 failed: OSError: gone"),
    ],
)
async def test_an_export_that_fails_is_told(
    store: Store, job: Job, exporter: Any, outcome: Exception, text: str
) -> None:
    exporter.outcome = outcome
    exporter.go.set()
    async with running(store) as (app, pilot):
        await opened(app, pilot)
        await pilot.press("e")
        await until(pilot, lambda: text in all_said(app))
        assert not app.dashboard.exports.running


@pytest.mark.slow
async def test_quitting_gives_an_export_up(store: Store, job: Job, exporter: Any) -> None:
    async with running(store) as (app, pilot):
        await opened(app, pilot)
        await pilot.press("e")
        await until(pilot, lambda: exporter.calls)
        exports = app.dashboard.exports
        app.exit()
        await until(pilot, lambda: not exports.running)


# -- deleting ------------------------------------------------------------------------------


async def test_one_is_deleted_after_a_question(store: Store, job: Job) -> None:
    async with running(store) as (app, pilot):
        screen = await opened(app, pilot)
        await pilot.press("j", "r")
        asked = await question(app, pilot)
        assert asked.question == "Delete step-20?"
        await pilot.press("n")
        await until(pilot, lambda: app.screen is screen.screen)
        assert len(names(job)) == 3
        await pilot.press("r")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: "step-20" not in shown(screen.panel))
        assert names(job) == ["step-10", "step-30"]
        assert "▸   step-10" in shown(screen.panel), "the next one takes its place"


@pytest.mark.slow
async def test_one_that_is_gone_already_is_told(store: Store, job: Job) -> None:
    async with running(store) as (app, pilot):
        await opened(app, pilot)
        await pilot.press("r")
        await question(app, pilot)
        shutil.rmtree(job.run_dir.checkpoint(30))
        await pilot.press("y")
        await until(pilot, lambda: "job 1 has no checkpoint step-30" in all_said(app))


@pytest.mark.slow
async def test_a_queued_job_keeps_its_newest(store: Store, job: Job) -> None:
    store.pause(True)
    store.requeue(job.id, "")
    async with running(store) as (app, pilot):
        await opened(app, pilot)
        await pilot.press("r")
        assert "A resume would start from this checkpoint" in (await question(app, pilot)).detail
        await pilot.press("y")
        await until(pilot, lambda: "is its newest complete checkpoint" in all_said(app))
        assert len(names(job)) == 3


# -- elsewhere -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_form_tells_what_beginning_from_another_job_changes(
    store: Store, job: Job
) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("D")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen) and app.screen.is_mounted)
        form = app.screen
        assert isinstance(form, NewJobScreen)
        await until(pilot, lambda: form.focused is not None)
        form.fields.put({"resume_from_checkpoint": "1:20", "seed": 7})
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "the result changes: seed: 42 → 7" in all_said(app))
        assert len(store.all()) == 2


# -- sampling ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_key_asks_for_samples(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with running(store, (120, 40)) as (app, pilot):
        assert "sample" in str(app.dashboard.query_one(KeyBar).content)
        await pilot.press("p")
        await until(pilot, lambda: job.run_dir.requested("sample_now"))
        await until(pilot, lambda: "job 1 samples its prompts at the next step" in all_said(app))


@pytest.mark.slow
async def test_a_job_that_does_not_run_samples_nothing(store: Store, job: Job) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        assert "sample" not in str(app.dashboard.query_one(KeyBar).content)
        await pilot.press("p")
        await until(pilot, lambda: "cannot sample now" in all_said(app))


# -- rows ----------------------------------------------------------------------------------


def listed(step: int, path: Path, **facts: Any) -> Listed:
    return Listed(f"step-{step}", step, path, 3 << 30, 1_700_000_000, **facts)


@pytest.mark.parametrize("width", range(54, 200, 7))
def test_rows_fit_and_their_columns_stand_below_each_other(tmp_path: Path, width: int) -> None:
    damage = "model-00001-of-00003.safetensors has changed since it was written"
    many = [
        listed(10, tmp_path, layout="sharded", world_size=8, ema=True),
        listed(2_000_000, tmp_path, damage=damage),
        listed(30, tmp_path, layout="full", world_size=1, verified=True, next=True),
    ]
    heading, *rows = (plain(row) for row in checkpoint_rows(many, width, 1_700_000_000 + 7200))
    assert all(len(row) <= width for row in rows)
    place = heading.index("health")
    assert [row[place:].split(":")[0] for row in rows][::2] == ["complete", "verified"]
    assert rows[1][place:].startswith("damaged")
    assert [row[place - 2 : place] for row in rows] == ["  "] * 3
    assert rows[2].startswith("→ ")
    assert ("layout" in heading) is (width >= 82)
    assert ("written" in heading) is (width >= 105)


def test_how_far_something_is_fits_its_line() -> None:
    row = plain(progress_row("reading step-20", 1, 4, "1.0 GiB of 4.0 GiB", 60))
    assert row.startswith("reading step-20 ━")
    assert row.endswith(" 1.0 GiB of 4.0 GiB")
    assert len(row) == 60
    assert plain(progress_row("exporting step-20", 0, 0, "", 60)) == "exporting step-20 …"


def test_what_is_known_of_one_is_said_in_three_lines(tmp_path: Path) -> None:
    many = [listed(step, tmp_path, layout="full", world_size=1, ema=True) for step in (10, 20)]
    facts, what, path = about(many[0], many).splitlines()
    assert "by 1 rank · full tensors · with EMA" in facts
    assert what == "complete; resuming here sets aside step-20"
    assert path == str(tmp_path)
