"""What a person can do with jobs, up to the point where processes would start."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import NotFoundError, SpecError, StateError, UserError
from jobs.machine.devices import Gpu
from jobs.queue.states import State
from jobs.resume import PLAN_VERSION
from jobs.run.eventlog import EventLog
from jobs.run.rundir import event
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.steps import with_total_steps
from tests.support.jobs.checkpoints import save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Job, Store


pytestmark = pytest.mark.usefixtures("no_gpus", "started")


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    gpus = [Gpu(index=n, uuid=f"GPU-{n}", name="H", memory_total=1) for n in range(count)]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)


def ended(store: Store, spec: JobSpec, state: State = State.STOPPED, step: int | None = 3) -> Job:
    """A job that ran and ended, with a checkpoint after `step`."""
    job = service.submit(store, spec)
    store.change(job.id, State.RUNNING, "")
    store.change(job.id, state, "")
    if step is not None:
        save_checkpoint(job.run_dir, step)
    return store.get(job.id)


# -- submit --------------------------------------------------------------------------------


def test_a_submitted_job_has_its_exact_description_beside_it(
    store: Store, job_spec: JobSpec
) -> None:
    job = service.submit(store, job_spec)
    assert (job.state, job.name, job.ranks, job.total_steps) == (State.STARTING, "t", 2, 5)
    assert load_spec(job.run_dir.job_file) == settle(job_spec)
    assert len(job.run_id) == 32


def test_two_jobs_never_share_a_mark_or_a_directory(store: Store, job_spec: JobSpec) -> None:
    first, second = service.submit(store, job_spec), service.submit(store, job_spec)
    assert first.run_id != second.run_id
    assert first.run_dir != second.run_dir
    assert second.state is State.QUEUED


def test_a_directory_of_a_forgotten_database_is_not_taken_for_the_job(
    store: Store, job_spec: JobSpec
) -> None:
    """Someone deleted jobs.db but not runs/: its checkpoints are another job's."""
    old = ended(store, job_spec)
    for path in store.home.glob("jobs.db*"):
        path.unlink()
    fresh = type(store)(store.home)
    try:
        new = service.submit(fresh, job_spec)
    except UserError as error:
        assert str(old.run_dir.root) in str(error)  # noqa: PT017 - either way is right
    else:
        assert new.run_dir.latest_checkpoint() is None


def test_a_submission_that_failed_is_not_in_the_way_of_the_next(
    store: Store, job_spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jobs.service.write_atomic", full)
        with pytest.raises((OSError, UserError)):
            service.submit(store, job_spec)
    assert store.all() == []
    assert service.submit(store, job_spec).state is State.STARTING


# -- stop ----------------------------------------------------------------------------------


def test_a_job_that_waits_is_taken_out_of_the_queue(store: Store, job_spec: JobSpec) -> None:
    service.submit(store, job_spec)
    waiting = service.submit(store, job_spec)
    assert "removed from the queue" in service.stop(store, waiting.id)
    assert store.get(waiting.id).state is State.STOPPED
    with pytest.raises(StateError, match=r"has already ended \(stopped\)"):
        service.stop(store, waiting.id)


def test_stopping_again_is_firmer_and_says_so(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    said = [service.stop(store, job.id) for _ in range(4)]
    assert "after the current step, with a checkpoint" in said[0]
    assert "SIGTERM" in said[1]
    assert "is killed" in said[2]
    assert "is killed" in said[3]
    assert store.get(job.id).stop_level >= 3


def test_stopping_now_skips_the_polite_levels(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    assert "is killed" in service.stop(store, job.id, now=True)
    assert store.get(job.id).stop_level == 3


# -- resume --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.STOPPED, State.FAILED, State.LOST])
def test_an_ended_job_goes_on_after_its_newest_checkpoint(
    store: Store, job_spec: JobSpec, state: State
) -> None:
    job = ended(store, job_spec, state)
    again = service.resume(store, job.id)
    assert again.state is State.STARTING
    assert again.attempt == 1
    assert store.history(job.id)[-2].reason == "resumed after step 3"


def test_without_a_checkpoint_it_starts_again(store: Store, job_spec: JobSpec) -> None:
    job = ended(store, job_spec, step=None)
    service.resume(store, job.id)
    assert store.history(job.id)[-2].reason == "restarted from step 0"


def test_a_job_that_has_not_ended_cannot_be_resumed(store: Store, job_spec: JobSpec) -> None:
    running, waiting = service.submit(store, job_spec), service.submit(store, job_spec)
    for job in (running, waiting):
        with pytest.raises(StateError, match="nothing to resume"):
            service.resume(store, job.id)


def test_a_job_that_is_done_needs_more_steps(store: Store, job_spec: JobSpec) -> None:
    job = ended(store, job_spec, State.COMPLETED, step=5)
    with pytest.raises(StateError, match="has already trained 5 of 5 steps"):
        service.resume(store, job.id)
    assert store.get(job.id) == job
    again = service.resume(store, job.id, {"max_train_steps": "9"})
    assert again.total_steps == 9
    assert load_spec(job.run_dir.job_file).max_train_steps == 9


def test_a_job_that_is_done_with_its_epochs_needs_more(store: Store, job_spec: JobSpec) -> None:
    """How many steps they are follows from what its checkpoint knows of the data."""
    values = job_spec.to_dict() | {"max_train_steps": None, "num_train_epochs": 2}
    job = ended(store, JobSpec(**values), State.COMPLETED, step=None)
    assert (job.total_steps, service.progress(job).total_steps) == (0, None)
    spec = with_total_steps(load_spec(job.run_dir.job_file), 6)  # two ranks
    save_checkpoint(
        job.run_dir, 6, spec.to_dict(), data={"draws_per_epoch": 6, "plan": PLAN_VERSION}
    )
    with pytest.raises(StateError, match="has already trained 6 of 6 steps"):
        service.resume(store, job.id)
    with pytest.raises(StateError, match="has already trained 6 of 3 steps"):
        service.resume(store, job.id, {"num_train_epochs": "1"})
    again = service.resume(store, job.id, {"max_train_steps": "9"})
    assert again.total_steps == 9
    described = load_spec(job.run_dir.job_file)
    assert (described.max_train_steps, described.num_train_epochs) == (9, None)


def test_a_resume_that_is_refused_changes_nothing(store: Store, job_spec: JobSpec) -> None:
    job = ended(store, job_spec)
    text = job.run_dir.job_file.read_text()
    for changes, said in (
        ({"max_train_steps": "2"}, "has already trained 3 of 2 steps"),
        ({"learning_rat": "1"}, "unknown key"),
        ({"dataset": "/no/such"}, "no such dataset folder"),
    ):
        with pytest.raises(UserError, match=said):
            service.resume(store, job.id, changes)
    assert store.get(job.id) == job
    assert job.run_dir.job_file.read_text() == text


def test_a_job_whose_file_was_deleted_cannot_be_resumed(store: Store, job_spec: JobSpec) -> None:
    job = ended(store, job_spec)
    job.run_dir.job_file.unlink()
    with pytest.raises(SpecError, match="no such job file"):
        service.resume(store, job.id)


def test_a_resume_on_another_number_of_ranks_is_known_to_everyone(
    store: Store, job_spec: JobSpec
) -> None:
    job = ended(store, job_spec)
    again = service.resume(store, job.id, {"num_processes": "4"})
    assert again.ranks == 4
    assert service.as_dict(store, again, [])["ranks"] == 4


def test_a_resume_on_other_gpus_claims_those(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, 4)
    job = ended(store, load_spec(None, job_values | {"device": "auto"}))
    assert job.wanted == 2
    again = service.resume(store, job.id, {"gpus": "3,2,1", "num_processes": "3"})
    assert again.wanted == ["GPU-3", "GPU-2", "GPU-1"]
    assert again.gpus == ["GPU-3", "GPU-2", "GPU-1"]
    assert again.ranks == 3


def test_a_resume_may_move_from_gpus_to_the_cpu(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, 2)
    job = ended(store, load_spec(None, job_values | {"device": "auto"}))
    again = service.resume(store, job.id, {"device": "cpu"})
    assert (again.wanted, again.gpus) == (None, [])


def test_a_resume_may_change_the_priority(store: Store, job_spec: JobSpec) -> None:
    job = ended(store, job_spec)
    assert service.resume(store, job.id, {"priority": "7"}).priority == 7


# -- requests and removal ------------------------------------------------------------------


def test_a_running_job_can_be_asked_for_a_save(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    service.request(store, job.id, "save_now")
    assert job.run_dir.requested("save_now")
    store.change(job.id, State.STOPPED, "")
    with pytest.raises(StateError, match="it cannot sample now"):
        service.request(store, job.id, "sample_now")


def test_a_removed_job_takes_its_files_with_it_or_leaves_them(
    store: Store, job_spec: JobSpec
) -> None:
    first, second = ended(store, job_spec), ended(store, job_spec)
    service.remove(store, first.id)
    assert not first.run_dir.root.exists()
    service.remove(store, second.id, files=False)
    assert second.run_dir.root.exists()
    assert store.all() == []


def test_files_that_cannot_be_deleted_are_told(
    store: Store, job_spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [ended(store, job_spec) for _ in range(2)]
    delete = service.shutil.rmtree
    stuck = jobs[0].run_dir.root
    monkeypatch.setattr(
        service.shutil, "rmtree", lambda root, **how: None if root == stuck else delete(root, **how)
    )
    with pytest.raises(
        service.FilesLeftError, match=f"removed 2 jobs, but not all of {stuck} could"
    ):
        service.prune(store, 0)
    assert store.all() == []
    assert not jobs[1].run_dir.root.exists(), "the others are deleted all the same"


def test_a_running_job_is_not_removed(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    with pytest.raises(StateError):
        service.remove(store, job.id)
    assert job.run_dir.job_file.exists()


def test_pruning_keeps_the_newest_and_what_has_not_ended(store: Store, job_spec: JobSpec) -> None:
    jobs = [ended(store, job_spec) for _ in range(3)]
    running = service.submit(store, job_spec)
    removed = service.prune(store, keep_last=1)
    assert [job.id for job in removed] == [jobs[1].id, jobs[0].id]
    assert [job.id for job in store.all()] == [running.id, jobs[2].id]
    assert [job.run_dir.root.exists() for job in jobs] == [False, False, True]


def test_everything_asks_for_a_job_that_exists(store: Store) -> None:
    calls: list[Any] = [
        lambda: service.stop(store, 7),
        lambda: service.resume(store, 7),
        lambda: service.remove(store, 7),
        lambda: service.request(store, 7, "save_now"),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="no job 7"):
            call()


# -- what is shown -------------------------------------------------------------------------


def write_steps(path: Path, *numbers: int, loss: float = 0.5) -> None:
    lines = (event("step", step=n, loss=loss, seconds=0.5) for n in numbers)
    path.write_text("".join(lines))


def test_progress_comes_from_the_run_directory(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    assert service.progress(job) == service.Progress()
    write_steps(job.run_dir.events, 1, 2, 3)
    store.change(job.id, State.RUNNING, "")
    assert service.progress(store.get(job.id)) == service.Progress(
        3, 0.5, 0.5, eta=1.0, eta_parts={"train": 1.0}
    )
    store.change(job.id, State.STOPPED, "")
    assert service.progress(store.get(job.id)).eta is None, "it does not run"


def test_a_log_that_is_followed_anyway_is_not_read_again(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    write_steps(job.run_dir.events, 1)
    log = EventLog(job.run_dir.events)
    assert service.progress(job, log).step == 0
    log.poll()
    assert service.progress(job, log).step == 1


def test_scripts_get_the_promised_fields(store: Store, job_spec: JobSpec) -> None:
    facts = service.as_dict(store, service.submit(store, job_spec), [])
    promised = {
        "id",
        "name",
        "state",
        "reason",
        "step",
        "total_steps",
        "gpus",
        "run_dir",
        "created",
        "started",
        "ended",
    }
    assert promised <= set(facts)
    assert json.loads(json.dumps(facts)) == facts


def test_scripts_get_json_even_when_the_loss_is_no_number(store: Store, job_spec: JobSpec) -> None:
    """JSON has no NaN; `jq` and JavaScript refuse it."""
    job = service.submit(store, job_spec)
    write_steps(job.run_dir.events, 1, loss=float("nan"))
    facts = service.as_dict(store, job, [])
    json.dumps(facts, allow_nan=False)
    assert facts["loss"] is None


def test_gpus_are_shown_as_people_number_them(store: Store, job_spec: JobSpec) -> None:
    job = service.submit(store, job_spec)
    shown = [Gpu(index=n, uuid=f"GPU-{n}", name="H", memory_total=1) for n in (2, 5)]
    job = job.__class__(**vars(job) | {"gpus": ["GPU-5", "GPU-gone", "GPU-2"]})
    assert service.gpu_indices(job, shown) == [5, 2]
