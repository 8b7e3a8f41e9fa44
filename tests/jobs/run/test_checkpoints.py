"""Checkpoints as files: verified, set aside, deleted; going back to one, beginning from one."""

from __future__ import annotations

import json
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import NotFoundError, StateError, UserError
from jobs.queue.states import State
from jobs.run.checkpoint_files import (
    UnreadableError,
    delete,
    find_best,
    find_checkpoint,
    find_damage,
    find_listed,
    free_bytes,
    list_all,
    newest_whole,
    plan_rewind,
    rewind,
    set_aside,
    verify,
)
from jobs.run.judging import Measurements, judge
from jobs.run.rundir import MANIFEST, RunDir
from jobs.service.plan import plan_resume, plan_submit
from jobs.service.start_point import find_origin, origin_of, read_step
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.jobs.checkpoints import save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec


pytestmark = pytest.mark.usefixtures("no_gpus", "started")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10, 20 and 30."""
    run_dir = RunDir(tmp_path / "run")
    for step in (10, 20, 30):
        save_checkpoint(run_dir, step)
    return run_dir


@pytest.fixture
def ended(store: Store, job_values: dict[str, Any]) -> Callable[..., Job]:
    """Makes ended jobs with checkpoints of these steps: `ended(10, 20, learning_rate=1)`."""

    def make(*steps: int, state: State = State.STOPPED, **changes: Any) -> Job:
        spec = load_spec(None, job_values | {"max_train_steps": 100} | changes)
        job = service.submit(store, spec)
        if job.state is State.QUEUED:
            assert store.claim(job.id, [], "")
        store.change(job.id, state, "")
        for step in steps:
            save_checkpoint(job.run_dir, step, spec.to_dict())
        return store.get(job.id)

    return make


def names(run_dir: RunDir) -> list[str]:
    return sorted(path.name for path in run_dir.checkpoints.glob("step-*"))


def spoil(path: Path) -> None:
    """Change a byte, so that sizes stay."""
    file = path / "__0_0.distcp"
    file.write_bytes(b"!" + file.read_bytes()[1:])


# -- files ---------------------------------------------------------------------------------


def test_the_newest_one_that_is_whole_is_taken(run_dir: RunDir) -> None:
    assert find_checkpoint(run_dir, None, "it").step == 30
    (run_dir.checkpoint(30) / "__0_0.distcp").unlink()
    newest = newest_whole(run_dir)
    assert newest is not None
    assert newest.step == find_checkpoint(run_dir, None, "it").step == 20
    with pytest.raises(NotFoundError, match=r"^job 3: step-30 is damaged \(__0_0.distcp is miss"):
        find_checkpoint(run_dir, 30, "job 3")


def test_a_step_that_was_never_saved_is_told_with_those_that_were(run_dir: RunDir) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint of step 25; there are 10, 20, 30"):
        find_checkpoint(run_dir, 25, "job 3")
    set_aside(run_dir.checkpoint(20), "rewound")
    with pytest.raises(NotFoundError, match=r"set aside as step-20\.rewound; rename it"):
        find_checkpoint(run_dir, 20, "job 3")
    with pytest.raises(NotFoundError, match=r"job 3 has no checkpoint$"):
        find_checkpoint(RunDir(run_dir.root / "none"), None, "job 3")


NAN = float("nan")


@pytest.mark.parametrize(
    ("saved", "losses", "order"),
    [
        ([10, 20, 30], [(10, 3.0), (20, 1.0), (30, 2.0)], [20, 30, 10]),
        ([10, 20, 30], [(10, 3.0), (20, NAN), (30, 2.0)], [30, 10]),
        ([10, 20, 30], [(15, 1.0), (30, 2.0)], [20, 30]),  # 10 was before the first one
        ([10, 20, 30], [(0, 5.0), (20, 1.0)], [20, 30, 10]),  # the measured one before its heir
        ([10, 20, 30], [(40, 1.0)], []),
        ([10, 20, 30], [], []),
    ],
)
def test_what_was_measured_orders_checkpoints(
    saved: list[int], losses: list[tuple[int, float]], order: list[int]
) -> None:
    scores = Measurements([(step, 4 - loss) for step, loss in losses], "clip_t")
    for measured in (Measurements(losses), scores):
        assert [judged.step for judged in judge(saved, measured)] == order, measured.by
        values = dict(measured.values)
        assert all(judged.value == values[judged.measured] for judged in judge(saved, measured))


def test_the_best_checkpoint_is_the_best_that_is_whole(run_dir: RunDir) -> None:
    losses = Measurements([(10, 2.0), (15, 1.0), (30, 3.0)])
    best = find_best(run_dir, losses, "job 3")
    assert str(best) == "step 20: validation loss 1, measured at step 15"
    by_name = {each.name: each for each in list_all(run_dir, losses)}
    assert [name for name, each in by_name.items() if each.best] == ["step-20"]
    assert (by_name["step-20"].value, by_name["step-20"].value_step) == (1.0, 15)
    (run_dir.checkpoint(20) / "__0_0.distcp").unlink()
    assert find_best(run_dir, losses, "job 3").step == 10
    scores = Measurements(losses.values, "dino_i")
    assert str(find_best(run_dir, scores, "job 3")) == "step 30: DINO-I 3"
    assert [each.name for each in list_all(run_dir, losses) if each.best] == ["step-10"]


def test_where_nothing_was_validated_the_keys_to_set_are_named(run_dir: RunDir) -> None:
    with pytest.raises(NotFoundError, match=r"no validation loss.*set validation_fraction"):
        find_best(run_dir, Measurements(), "job 3")
    with pytest.raises(NotFoundError, match=r"no CLIP-T.*after every validation_steps steps"):
        find_best(run_dir, Measurements(by="clip_t"), "job 3")
    with pytest.raises(NotFoundError, match=r"of step 40.*lower validation_loss_steps"):
        find_best(run_dir, Measurements([(40, 1.0)]), "job 3")
    assert not any(each.best for each in list_all(run_dir))


def test_going_back_sets_newer_ones_aside_and_deletes_nothing(run_dir: RunDir) -> None:
    before = {
        path.name: (path / "__0_0.distcp").read_bytes()
        for _, path in run_dir.complete_checkpoints()
    }
    rewind(plan_rewind(run_dir, 10))
    assert names(run_dir) == ["step-10", "step-20.rewound", "step-30.rewound"]
    assert run_dir.latest_checkpoint() == (10, run_dir.checkpoint(10))
    after = {
        path.name.removesuffix(".rewound"): (path / "__0_0.distcp").read_bytes()
        for path in run_dir.checkpoints.iterdir()
    }
    assert after == before


def test_going_back_again_keeps_what_was_set_aside_before(run_dir: RunDir) -> None:
    rewind(plan_rewind(run_dir, 20))
    save_checkpoint(run_dir, 30)
    rewind(plan_rewind(run_dir, 20))
    assert names(run_dir) == ["step-10", "step-20", "step-30.rewound", "step-30.rewound-2"]


def test_a_rename_that_fails_is_said(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if "step-30.rewound" in str(target):
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(UserError, match=r"cannot rename a checkpoint in .* \(Permission denied\)"):
        rewind(plan_rewind(run_dir, 10))


def test_deleting_one_that_is_gone_is_nothing(run_dir: RunDir) -> None:
    """The engine thins out checkpoints while a person may delete one."""
    delete(run_dir.checkpoint(10))
    delete(run_dir.checkpoint(10))
    assert names(run_dir) == ["step-20", "step-30"]


def test_one_whose_deletion_was_cut_off_is_neither_complete_nor_left(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *words, **names: None)  # killed before this
    delete(run_dir.checkpoint(10))
    monkeypatch.undo()
    assert [step for step, _ in run_dir.complete_checkpoints()] == [20, 30]
    assert [one.name for one in list_all(run_dir)] == ["step-20", "step-30"]
    run_dir.forget_unfinished()
    assert not list(run_dir.checkpoints.glob(".*"))


def test_what_cannot_be_read_is_not_called_damaged(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("jobs.run.checkpoint_files.sha256", fail)
    with pytest.raises(UnreadableError, match=r"cannot read .* \(Input/output error\); the checkp"):
        find_damage(run_dir.checkpoint(10))
    (first, *_) = list_all(run_dir)
    assert verify(first).health.startswith(f"cannot read {first.path / '__0_0.distcp'} (Input")


def test_ranks_share_the_reading(run_dir: RunDir) -> None:
    path = run_dir.checkpoint(10)
    spoil(path)
    assert find_damage(path, contents=False) is None
    found = [find_damage(path, share=(rank, 2)) for rank in range(2)]
    assert found.count(None) == 1
    assert "__0_0.distcp has changed since it was written" in str(found)


# -- lists ---------------------------------------------------------------------------------


def test_all_are_listed_with_their_condition(run_dir: RunDir) -> None:
    save_checkpoint(run_dir, 40, ema=True, layout="full", world_size=4)
    set_aside(run_dir.checkpoint(20), "rewound")
    set_aside(run_dir.checkpoint(10), "damaged")
    (run_dir.checkpoint(40) / "__0_0.distcp").write_bytes(b"short")
    (run_dir.checkpoints / ".step-50.tmp").mkdir()
    (run_dir.checkpoint(60)).mkdir()
    found = {one.name: one for one in list_all(run_dir)}
    assert {name: one.health for name, one in found.items()} == {
        "step-10.damaged": "set aside (damaged)",
        "step-20.rewound": "set aside (rewound)",
        "step-30": "complete",
        "step-40": "damaged: __0_0.distcp has 5 bytes, not 1000",
        "step-60": "damaged: no readable manifest",
    }
    assert list(found) == sorted(found)
    assert [name for name, one in found.items() if one.next] == ["step-30"]
    full = found["step-40"]
    assert (full.layout, full.world_size, full.ema) == ("full", 4, True)
    assert (found["step-60"].layout, found["step-60"].bytes) == (None, 0)
    assert json.loads(json.dumps(full.to_dict()))["health"] == full.health


def test_verifying_reads_every_byte_and_says_so(run_dir: RunDir) -> None:
    spoil(run_dir.checkpoint(20))
    read: list[int] = []
    found = [verify(one, read.append) for one in list_all(run_dir)]
    assert [one.health for one in found] == [
        "verified",
        "damaged: __0_0.distcp has changed since it was written",
        "verified",
    ]
    files = [path for one in found[::2] for path in one.path.glob("[!m]*")]
    read.clear()
    for one in found[::2]:
        verify(one, read.append)
    assert sum(read) == sum(path.stat().st_size for path in files) > 2000


def test_one_that_is_deleted_while_it_is_verified_is_not_called_damaged(run_dir: RunDir) -> None:
    listed = list_all(run_dir)
    delete(run_dir.checkpoint(10))
    with pytest.raises(NotFoundError, match="step-10 has been deleted"):
        verify(listed[0])


def test_verifying_is_given_up_when_told(run_dir: RunDir) -> None:
    class Enough(Exception):
        pass

    def stop(count: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        verify(list_all(run_dir)[0], stop)


@pytest.mark.parametrize("name", ["20", "step-20", " step-20/", "020"])
def test_a_checkpoint_is_named_in_several_ways(run_dir: RunDir, name: str) -> None:
    assert find_listed(list_all(run_dir), name, "it").step == 20


@pytest.mark.parametrize("name", ["25", "step-20.rewound", "../step-20", "step-", "", "²"])
def test_a_name_of_none_is_refused_with_those_there_are(run_dir: RunDir, name: str) -> None:
    with pytest.raises(NotFoundError, match="there are step-10, step-20, step-30"):
        find_listed(list_all(run_dir), name, "it")


def test_a_run_whose_directory_is_gone_has_none(tmp_path: Path) -> None:
    gone = RunDir(tmp_path / "gone")
    assert list_all(gone) == []
    assert free_bytes(gone) is None
    assert free_bytes(RunDir(tmp_path)) is not None


# -- deleting ------------------------------------------------------------------------------


def test_checkpoints_are_deleted_by_step_and_by_name(
    store: Store, ended: Callable[..., Job]
) -> None:
    job = ended(10, 20, 30)
    set_aside(job.run_dir.checkpoint(20), "rewound")
    service.delete_checkpoints(store, job.id, ["30", "step-20.rewound", "30"])
    assert names(job.run_dir) == ["step-10"]


def test_nothing_is_deleted_when_one_name_is_wrong(store: Store, ended: Callable[..., Job]) -> None:
    job = ended(10, 20)
    with pytest.raises(NotFoundError, match="job 1 has no checkpoint step-25; there are step-10"):
        service.delete_checkpoints(store, job.id, ["10", "25"])
    assert names(job.run_dir) == ["step-10", "step-20"]


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING])
def test_a_live_job_keeps_its_newest(store: Store, ended: Callable[..., Job], state: State) -> None:
    job = ended(10, 20, 30)
    store.requeue(job.id, "")
    if state is State.RUNNING:
        store.claim(job.id, [], "")
        store.change(job.id, state, "")
    (job.run_dir.checkpoint(30) / "__0_0.distcp").unlink()
    with pytest.raises(StateError, match=f"is {state}, and step-20 is its newest complete"):
        service.delete_checkpoints(store, job.id, ["20"])
    service.delete_checkpoints(store, job.id, ["30", "10"])
    assert names(job.run_dir) == ["step-20"]


def test_what_cannot_be_deleted_is_told(
    store: Store, ended: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ended(10, 20)

    real = os.replace

    def refuse(source: Path, target: Path) -> None:
        if source.name == "step-20":
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UserError, match=r"cannot delete .*step-20 \(Permission denied\)"):
        service.delete_checkpoints(store, job.id, ["10", "20"])
    assert names(job.run_dir) == ["step-10", "step-20"]


def test_what_is_left_of_one_that_was_deleted_is_said(
    store: Store, ended: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ended(10, 20)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    with pytest.raises(UserError, match=r"step-10 deleted, but not all of .*\.tmp could be"):
        service.delete_checkpoints(store, job.id, ["10"])
    assert [step for step, _ in job.run_dir.complete_checkpoints()] == [20]


# -- going back ----------------------------------------------------------------------------


def test_a_job_goes_back_to_an_earlier_checkpoint(store: Store, ended: Callable[..., Job]) -> None:
    job = ended(10, 20, 30)
    plan = plan_resume(store, job.id, back_to=10)
    assert plan.begin is not None
    assert (plan.begin.step, [one.step for one in plan.rewound]) == (10, [20, 30])
    assert names(job.run_dir) == ["step-10", "step-20", "step-30"], "a plan touches nothing"
    service.resume(store, job.id, back_to=10)
    assert names(job.run_dir) == ["step-10", "step-20.rewound", "step-30.rewound"]
    reasons = [change.reason for change in store.history(job.id)]
    assert "resumed after step 10; newer checkpoints are set aside (20, 30)" in reasons


def test_a_job_begins_anew(store: Store, ended: Callable[..., Job]) -> None:
    job = ended(10, 20)
    service.resume(store, job.id, back_to=0)
    assert names(job.run_dir) == ["step-10.rewound", "step-20.rewound"]
    assert any("restarted from step 0" in c.reason for c in store.history(job.id))


@pytest.mark.parametrize(
    ("changes", "back_to", "said"),
    [
        ({}, 25, "job 1 has no checkpoint of step 25; there are 10, 20, 30"),
        ({"lora_rank": "4"}, 10, "cannot resume from step-10: lora_rank: .* set lora_rank to 16"),
        ({"optimizer": "sgd", "model_type": "full"}, 10, "optimizer: .*; model_type: |model_type"),
        ({"dataset": "/no/such"}, 10, "no such dataset folder"),
        ({"max_train_steps": "5"}, 10, "has already trained 10 of 5 steps"),
        ({"resume_from_checkpoint": "1:20"}, 10, "its own checkpoints, which take precedence"),
    ],
)
def test_nothing_is_set_aside_for_a_resume_that_is_refused(
    store: Store, ended: Callable[..., Job], changes: dict[str, str], back_to: int, said: str
) -> None:
    job = ended(10, 20, 30)
    text = job.run_dir.job_file.read_text()
    with pytest.raises(UserError, match=said):
        service.resume(store, job.id, changes, back_to=back_to)
    assert names(job.run_dir) == ["step-10", "step-20", "step-30"]
    assert job.run_dir.job_file.read_text() == text
    assert store.get(job.id).state is State.STOPPED


def test_a_job_file_that_cannot_be_written_undoes_the_rewinding(
    store: Store, ended: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ended(10, 20)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jobs.service.write_atomic", full)
    with pytest.raises(UserError, match="No space left"):
        service.resume(store, job.id, {"seed": "7"}, back_to=10)
    assert names(job.run_dir) == ["step-10", "step-20"]
    assert store.get(job.id).state is State.STOPPED


def test_of_two_that_resume_at_once_one_does(store: Store, ended: Callable[..., Job]) -> None:
    """The other's rewinding must not take checkpoints away from a job that runs."""
    job = ended(10, 20, 30)
    plans = [plan_resume(store, job.id), plan_resume(store, job.id, back_to=10)]
    together, outcomes = threading.Barrier(2), []

    def carry_out(number: int) -> None:
        together.wait()
        try:
            service.carry_out(store, plans[number])
            outcomes.append(number)
        except StateError:
            pass

    threads = [threading.Thread(target=carry_out, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = outcomes
    expected = [
        ["step-10", "step-20", "step-30"],
        ["step-10", "step-20.rewound", "step-30.rewound"],
    ]
    assert names(job.run_dir) == expected[first]


def test_a_late_resume_sets_nothing_aside(store: Store, ended: Callable[..., Job]) -> None:
    job = ended(10, 20)
    plan = plan_resume(store, job.id, back_to=10)
    service.resume(store, job.id)
    with pytest.raises(StateError):
        service.carry_out(store, plan)
    assert names(job.run_dir) == ["step-10", "step-20"]


def test_what_a_resume_changes_is_found_from_the_checkpoint(
    store: Store, ended: Callable[..., Job]
) -> None:
    job = ended(10, 20, learning_rate=1e-3)
    service.resume(store, job.id, {"learning_rate": "0.0005", "num_processes": "4"})
    store.change(job.id, State.STOPPED, "")
    save_checkpoint(job.run_dir, 30, load_spec(job.run_dir.job_file).to_dict())
    assert plan_resume(store, job.id).changes == []
    assert plan_resume(store, job.id, back_to=20).changes == [
        "learning_rate: 0.001 → 0.0005",
        "the global batch: 2 → 4, so steps train on different samples",
    ]


# -- beginning from another job ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step"),
    [("1", 30), ("#1", 30), ("1:20", 20), ("1:step-20", 20), ("1:checkpoint-10", 10), (" 1 ", 30)],
)
def test_a_job_begins_from_another(
    store: Store, ended: Callable[..., Job], job_spec: JobSpec, text: str, step: int
) -> None:
    source = ended(10, 20, 30)
    spec = job_spec.model_copy(update={"resume_from_checkpoint": text, "max_train_steps": 100})
    job = service.submit(store, spec)
    kept = load_spec(job.run_dir.job_file).resume_from_checkpoint
    assert kept == str(source.run_dir.checkpoint(step).resolve())
    assert origin_of(job) == source.run_dir.checkpoint(step).resolve()
    plan = plan_submit(store, spec)
    assert plan.begin is not None
    assert plan.begin.step == step


def test_a_path_names_a_checkpoint_or_a_run(store: Store, ended: Callable[..., Job]) -> None:
    run = ended(10, 20).run_dir
    assert find_origin(store, str(run.root)).step == 20
    assert find_origin(store, str(run.checkpoints)).step == 20
    assert find_origin(store, str(run.checkpoint(10))).step == 10
    aside = set_aside(run.checkpoint(20), "rewound")
    assert find_origin(store, str(aside)).step == 20


def test_a_path_is_found_from_the_working_directory(
    store: Store, ended: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(10).run_dir
    monkeypatch.chdir(run.root)
    assert find_origin(store, "checkpoints/step-10").path == run.checkpoint(10)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7", "no job 7"),
        ("1:25", "job 1 has no checkpoint of step 25; there are 10, 20"),
        ("1:abc", '"abc" is not a step'),
        ("1:20", r"job 1: step-20 is damaged \(__0_0.distcp is missing\)"),
        ("2", "job 2 has no checkpoint"),
        ("latest", "resumes from its own newest checkpoint"),
        ("/no/such/path", "no checkpoint /no/such/path; use ID, ID:STEP or a path"),
        ("DATA", "is neither a complete checkpoint nor a run directory"),
        ("BROKEN", r"step-20 is damaged \(__0_0.distcp is missing\)"),
    ],
)
def test_what_names_no_checkpoint_is_one_sentence(
    store: Store, ended: Callable[..., Job], job_spec: JobSpec, text: str, said: str
) -> None:
    run = ended(10, 20).run_dir
    ended()
    (run.checkpoint(20) / "__0_0.distcp").unlink()
    text = {"DATA": job_spec.dataset, "BROKEN": str(run.checkpoint(20))}.get(text, text)
    spec = job_spec.model_copy(update={"resume_from_checkpoint": text, "max_train_steps": 100})
    with pytest.raises(UserError, match=said) as caught:
        service.submit(store, spec)
    assert str(caught.value).startswith("resume_from_checkpoint: ")
    assert "\n" not in str(caught.value)
    assert len(store.all()) == 2, "nothing was queued"


def test_a_new_job_must_fit_the_checkpoint(
    store: Store, ended: Callable[..., Job], job_spec: JobSpec
) -> None:
    ended(10, 20, learning_rate=1e-3)
    begin = {"resume_from_checkpoint": "1", "max_train_steps": 100}
    with pytest.raises(UserError, match="cannot resume from step-20: lora_rank"):
        service.submit(store, job_spec.model_copy(update=begin | {"lora_rank": 4}))
    with pytest.raises(UserError, match="max_train_steps: 20 must be greater than the 20 steps"):
        service.submit(store, job_spec.model_copy(update=begin | {"max_train_steps": 20}))
    plan = plan_submit(store, job_spec.model_copy(update=begin | {"seed": 7}))
    assert plan.changes == ["learning_rate: 0.001 → 0.0001", "seed: 42 → 7"]


def test_a_checkpoint_that_says_nothing_of_its_job_can_be_used(
    store: Store, ended: Callable[..., Job]
) -> None:
    job = ended(10)
    (job.run_dir.checkpoint(10) / "trainer_state.json").write_text("[]")
    manifest = json.loads((job.run_dir.checkpoint(10) / MANIFEST).read_text())
    del manifest["files"]["trainer_state.json"]
    (job.run_dir.checkpoint(10) / MANIFEST).write_text(json.dumps(manifest))
    assert plan_resume(store, job.id, {"lora_rank": "4"}).changes == []


def test_a_source_that_still_runs_and_deletes_is_told(
    store: Store, ended: Callable[..., Job], job_spec: JobSpec
) -> None:
    begin = {"resume_from_checkpoint": "1:20", "max_train_steps": 100}
    spec = job_spec.model_copy(update=begin)
    source = ended(10, 20, checkpoints_total_limit=2)
    assert plan_submit(store, spec).warnings == []
    store.requeue(source.id, "")
    store.claim(source.id, [], "")
    (warning,) = plan_submit(store, spec).warnings
    assert warning.startswith(
        "job 1 is still running and keeps only its newest 2 checkpoints; step-20"
    )
    source.run_dir.job_file.write_text("checkpoints_total_limit: [")
    assert plan_submit(store, spec).warnings == []


# -- who needs what ------------------------------------------------------------------------


@pytest.fixture
def waiting(store: Store, ended: Callable[..., Job], job_spec: JobSpec) -> tuple[Job, Job]:
    """A job, and one that waits to begin from its checkpoint of step 20."""
    source = ended(10, 20, 30)
    store.pause(True)
    begin = {"resume_from_checkpoint": "1:20", "max_train_steps": 100}
    return source, service.submit(store, job_spec.model_copy(update=begin))


def test_what_a_waiting_job_begins_from_stays(store: Store, waiting: tuple[Job, Job]) -> None:
    source, job = waiting
    said = rf"job {job.id} \(queued\) is set to start from .*step-20; stop job {job.id} first"
    with pytest.raises(StateError, match=said):
        service.remove(store, source.id)
    ended_later = service.submit(store, load_spec(source.run_dir.job_file))
    service.stop(store, ended_later.id)
    with pytest.raises(StateError, match=said):
        service.prune(store, 0)
    assert len(store.all()) == 3, "not even the one that nobody needs"
    with pytest.raises(StateError, match=said):
        service.delete_checkpoints(store, source.id, ["30", "20"])
    with pytest.raises(StateError, match=said):
        service.resume(store, source.id, back_to=10)
    assert names(source.run_dir) == ["step-10", "step-20", "step-30"]
    assert store.get(source.id).state is State.STOPPED
    service.delete_checkpoints(store, source.id, ["30", "10"])


def test_a_job_that_came_while_going_back_was_considered_keeps_its_beginning(
    store: Store, ended: Callable[..., Job], job_spec: JobSpec
) -> None:
    source = ended(10, 20, 30)
    plan = plan_resume(store, source.id, back_to=10)
    store.pause(True)
    begin = {"resume_from_checkpoint": "1:20", "max_train_steps": 100}
    service.submit(store, job_spec.model_copy(update=begin))
    with pytest.raises(StateError, match="is set to start from"):
        service.carry_out(store, plan)
    assert names(source.run_dir) == ["step-10", "step-20", "step-30"]
    assert store.get(source.id).state is State.STOPPED


def test_a_resume_that_may_delete_what_another_begins_from_is_told(
    store: Store, waiting: tuple[Job, Job]
) -> None:
    source, job = waiting
    assert plan_resume(store, source.id).warnings == []
    (warning,) = plan_resume(store, source.id, {"checkpoints_total_limit": 2}).warnings
    assert warning.startswith(f"job {job.id} will start from step-20 of this job")
    save_checkpoint(job.run_dir, 25)
    assert plan_resume(store, source.id, {"checkpoints_total_limit": 2}).warnings == []


def test_what_it_has_begun_from_may_go(store: Store, waiting: tuple[Job, Job]) -> None:
    source, job = waiting
    save_checkpoint(job.run_dir, 25)
    service.delete_checkpoints(store, source.id, ["20"])
    service.remove(store, source.id)


def test_what_an_ended_job_began_from_may_go_and_is_missed_when_it_is_resumed(
    store: Store, waiting: tuple[Job, Job]
) -> None:
    source, job = waiting
    service.stop(store, job.id)
    service.remove(store, source.id)
    with pytest.raises(UserError, match=r"no checkpoint .*step-20"):
        service.resume(store, job.id)
    service.resume(store, job.id, {"resume_from_checkpoint": "none"})
    assert load_spec(job.run_dir.job_file).resume_from_checkpoint is None


def test_files_that_are_kept_are_nobody_s_loss(store: Store, waiting: tuple[Job, Job]) -> None:
    source, _ = waiting
    service.remove(store, source.id, files=False)
    assert names(source.run_dir) == ["step-10", "step-20", "step-30"]


def test_a_job_file_that_cannot_be_read_needs_nothing(
    store: Store, waiting: tuple[Job, Job]
) -> None:
    source, job = waiting
    job.run_dir.job_file.write_text("resume_from_checkpoint: [")
    assert origin_of(job) is None
    job.run_dir.job_file.unlink()
    service.delete_checkpoints(store, source.id, ["20"])


@pytest.mark.parametrize("text", ["20", "step-20", "Step_20", "checkpoint-20", " step-20/ "])
def test_a_step_is_written_in_several_ways(text: str) -> None:
    assert read_step(text) == 20


@pytest.mark.parametrize("text", ["", "-1", "2.5", "step-", "20x", "step-20.rewound"])
def test_what_is_no_step_is_told(text: str) -> None:
    with pytest.raises(UserError, match="is not a step; use a number"):
        read_step(text)


def test_a_submitted_job_is_its_file(store: Store, ended: Callable[..., Job]) -> None:
    """A job file that was written for one job can be submitted again."""
    source = ended(10)
    text = dump_spec(load_spec(source.run_dir.job_file, {"resume_from_checkpoint": "1:10"}))
    path = source.run_dir.root / "again.yaml"
    path.write_text(text)
    first = service.submit(store, load_spec(path))
    again = service.submit(store, load_spec(first.run_dir.job_file))
    assert first.run_dir.job_file.read_text() == again.run_dir.job_file.read_text()


@pytest.mark.parametrize("key", ["step", "bytes", "time"])
def test_a_manifest_with_an_endless_number_is_of_no_checkpoint(tmp_path: Path, key: str) -> None:
    run_dir = RunDir(tmp_path)
    manifest = save_checkpoint(run_dir, 5) / MANIFEST
    facts = json.loads(manifest.read_text())
    named = next(iter(facts["files"].values())) if key == "bytes" else facts
    named[key] = 10**400 if key == "time" else float("inf")
    manifest.write_text(json.dumps(facts))
    assert [one.damage for one in list_all(run_dir)] == ["no readable manifest"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\ud800", r"'\ud800'"),
        ("a\0b", r"'a\x00b'"),
        ("/dev/zero", "'/dev/zero'"),
        ("../step-4/a", "'../step-4/a'"),
        (".", "'.'"),
        ("", "''"),
        ("x" * 256, f"'{'x' * 60}'"),
    ],
)
def test_a_manifest_lists_files_of_its_checkpoint_alone(
    tmp_path: Path, name: str, shown: str
) -> None:
    run_dir = RunDir(tmp_path)
    manifest = save_checkpoint(run_dir, 5) / MANIFEST
    facts = json.loads(manifest.read_text())
    facts["files"][name] = {"bytes": 1, "sha256": ""}
    manifest.write_text(json.dumps(facts))
    said = f"its manifest lists {shown}, which is not a file of it"
    assert [one.damage for one in list_all(run_dir)] == [said]
    assert newest_whole(run_dir) is None


def test_what_is_listed_is_a_file(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    path = save_checkpoint(run_dir, 5)
    facts = json.loads((path / MANIFEST).read_text())
    os.mkfifo(path / "pipe")
    facts["files"]["pipe"] = {"bytes": 0, "sha256": ""}
    (path / MANIFEST).write_text(json.dumps(facts))
    assert find_damage(path) == "pipe is not a file"
