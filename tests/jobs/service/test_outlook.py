"""When queued jobs start and end: the queue is played as it will be served."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import service
from jobs.backends.local.placement import Request
from jobs.queue.job import NewJob, Terms
from jobs.queue.job_list import Progress, progress_of
from jobs.queue.states import State
from jobs.run.rundir import RunDir
from jobs.service.outlook import Expected, Forecast, Machine, Outlook, Takes, foresee, recipe_of
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec
from tests.support.tui.made_up_runs import add_job, write_steps

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store

DEVICES = [f"GPU-{n}" for n in range(4)]
GPUS = Machine(DEVICES, indices={uuid: n for n, uuid in enumerate(DEVICES)})


def test_jobs_for_the_same_gpu_follow_each_other() -> None:
    queue = [Request(2, ["GPU-0"]), Request(3, ["GPU-0"]), Request(4, 1), Request(5, None)]
    takes = {job: Takes(float(10 * job)) for job in (2, 3, 4, 5)}
    running = {1: Takes(7.0), 9: Takes(50.0)}
    claims = {"GPU-0": 1, "GPU-1": 9, "GPU-2": 9, "GPU-3": 9}
    assert foresee(queue, takes, running, claims, [], GPUS) == {
        2: Expected(7.0, 27.0),
        3: Expected(27.0, 57.0),
        4: Expected(50.0, 90.0),
        5: Expected(0.0, 50.0),
    }


def test_behind_a_job_of_which_nobody_knows_nothing_is_known() -> None:
    queue = [Request(2, ["GPU-0"]), Request(3, ["GPU-0"]), Request(4, ["GPU-3"]), Request(5, 4)]
    claims = {"GPU-0": 1, "GPU-3": 8}
    told = foresee(queue, {3: Takes(5.0)}, {1: Takes(7.0), 8: None}, claims, [], GPUS)
    assert told == {
        2: Expected(7.0, None),
        3: Expected(after=2),
        4: Expected(after=8),
        5: Expected(after=2),
    }


def test_what_is_uncertain_makes_all_that_follows_uncertain() -> None:
    queue = [Request(2, ["GPU-0"]), Request(3, ["GPU-0"]), Request(4, ["GPU-1"])]
    takes = dict.fromkeys((2, 3, 4), Takes(10.0))
    told = foresee(queue, takes, {1: Takes(7.0, True)}, {"GPU-0": 1}, [], GPUS)
    assert told == {
        2: Expected(7.0, 17.0, True),
        3: Expected(17.0, 27.0, True),
        4: Expected(0.0, 10.0),
    }


def test_a_later_stage_starts_at_the_end_of_the_one_before_and_keeps_nobody_waiting() -> None:
    queue = [Request(2, 4), Request(3, 4), Request(4, ["GPU-1"]), Request(5, 1)]
    takes = dict.fromkeys((3, 4, 5), Takes(10.0))
    follows = {2: [1], 4: [1, 3], 5: [2]}
    told = foresee(queue, takes, {1: Takes(30.0, True)}, {}, [1], GPUS, follows)
    assert told == {
        2: Expected(30.0, None, True),
        3: Expected(0.0, 10.0),
        4: Expected(after=2),  # which has the GPU
        5: Expected(after=2),
    }


@given(
    wanted=st.lists(
        st.one_of(
            st.none(),
            st.integers(1, 4),
            st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True),
        ),
        max_size=12,
    ),
    times=st.lists(st.integers(1, 100), min_size=12, max_size=12),
    first=st.integers(0, 4),
    stages=st.dictionaries(st.integers(1, 11), st.sets(st.integers(0, 10), max_size=3), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_every_job_is_served_and_no_gpu_twice_at_once(
    wanted: list[int | list[str] | None], times: list[int], first: int, stages: dict[int, set[int]]
) -> None:
    queue = [Request(10 + n, want) for n, want in enumerate(wanted)]
    takes = {10 + n: Takes(float(times[n])) for n in range(len(wanted))}
    claims = dict.fromkeys(DEVICES[:first], 1)
    follows = {
        10 + n: {10 + each for each in earlier if each < n}
        for n, earlier in stages.items()
        if n < len(wanted)
    }
    told = foresee(queue, takes, {1: Takes(30.0)} if first else {}, claims, [], GPUS, follows)
    assert told.keys() == takes.keys()
    spans = {}
    for request in queue:
        starts, ends = told[request.job].starts_in, told[request.job].ends_in
        assert starts is not None
        assert ends == starts + takes[request.job].seconds
        spans[request.job] = starts, ends
    for moment in {start for start, _ in spans.values()}:
        now = [r.gpus for r in queue if spans[r.job][0] <= moment < spans[r.job][1]]
        names = [name for want in now if isinstance(want, list) for name in want]
        counts = sum(want for want in now if isinstance(want, int))
        taken = first if moment < 30 else 0
        assert counts + len(names) + taken <= 4
        assert len(set(names)) == len(names)
        assert sum(want is None for want in now) <= 1
    for job, earlier in follows.items():
        assert all(spans[each][1] <= spans[job][0] for each in earlier)
    alike = [spans[r.job][0] for r in queue if r.gpus == 1 and not follows.get(r.job)]
    assert alike == sorted(alike), "the first in the queue first"


# -- jobs ---------------------------------------------------------------------------------------


def job_like(store: Store, state: State = State.QUEUED, **changes: Any) -> Job:
    values = {
        "pretrained_model_name_or_path": "/m",
        "dataset": "/d",
        "max_train_steps": 100,
        "device": "cpu",
        **changes,
    }
    spec = load_spec(None, values, ignoring=("pretrained_model_name_or_path", "dataset"))
    steps = spec.max_train_steps or 0
    return add_job(store, state=state, total_steps=steps, job_file=dump_spec(spec), ranks=1)


def later(earlier: Job) -> NewJob:
    """A job that starts when another one has completed."""
    return NewJob("later", Terms(1, None, 9), "run", RunDir.create, (earlier.id,))


def outlook(store: Store) -> Outlook:
    jobs = store.all()
    active = [job for job in jobs if job.state.active]
    return Forecast().look(store, jobs, progress_of(store, active), [])


def test_a_queued_job_takes_as_long_as_one_like_it(store: Store) -> None:
    running = job_like(store, State.RUNNING, learning_rate=1e-4)
    write_steps(running, 40, seconds=2.0)
    second = job_like(store, learning_rate=3e-4)
    other = job_like(store, resolution=512)
    third = job_like(store, seed=5)
    told = outlook(store)
    assert told.jobs[running.id] == Expected(None, 120.0)
    assert told.jobs[second.id] == Expected(120.0, 320.0)
    assert told.jobs[other.id] == Expected(320.0, None), "none like it has run"
    assert told.jobs[third.id] == Expected(after=other.id)
    assert (told.all_done, told.at_least) == (320.0, True)
    (row,) = service.as_dicts(store, [second], [])
    assert (row["starts_in"], row["ends_in"], row["eta"]) == (120.0, 320.0, None)


def test_what_will_not_start_is_not_expected(store: Store) -> None:
    running = job_like(store, State.RUNNING)
    write_steps(running, 50, seconds=1.0)
    held, queued = job_like(store), job_like(store)
    store.hold(held.id, True)
    told = outlook(store)
    assert held.id not in told.jobs
    assert told.jobs[queued.id] == Expected(50.0, 150.0)
    stuck = [store.add_all([later(held)])[0], store.add_all([later(running)])[0]]
    store.change(held.id, State.STOPPED, "")
    told = outlook(store)
    assert stuck[0].id not in told.jobs
    starts = told.jobs[stuck[1].id].starts_in
    assert starts == 150.0, "after job 1, and after the one before it in the queue"
    store.hold(stuck[0].id, True)
    store.change(stuck[1].id, State.STOPPED, "")
    told = outlook(store)
    assert (told.all_done, told.at_least) == (150.0, False)
    store.pause(True)
    assert outlook(store).jobs.keys() == {running.id}
    assert outlook(store).all_done == 50.0


def test_nothing_is_looked_at_where_nothing_runs_or_waits(store: Store) -> None:
    job_like(store, State.COMPLETED)
    assert outlook(store) == Outlook()


def test_a_job_that_just_started_takes_what_one_like_it_took(store: Store) -> None:
    before = job_like(store, State.COMPLETED)
    write_steps(before, 100, seconds=2.0)
    new = job_like(store, State.RUNNING)
    told = outlook(store)
    assert told.jobs[new.id].ends_in == pytest.approx(200, abs=10)


def test_within_a_few_seconds_the_outlook_is_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job_like(store, State.RUNNING)
    write_steps(running, 40, seconds=2.0)
    forecast, now = Forecast(), 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr("jobs.service.outlook.time", clock)
    jobs, far = store.all(), progress_of(store, store.all())
    first = forecast.look(store, jobs, far, [])
    later = far | {running.id: Progress(60, eta=80.0)}
    assert forecast.look(store, jobs, later, []) is first
    now += 3.0
    assert forecast.look(store, jobs, far, []) is first, "nothing has changed"
    now += 3.0
    assert forecast.look(store, jobs, later, []).all_done == 80.0
    queued = job_like(store)
    assert queued.id in forecast.look(store, store.all(), far, []).jobs, "a change counts at once"


def test_jobs_of_a_sweep_are_alike_and_others_are_not(store: Store) -> None:
    same = [{"learning_rate": 1e-5}, {"lora_rank": 8}, {"seed": 1}, {"max_train_steps": 7}]
    others = [{"resolution": 768}, {"train_batch_size": 2}, {"validation_timesteps": 8}]
    usual = recipe_of(job_like(store))
    assert {recipe_of(job_like(store, **changes)) for changes in same} == {usual}
    assert usual not in {recipe_of(job_like(store, **changes)) for changes in others}


def test_keys_that_are_said_to_keep_the_pace_exist() -> None:
    from jobs.service.outlook import _OTHER_PACE, _SAME_PACE

    assert JobSpec.model_fields.keys() >= _SAME_PACE | _OTHER_PACE


def test_what_scripts_get_can_be_written(store: Store) -> None:
    job_like(store, State.RUNNING)
    job_like(store)
    assert json.loads(json.dumps(service.as_dicts(store, store.all(), [])))
