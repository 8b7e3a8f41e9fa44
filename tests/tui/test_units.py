"""Formatting, the braille plot, and the rows of panels: pure functions."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import service
from jobs.machine.devices import Gpu, Host
from jobs.queue.states import State
from jobs.run.eventlog import Phase
from jobs.service import Progress
from jobs.service.outlook import Expected, Outlook
from tests.support.tui.made_up_runs import GIB, FakeGpus, add_job, write_rank, write_steps
from tui.cli.job.watch import sentence
from tui.dashboard.device_rows import device_rows
from tui.dashboard.panels import activity_rows
from tui.form.keys import last_line
from tui.job.panes.overview import nodes_words
from tui.keys.actions import ACTIONS, footer_actions, footer_width
from tui.log.screen import log_sources, log_title
from tui.look.collector import where_of
from tui.look.snapshot import JobView, Snapshot, in_order
from tui.plots import line_chart
from tui.text import format as fmt
from tui.text.tables import job_table, when
from tui.widgets.bars import done_words
from tui.widgets.job_rows import columns, header_row, job_row, short_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Store


# -- formatting ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 B"), (640_000_000, "610 MiB"), (1.31 * GIB, "1.3 GiB")],
)
def test_size(value: float | None, text: str) -> None:
    assert fmt.size(value) == text


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("stopped", "stopped at step 5", "stopped at step 5"),
        ("stopped", "stopped: worse than the median", "stopped: worse than the median"),
        ("running", "", "running"),
        ("failed", "rank 1 vanished", "failed: rank 1 vanished"),
    ],
)
def test_a_state_is_not_said_twice(state: str, reason: str, text: str) -> None:
    assert fmt.state_text(state, reason) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.inf, "–"),
        (42, "0:42"),
        (725, "12:05"),
        (12011, "3:20:11"),
        (187_200, "2d 04h"),
    ],
)
def test_duration(value: float | None, text: str) -> None:
    assert fmt.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.41234, "0.4123"),
        (12.3456, "12.35"),
        (0.00012, "1.20e-4"),
        (math.nan, "nan"),
        (1e9, "1.00e9"),
        (-math.inf, "-inf"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert fmt.number(value) == text


@given(st.floats())
def test_a_number_always_fits_its_column(value: float) -> None:
    assert len(fmt.number(value)) <= 8


def test_ranges() -> None:
    assert fmt.ranges([3, 1, 0, 2, 6]) == "0-3,6"
    assert fmt.ranges([0, 1]) == "0,1"
    assert fmt.ranges([]) == ""


@given(st.floats(-1, 2) | st.none(), st.integers(0, 50))
def test_a_bar_is_as_wide_as_asked(fraction: float | None, width: int) -> None:
    assert len(fmt.plain(fmt.bar(fraction, width))) == width


def test_a_bar_says_how_full_it_is_without_colour() -> None:
    assert fmt.plain(fmt.bar(0.5, 8)) == "━━━━┄┄┄┄"
    assert fmt.plain(fmt.bar(0.56, 8)) == "━━━━╸┄┄┄"


# -- plot ----------------------------------------------------------------------------------


def text_of(rows: Sequence[fmt.Row]) -> list[str]:
    return [fmt.plain(row) for row in rows]


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300),
    st.integers(0, 90),
    st.integers(0, 30),
)
def test_a_chart_never_leaves_its_box(values: list[float], width: int, height: int) -> None:
    values = [v if abs(v) < 1e12 else v / 1e300 for v in values]
    rows = line_chart.chart(range(len(values)), values, width, height)
    assert len(rows) in (0, height)
    assert all(len(line) <= width for line in text_of(rows))


def test_a_falling_loss_falls() -> None:
    rows = line_chart.chart(range(1, 101), [1 - i / 100 for i in range(100)], 40, 10)
    inked = [
        [x for x, char in enumerate(fmt.plain(row[1:])) if ord(char) > 0x2800] for row in rows[:-1]
    ]
    assert inked[0]
    assert inked[-1]
    assert max(inked[0]) < min(inked[-1])


def test_the_axes_carry_numbers() -> None:
    rows = text_of(line_chart.chart([10, 20, 30], [0.2, 0.6, 0.4], 40, 9))
    labels = [row.split("┤")[0].strip() for row in rows if "┤" in row]
    assert labels == ["0.6", "0.4", "0.2"]
    assert rows[-1].split() == ["10", "20", "30"]


def test_one_point_is_drawn() -> None:
    rows = line_chart.chart([1], [0.5], 30, 6)
    assert any(span.role == "smooth" for row in rows for span in row)


def test_values_that_are_no_numbers_are_left_out() -> None:
    assert line_chart.chart([1, 2], [math.nan, math.inf], 40, 8) == ()


def test_one_spike_does_not_flatten_the_curve() -> None:
    values = [0.5 + 0.1 * math.sin(i / 9) for i in range(400)]
    values[37] = 1000.0
    smooth = line_chart.ema(values, 5)
    assert max(smooth) > 100  # what the average would do to the scale
    rows = text_of(line_chart.chart(range(400), values, 60, 12))
    assert max(float(row.split("┤")[0]) for row in rows if "┤" in row) < 2


def test_the_average_of_a_constant_is_the_constant() -> None:
    assert line_chart.ema([3.0] * 20, 7) == pytest.approx([3.0] * 20)


# -- jobs ----------------------------------------------------------------------------------


def views(store: Store) -> tuple[JobView, ...]:
    long = "a-name-that-is-far-too-long-for-any-column-of-a-table"
    add_job(store, "done", state=State.COMPLETED)
    add_job(store, long, state=State.RUNNING, total_steps=100_000)
    add_job(store, "waits", reason="waiting for job 2 to free the CPU")
    return tuple(
        JobView(job, Progress(12_345, 0.41234, 0.4213, 4242.0), where_of(job, []))
        for job in in_order(store.all())
    )


@pytest.mark.parametrize("width", [40, 58, 74, 76, 100, 116, 200])
def test_a_job_row_fits_and_aligns(store: Store, width: int) -> None:
    snapshot = Snapshot(t=0, jobs=views(store))
    shape = columns(snapshot, width)
    lines = [fmt.plain(job_row(view, shape)) for view in snapshot.jobs]
    header = fmt.plain(header_row(shape))
    assert all(len(line) <= width for line in [*lines, header])
    at = header.index("state")
    assert [line[at] for line in lines] == ["●", "◌", "✓"]


@pytest.mark.parametrize(("said", "shown"), [(None, "1/?"), (75, "1/75")])
def test_steps_that_are_not_counted_yet_are_a_question_mark(
    store: Store, said: int | None, shown: str
) -> None:
    job = add_job(store, "epochs", state=State.RUNNING, total_steps=0)
    write_steps(job, 1)
    write_rank(job, 0)
    if said:
        job.run_dir.rank_file(0).write_text(f'{{"total_steps": {said}}}')
    view = JobView(job, service.progress(job), "CPU")
    for width in (74, 116):
        row = job_row(view, columns(Snapshot(t=0, jobs=(view,)), width))
        assert shown in fmt.plain(row)
    (facts,) = service.as_dicts(store, [job], [])
    assert facts["total_steps"] == said
    assert shown in job_table([facts])
    assert f"step 1{' of 75' if said else ''}, loss" in sentence(facts)


def test_a_narrow_table_leaves_columns_out_rather_than_cutting_numbers(store: Store) -> None:
    snapshot = Snapshot(t=0, jobs=views(store))
    for width in range(40, 120):
        line = fmt.plain(job_row(snapshot.jobs[0], columns(snapshot, width)))
        assert "12345/100000" in line


def test_active_jobs_come_first_then_the_queue(store: Store) -> None:
    assert [view.job.state for view in views(store)] == [
        State.RUNNING,
        State.QUEUED,
        State.COMPLETED,
    ]


def test_where_a_job_runs(store: Store) -> None:
    gpus = FakeGpus(4).gpus
    uuids = [gpu.uuid for gpu in gpus]
    assert where_of(add_job(store, ranks=3), gpus) == "cpu×3"
    assert where_of(add_job(store, wanted=2), gpus) == "any 2"
    assert where_of(add_job(store, wanted=uuids[:2]), gpus) == "0,1"
    running = add_job(store, state=State.RUNNING, gpus=uuids[1:4])
    assert where_of(running, gpus) == "1-3"
    assert where_of(running, []) == "×3"


# -- what the selected job does ------------------------------------------------------------


def said(view: JobView, width: int = 100) -> str:
    return " ".join(text_of(activity_rows(view, width)))


def test_a_phase_shows_its_name_and_how_far_it_is(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    text = said(JobView(job, phase=Phase("encode", 132, 300)))
    assert "encoding captions" in text
    assert "132/300  44%" in text
    assert "━" in text


def test_a_phase_of_unknown_length_promises_nothing(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    text = said(JobView(job, phase=Phase("load", 0, None)))
    assert "loading weights" in text
    assert "%" not in text


def test_training_shows_steps_and_the_time_left(store: Store) -> None:
    job = add_job(store, state=State.RUNNING, total_steps=240)
    text = said(JobView(job, Progress(120, 0.4, 0.5, 60.0)))
    assert "120/240  50%" in text
    assert "1:00 left" in text


def test_what_takes_most_of_the_time_is_named_where_there_is_room(store: Store) -> None:
    job = add_job(store, state=State.RUNNING, total_steps=240)
    parts = {"train": 70.0, "sample": 270.0, "save": 4.0}
    view = JobView(job, Progress(120, 0.4, 0.5, 344.0, None, parts))
    assert "5:44 left, 4:30 of it sampling" in said(view, 120)
    assert "5:44 left" in said(view, 76)
    assert "sampling" not in said(view, 60)
    unknown = JobView(job, Progress(120, 0.4, 0.5, 66.0, None, {"train": 66.0}, ("sample",)))
    assert "≥1:06 left" in said(unknown)
    phase = Phase("sample", 2, 4, seconds_left=14.0)
    assert "0:14 left · 5:44 in all" in said(JobView(job, view.progress, phase=phase), 120)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (Expected(21.0, 200.0), "starts in 0:21 · "),
        (Expected(21.0, 200.0, at_least=True), "starts in ≥0:21 · "),
        (Expected(after=7), "after job 7 · "),
        (Expected(), ""),
        (None, ""),
    ],
)
def test_a_queued_job_says_when_it_starts(
    store: Store, expected: Expected | None, words: str
) -> None:
    view = JobView(add_job(store, reason="waiting for job 3"))
    shape = columns(Snapshot(t=0, jobs=(view,)), 120)
    assert f"{words}waiting for job 3" in fmt.plain(job_row(view, shape, "1st", expected))
    (row,) = text_of(activity_rows(view, 100, None, expected))
    assert f"{words}queued: waiting for job 3" in row


def test_a_later_stage_names_the_job_before_it_once(store: Store) -> None:
    view = JobView(add_job(store, reason="after job 3, which is running"))
    shape = columns(Snapshot(t=0, jobs=(view,)), 120)
    assert fmt.plain(job_row(view, shape, "", Expected(after=3))).count("after job 3") == 1


def test_a_job_without_a_step_is_done_when_one_like_it_would_be(store: Store) -> None:
    view = JobView(add_job(store, state=State.STARTING))
    shape = columns(Snapshot(t=0, jobs=(view,)), 120)
    assert " ≥2:00 " in fmt.plain(job_row(view, shape, "", Expected(None, 120.0, True)))


def test_the_title_says_when_all_are_done(store: Store) -> None:
    views = tuple(JobView(add_job(store, state=State.RUNNING)) for _ in range(2))
    outlook = Outlook({}, 192.0)
    assert done_words(Snapshot(t=0, jobs=views, outlook=outlook)) == "all done in 3:12"
    least = Outlook({}, 192.0, at_least=True)
    assert done_words(Snapshot(t=0, jobs=views, outlook=least)) == "all done in ≥3:12"
    assert done_words(Snapshot(t=0, jobs=views)) == ""
    assert done_words(Snapshot(t=0, jobs=views[:1], outlook=outlook)) == "", "its row says it"


def test_the_command_line_says_when(store: Store) -> None:
    facts = {"eta": None, "eta_parts": {}, "eta_at_least": False}
    facts |= {"starts_in": None, "ends_in": None, "after": None}
    assert when(facts) == ""
    running = facts | {"eta": 344.0, "eta_parts": {"train": 74.0, "sample": 270.0}}
    assert when(running) == "5:44 left, 4:30 of it sampling"
    queued = facts | {"starts_in": 21.0, "ends_in": 192.0}
    assert when(queued) == "starts in 0:21, done in 3:12"
    assert when(facts | {"after": 7}) == "after job 7"
    assert when(facts | {"ends_in": 60.0, "eta_at_least": True}) == "done in ≥1:00"


def test_a_job_that_starts_says_what_it_is_doing_all_the_while(store: Store) -> None:
    job = add_job(store, state=State.STARTING)
    assert "starting the ranks" in said(JobView(job))
    write_rank(job, 0, phase="import", step=0)
    ranks = tuple(job.run_dir.rank_statuses())
    assert "importing libraries" in said(JobView(job, phase=Phase("import"), ranks=ranks))
    waiting = JobView(job, phase=Phase("import", finished=True), ranks=ranks)
    assert "importing libraries" in said(waiting), "rank 0 is done and its status is not yet new"
    write_rank(job, 0, phase="start", step=0)
    ranks = tuple(job.run_dir.rank_statuses())
    assert "starting" in said(JobView(job, phase=Phase("import", finished=True), ranks=ranks))


def test_a_resumed_job_does_not_train_before_its_ranks_do(store: Store) -> None:
    job = add_job(store, state=State.STARTING)
    write_rank(job, 0, phase="load", step=0)
    view = JobView(job, Progress(120, 0.4, 0.5, 60.0), ranks=tuple(job.run_dir.rank_statuses()))
    assert "loading weights" in said(view)
    assert "120/200" not in said(view)


def test_a_failed_job_says_why(store: Store) -> None:
    reason = "rank 1 ran out of GPU memory at step 12 during backward: 79.1 of 79.6 GiB"
    view = JobView(add_job(store, state=State.FAILED, reason=reason))
    assert reason in said(view, 200)
    rows = text_of(activity_rows(view, 60))
    assert all(len(row) <= 60 for row in rows)
    assert "79.6 GiB" in " ".join(rows)


def test_how_the_ranks_share_the_work_is_told_where_there_is_room(store: Store) -> None:
    job = add_job(store, state=State.RUNNING, total_steps=240)
    view = JobView(
        job, Progress(120, 0.4, 0.5, 60.0), strategy="ddp", strategy_reason="a full copy fits"
    )
    assert "ddp: a full copy fits" in said(view, 116)
    assert "ddp" in said(view, 76)
    assert "full copy" not in said(view, 76)
    for width in range(40, 180):
        (row,) = text_of(activity_rows(view, width))
        assert len(row) <= width
        assert "120/240" in row


def test_a_queued_job_says_why_it_waits(store: Store) -> None:
    view = JobView(add_job(store, reason="waiting for job 3 on GPUs 0,1"))
    assert said(view).endswith("queued: waiting for job 3 on GPUs 0,1 · h: hold · K J: move")
    assert said(view, 60).endswith("queued: waiting for job 3 on GPUs 0,1")


# -- devices -------------------------------------------------------------------------------

HOST = Host(cores=8, cpu_percent=23.4, memory_total=32 * GIB, memory_used=8 * GIB)


def active_view(store: Store, **rank: object) -> JobView:
    job = add_job(store, "demo", state=State.RUNNING, gpus=rank.pop("gpus", ()))  # type: ignore[arg-type]
    for number in range(2):
        write_rank(job, number, **rank | {"device_uuid": f"GPU-{number:04}"})
    return JobView(store.get(job.id), ranks=tuple(job.run_dir.rank_statuses()))


@pytest.mark.parametrize("width", [72, 76, 96, 116, 196])
def test_device_lines_fit(store: Store, width: int) -> None:
    view = active_view(store, allocated=30 * GIB, reserved=33 * GIB, peak=36 * GIB, step=12345)
    for gpus in ((), tuple(FakeGpus(8).gpus)):
        snapshot = Snapshot(t=time.time(), jobs=(view,), gpus=gpus, host=HOST)
        for line in text_of(device_rows(snapshot, width, 20)):
            assert len(line) <= width, line


def test_a_machine_without_gpus_shows_itself_and_each_rank(store: Store) -> None:
    view = active_view(store, rss=int(1.5 * GIB), step=7)
    lines = text_of(device_rows(Snapshot(t=time.time(), jobs=(view,), host=HOST), 100, 20))
    assert len(lines) == 3
    assert "23%" in lines[0]
    assert "8.0/32.0 GiB" in lines[0]
    assert "r0" in lines[1]
    assert "step 7" in lines[1]
    assert "1.5 GiB" in lines[1]
    assert "r1" in lines[2]


@pytest.mark.parametrize(("width", "gpus"), [(80, ()), (80, FakeGpus(2).gpus), (120, ())])
def test_nodes_of_slurm_are_shown_as_their_ranks_say(
    store: Store, width: int, gpus: Sequence[Gpu]
) -> None:
    job = add_job(store, "demo", state=State.RUNNING, wanted=["slurm"])
    now = time.time()
    said = {"device": "cuda:0", "step": 7, "reserved": 33 * GIB, "gpu_memory": 80 * GIB}
    said["heartbeat"] = now
    for rank, gpu in enumerate(("NVIDIA H100", "NVIDIA L40S")):
        there = {"host": f"n{rank + 1}", "gpu": gpu, "device_uuid": f"GPU-there-{rank}"}
        write_rank(job, rank, **said | there)
    write_rank(job, 2, host="n3", step=7, rss=3 * GIB, heartbeat=now - 60)
    view = JobView(store.get(job.id), ranks=tuple(job.run_dir.rank_statuses()))
    snapshot = Snapshot(t=now, jobs=(view,), gpus=tuple(gpus), host=HOST)
    rows = text_of(device_rows(snapshot, width, 20))
    assert all(len(row) <= width for row in rows)
    *here, first, second, third = rows
    assert len(here) == max(1, len(gpus)), "this machine, once"
    assert "demo" not in "".join(here)
    assert first.split()[:2] == ["n1", "H100"]
    assert "33.0/80.0" in first
    assert "#1 demo" in first
    assert "step 7" in first
    assert "beat ok" in first
    assert second.split()[:2] == ["n2", "L40S"]
    assert third.split()[:2] == ["n3", "CPU"]
    assert "3.0" in third
    assert "32.0" not in third, "not of the memory that this machine has"
    assert "late 1:" in third
    assert nodes_words(view.ranks) == "n1, n2, n3 (1 × NVIDIA H100, 1 × NVIDIA L40S)"


def test_a_rank_stands_under_its_gpu_with_its_memory(store: Store) -> None:
    *busy, last = FakeGpus(3).gpus
    gpus = (*busy, replace(last, memory_used=0))
    view = active_view(
        store, gpus=[g.uuid for g in gpus[:2]], allocated=30 * GIB, reserved=33 * GIB, peak=36 * GIB
    )
    lines = text_of(device_rows(Snapshot(t=time.time(), jobs=(view,), gpus=gpus), 116, 20))
    assert ["#1 demo r0" in lines[0], "#1 demo r1" in lines[1], "free" in lines[2]] == [True] * 3
    assert "process" in lines[3]
    assert "#1 demo" in lines[4]
    assert "alloc 30.0  peak 36.0 GiB" in lines[4]
    lines = text_of(device_rows(Snapshot(t=time.time(), jobs=(view,), gpus=gpus), 98, 20))
    assert "#1 demo r0" in lines[0]
    assert "a30.0 r33.0 p36.0G" in lines[1]
    assert "free" in lines[4]


def test_what_a_driver_does_not_say_is_a_dash() -> None:
    gpu = Gpu(index=0, uuid="GPU-0", name="NVIDIA L4", memory_total=24 * GIB)
    (line,) = text_of(device_rows(Snapshot(t=0, gpus=(gpu,)), 100, 10))
    assert line.count("–") >= 4


def test_a_late_rank_is_marked_in_words(store: Store) -> None:
    now = time.time()
    view = active_view(store, heartbeat=now - 14)
    rows = device_rows(Snapshot(t=now, jobs=(view,), host=HOST), 100, 20)
    assert "! late 0:14" in fmt.plain(rows[1])
    assert any(span.role == "bad" for span in rows[1])


def test_a_fresh_heartbeat_changes_nothing_on_the_screen(store: Store) -> None:
    now = time.time()
    view = active_view(store, heartbeat=now)
    first, second = (
        device_rows(Snapshot(t=now + age, jobs=(view,)), 100, 20) for age in (0.3, 1.3)
    )
    assert first == second


# -- logs and actions ----------------------------------------------------------------------


def test_the_logs_of_a_job_are_its_ranks_then_launcher_and_supervisor(store: Store) -> None:
    names = [source.name for source in log_sources(add_job(store, ranks=3))]
    assert names == ["rank 0", "rank 1", "rank 2", "launcher", "supervisor"]


def test_the_title_of_many_logs_stays_short(store: Store) -> None:
    from textual.content import Content

    sources = log_sources(add_job(store, ranks=64))
    for shown, title in (
        (40, "log · rank 0 1 2 3 rank 40 launcher supervisor"),
        (2, "log · rank 0 1 rank 2 3 launcher supervisor"),
        (64, "log · rank 0 1 2 3 launcher supervisor"),
    ):
        content = Content.from_markup(log_title(sources, shown))
        assert content.plain == title
        (bold,) = (span for span in content.spans if span.style == "b")
        assert content.plain[bold.start : bold.end] == sources[shown].name


def test_every_action_has_its_own_name_and_keys() -> None:
    keys = [key for action in ACTIONS for key in action.keys.split(",")]
    twice = {key for key in keys if keys.count(key) > 1}
    assert twice == {"slash"}, "it filters in the list, and searches the log elsewhere"
    assert len({action.name for action in ACTIONS}) == len(ACTIONS)


def test_the_footer_fits_80_columns() -> None:
    words = "  ".join(f"{action.shown} {action.label}" for action in footer_actions(78))
    assert len(words) <= 78
    assert [action.shown for action in footer_actions(78)][-1] == "q"
    assert "r" not in {action.shown for action in footer_actions(78)}
    assert {"r", "p", "c"} <= {action.shown for action in footer_actions(98)}


@pytest.mark.parametrize(
    ("state", "there", "not_there"),
    [(State.RUNNING, "xmp", "sr"), (State.QUEUED, "x", "smpr"), (State.FAILED, "sr", "xmp")],
)
def test_the_footer_has_what_can_be_done_with_the_job(
    store: Store, state: State, there: str, not_there: str
) -> None:
    keys = {action.shown for action in footer_actions(78, job=add_job(store, state=state))}
    assert keys >= {*there, "n", "l", "i", "d", "?", "q"}
    assert not keys & {*not_there}


@pytest.mark.parametrize("width", [20, 38, 58, 78])
def test_where_there_is_little_room_help_and_the_way_out_stay(width: int) -> None:
    actions = footer_actions(width)
    assert footer_width(actions) <= width
    assert [action.shown for action in actions][-2:] == ["?", "q"]
    line = last_line("queue", width, narrow=True).plain
    assert len(line) <= max(width, len("F1 keys  esc leave"))
    assert line.endswith("F1 keys  esc leave")


@pytest.mark.parametrize(
    ("names", "width", "short"),
    [
        (["cats", "dogs"], 4, {}),
        (["a-long-name", "another-name"], 8, {}),  # their beginnings tell them apart
        (["cats-night-1", "cats-night-2"], 8, {0: "…night-1", 1: "…night-2"}),
        (["s-lr1-cosine", "s-lr2-cosine"], 4, {0: "…1…", 1: "…2…"}),
        (["sweep-1", "sweep-1"], 5, {}),  # one name twice
    ],
)
def test_long_names_are_cut_where_they_are_alike(
    names: list[str], width: int, short: dict[int, str]
) -> None:
    assert short_names(names, width) == {names[place]: text for place, text in short.items()}


@given(st.lists(st.text("ab-", min_size=1, max_size=24), max_size=12), st.integers(4, 16))
def test_shortened_names_fit(names: list[str], width: int) -> None:
    assert all(len(text) <= width for text in short_names(names, width).values())
