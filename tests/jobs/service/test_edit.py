"""Jobs described by way of others: changed while they wait, copied, begun from templates."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.backends.local.dispatch import dispatch
from jobs.errors import StateError, UserError
from jobs.queue.job import Terms
from jobs.queue.states import State
from jobs.service import edit
from jobs.service.plan import plan_submit
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.file.templates import list_templates, save_template, templates_home
from tests.support.tui.made_up_runs import add_job, write_checkpoint

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.fixture
def waiting(store: Store, job_spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job in the queue; nothing is started."""
    monkeypatch.setattr("jobs.service.dispatch", lambda store: None)
    return service.submit(store, job_spec)


def read(job: Job) -> JobSpec:
    return load_spec(job.run_dir.job_file)


def changed(spec: JobSpec, **values: Any) -> JobSpec:
    return load_spec(None, spec.to_dict() | values)


# -- in its place --------------------------------------------------------------------------


def test_a_waiting_job_is_changed_in_its_place(store: Store, waiting: Job) -> None:
    before = read(waiting)
    after = changed(before, name="other", max_train_steps=9, num_processes=3, priority=2)
    job, plan = edit.change(store, waiting.id, after, before)
    assert (job.id, job.queued, job.run_dir) == (waiting.id, waiting.queued, waiting.run_dir)
    assert (job.name, job.ranks, job.total_steps, job.priority) == ("other", 3, 9, 2)
    assert read(job) == plan.spec
    last = store.history(job.id)[-1]
    assert (last.before, last.after) == (State.QUEUED, State.QUEUED)
    assert last.reason == "changed: name, max_train_steps, priority, num_processes"


def test_a_job_that_was_started_meanwhile_stays_as_it_is(store: Store, waiting: Job) -> None:
    before = read(waiting)
    text = waiting.run_dir.job_file.read_text()
    assert store.claim(waiting.id, [], "starting")
    with pytest.raises(StateError, match="is starting, not queued"):
        edit.change(store, waiting.id, changed(before, seed=3), before)
    assert waiting.run_dir.job_file.read_text() == text


def test_a_start_between_the_check_and_the_change_wins(
    store: Store, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(waiting)
    text = waiting.run_dir.job_file.read_text()
    planned = edit.plan_change

    def slow(*args: Any) -> Any:
        plan = planned(*args)
        assert store.claim(waiting.id, [], "starting")  # the runner is quicker
        return plan

    monkeypatch.setattr(edit, "plan_change", slow)
    with pytest.raises(StateError, match="not queued"):
        edit.change(store, waiting.id, changed(before, seed=3), before)
    assert waiting.run_dir.job_file.read_text() == text
    assert store.get(waiting.id).state is State.STARTING


@pytest.mark.parametrize("how", ["changed", "held"])
def test_nobody_starts_a_job_as_it_was_before(
    store: Store, started: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Between reading the queue and starting a job, the driver is asked, which takes its time."""
    job = add_job(store, ranks=1)

    def meanwhile() -> int:
        if how == "held":
            store.hold(job.id, held=True)
        elif store.get(job.id).ranks == 1:
            store.redescribe(
                job.id,
                name="cats",
                terms=Terms(3, None, 9),
                reason="changed",
                prepare=lambda _: None,
            )
        return 1

    monkeypatch.setattr("jobs.backends.local.dispatch.cpu_slots", meanwhile)
    dispatch(store)
    assert store.get(job.id).state is State.QUEUED
    dispatch(store)
    assert [store.get(one).ranks for one in started] == ([3] if how == "changed" else [])


def test_nobody_starts_a_job_that_is_half_changed(
    store: Store, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner has to wait for the file, too: both are changed under the database's lock."""
    before = read(waiting)
    write = service.write_job_file

    def try_to_claim(*args: Any) -> None:
        db = sqlite3.connect(store.path, timeout=0, isolation_level=None)
        with closing(db), pytest.raises(sqlite3.OperationalError, match="locked"):
            db.execute("BEGIN IMMEDIATE")
        write(*args)

    monkeypatch.setattr(service, "write_job_file", try_to_claim)
    edit.change(store, waiting.id, changed(before, seed=3), before)
    assert read(waiting).seed == 3


def test_changes_of_someone_else_are_not_lost(store: Store, waiting: Job) -> None:
    before = read(waiting)
    edit.change(store, waiting.id, changed(before, seed=3), before)
    with pytest.raises(StateError, match="changed elsewhere"):
        edit.change(store, waiting.id, changed(before, seed=4), before)
    assert read(waiting).seed == 3


def test_a_full_disk_changes_nothing(
    store: Store, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(waiting)

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jobs.service.write_atomic", full)
    with pytest.raises(UserError, match="No space left"):
        edit.change(store, waiting.id, changed(before, name="other"), before)
    assert store.get(waiting.id).name == "t"
    assert read(waiting) == before


def test_a_database_that_cannot_take_it_leaves_the_file(
    store: Store, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(waiting)

    class Fails(sqlite3.Connection):
        def execute(self, words: str, *values: Any) -> sqlite3.Cursor:
            if words == "COMMIT" and read(waiting) != before:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(words, *values)

    monkeypatch.setattr("sqlite3.connect", partial(sqlite3.connect, factory=Fails))
    with pytest.raises(sqlite3.OperationalError):
        edit.change(store, waiting.id, changed(before, seed=3), before)
    assert read(waiting) == before


def test_a_job_with_checkpoints_must_still_fit_them(store: Store, waiting: Job) -> None:
    before = read(waiting)
    write_checkpoint(waiting, 4)
    with pytest.raises(UserError, match="is less than the 4 steps"):
        edit.change(store, waiting.id, changed(before, max_train_steps=3), before)
    job, plan = edit.change(store, waiting.id, changed(before, max_train_steps=50), before)
    assert plan.begin is not None
    assert job.total_steps == 50


# -- copies and last choices ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "taken", "free"),
    [
        ("a", [], "a"),
        ("a", ["a"], "a-2"),
        ("a-2", ["a", "a-2"], "a-3"),
        ("a-2", ["a-2"], "a-3"),
        ("x" * 64, ["x" * 64], "x" * 62 + "-2"),
    ],
)
def test_a_copy_gets_a_name_of_its_own(name: str, taken: list[str], free: str) -> None:
    assert edit.free_name(name, taken) == free
    assert len(free) <= 64


def test_a_copy_has_all_values(store: Store, waiting: Job) -> None:
    values = edit.copy_of(waiting, [waiting.name])
    assert values == read(waiting).to_dict() | {"name": "t-2"}


def test_a_new_job_can_take_model_data_and_ranks_of_the_newest_but_not_its_device(
    store: Store, job_values: dict[str, Any]
) -> None:
    spec = load_spec(None, job_values | {"seed": 7, "strategy": "fsdp2", "num_processes": 4})
    add_job(store, "first", job_file="name: first\nseed: 3\n")
    add_job(store, "second", job_file=dump_spec(spec))
    values = edit.fresh_values(store.all())
    assert values == {
        "model_type": "lora",
        "model_family": "flux",
        "strategy": "fsdp2",
        "pretrained_model_name_or_path": spec.pretrained_model_name_or_path,
        "dataset": spec.dataset,
        "num_processes": 4,
    }
    plan_submit(store, load_spec(None, values | {"device": "cpu"}))


def test_a_newest_job_that_cannot_be_read_gives_nothing(store: Store) -> None:
    assert edit.fresh_values([]) == {}
    add_job(store, job_file="{")
    assert edit.fresh_values(store.all()) == {}


# -- templates -----------------------------------------------------------------------------


def test_templates_are_kept_by_name_and_come_first(home: object) -> None:
    path = save_template("my flux", {"model_family": "flux", "lora_rank": 64})
    assert path == templates_home() / "my flux.yaml"
    found, problems = list_templates()
    assert (found[0].title, dict(found[0].values)) == (
        "my flux",
        {"model_family": "flux", "lora_rank": 64},
    )
    assert found[0].about == "yours · model_family: flux, lora_rank: 64"
    assert {"FLUX.1 · dev", "Wan · 2.2-ti2v-5b"} <= {one.title for one in found[1:]}
    assert problems == []


def test_what_is_wrong_with_a_template_is_told_and_the_others_are_there(home: object) -> None:
    save_template("good", {"seed": 1})
    (templates_home() / "bad.yaml").write_text("a: [")
    (templates_home() / "odd.yaml").write_text("seed: 2\nlearnig_rate: 1\n")
    found, problems = list_templates()
    assert [one.title for one in found if one.path] == ["good", "odd"]
    assert "bad.yaml" in problems[0]
    assert problems[1] == "odd.yaml: ignored unknown keys: learnig_rate"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_a_template_is_called_as_files_may_be(home: object, name: str) -> None:
    with pytest.raises(UserError, match="is not a valid template name"):
        save_template(name, {})
