"""The process that asks Slurm, against a fake one: every state, and what goes wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.backends import backend
from jobs.backends import keeper as keeping
from jobs.backends.local.dispatch import dispatch, needs_attention
from jobs.backends.slurm import commands, records, settle
from jobs.backends.slurm import hand_in as handing
from jobs.backends.slurm import keeper as asking
from jobs.backends.slurm import keeper as placing
from jobs.backends.slurm.commands import Waiting
from jobs.backends.slurm.keeper import Keeper, queue_positions
from jobs.backends.slurm.records import (
    Allocation,
    Submission,
    WardenReport,
    outcome_file,
    read_submission,
    requested_stop,
    slurm_facts,
    warden_file,
    write_submission,
    write_warden_report,
)
from jobs.backends.slurm.script import script_of
from jobs.errors import SpecError, StateError, UserError
from jobs.hub.wanted import note, noted
from jobs.machine import file_lock
from jobs.queue.states import State
from jobs.service import edit
from jobs.service.plan import plan_change, plan_submit
from jobs.service.repair import repair
from jobs.spec.file.load import load_spec
from jobs.spec.values.hub_names import HubName
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.many_slurm_jobs import as_squeue, many_slurm_jobs
from tests.support.waiting import PATIENCE
from tui.text.tables import slurm_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.store import Job, Store
    from jobs.service.plan import Plan
    from tests.support.jobs.fake_slurm import FakeSlurm

    Submit = Callable[..., Job]


def says(job: Job, state: State, reason: str, *, restart: int = 0, slurm_id: str = "1") -> None:
    """What the warden in the allocation would write."""
    said = WardenReport(Allocation(slurm_id, restart), state, reason)
    job.run_dir.create()
    write_warden_report(
        outcome_file(job.run_dir) if state.ended else warden_file(job.run_dir), said
    )


def counted(function: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    """The same function, which adds each of its calls."""

    def count(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return function(*args, **more)

    return count


def path(store: Store, job: Job) -> list[str]:
    return [str(change.after) for change in store.history(job.id)]


def test_a_job_from_the_queue_to_its_end(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job = submit()
    dispatch(store)
    assert not needs_attention(store), "dashboards need not take the queue for it every second"
    keeper.look()
    assert slurm.ids() == ["1"]
    keeper.look()
    assert store.get(job.id).reason == "Slurm job 1 waits"
    assert slurm.calls("sbatch") == 1
    slurm.set("1", "RUNNING", nodes="n[1-2]")
    keeper.look()
    assert store.get(job.id).state is State.STARTING
    assert "on n[1-2]" in store.get(job.id).reason
    assert store.get(job.id).started is not None
    says(job, State.RUNNING, "all ranks are up")
    keeper.look()
    assert store.get(job.id).state is State.RUNNING
    facts = slurm_facts(store, job)["slurm"]
    assert (facts["job"], facts["state"], facts["nodes"]) == ("1", "RUNNING", "n[1-2]")
    assert 0 <= facts["age"] < PATIENCE
    assert slurm_line(facts | {"age": 12.0}) == "job 1, RUNNING on n[1-2], asked 0:12 ago"
    says(job, State.COMPLETED, "trained 6 steps")
    slurm.set("1", "COMPLETED")
    keeper.look()
    assert store.get(job.id).state is State.COMPLETED
    assert path(store, job) == ["queued", "starting", "running", "completed"]
    asked = slurm.calls("squeue")
    assert not keeper.look()
    assert slurm.calls("squeue") == asked, "nothing is left to ask about"


def test_exports_are_pushed_from_here(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes often have no network. Begun while it runs; at its end again, if that was cut off."""
    monkeypatch.setattr("jobs.preflight.check_job._check_push", lambda spec: None)
    pushed: list[int] = []
    monkeypatch.setattr(asking, "start_push", lambda spec, job: pushed.append(job.id))
    job = submit(push_to_hub=True)
    keeper.look()
    slurm.set("1", "RUNNING")
    keeper.look()
    assert pushed == []
    says(job, State.RUNNING, "all ranks are up")
    keeper.look()
    keeper.look()
    assert pushed == [job.id]
    says(job, State.COMPLETED, "trained 6 steps")
    slurm.set("1", "COMPLETED")
    keeper.look()
    assert pushed == [job.id] * 2


def test_a_job_that_was_faster_than_we_looked(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job = submit()
    keeper.look()
    says(job, State.COMPLETED, "trained 6 steps")
    slurm.set("1", "COMPLETED")
    keeper.look()
    assert path(store, job) == ["queued", "starting", "completed"]


def test_slurm_puts_a_job_back_into_its_queue(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """After the time limit, a preemption, or a node failure: the same job, not ended."""
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    says(job, State.STOPPING, "time limit; stopped at step 4, saved; requeueing")
    keeper.look()
    assert store.get(job.id).state is State.STOPPING
    slurm.set("1", "PENDING", restarts=1, reason="BeginTime")
    keeper.look()
    assert store.get(job.id).state is State.QUEUED
    slurm.set("1", "RUNNING")
    keeper.look()
    assert store.get(job.id).state is State.STARTING, "the warden's word is of the time before"
    says(job, State.RUNNING, "all ranks are up", restart=1)
    keeper.look()
    assert store.get(job.id).state is State.RUNNING
    assert slurm.calls("sbatch") == 1
    assert store.get(job.id).attempt == 0


@pytest.mark.parametrize(
    ("state", "ends", "words"),
    [
        ("CANCELLED", State.STOPPED, "stopped; resume continues after step 4"),
        ("TIMEOUT", State.LOST, "the time limit ended the job; resume continues after step 4"),
        ("NODE_FAIL", State.LOST, "a node failed"),
        ("OUT_OF_MEMORY", State.FAILED, "a node ran out of memory"),
        ("FAILED", State.FAILED, "the batch script failed: no module named jobs"),
    ],
)
def test_how_slurm_ends_jobs(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    state: str,
    ends: State,
    words: str,
) -> None:
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    says(job, State.RUNNING, "all ranks are up")
    keeper.look()
    save_checkpoint(job.run_dir, 4)
    (job.run_dir.supervisor_log).write_text("no module named jobs\n")
    slurm.set("1", state)
    keeper.look()
    assert store.get(job.id).state is ends
    assert words in store.get(job.id).reason


def test_a_lost_job_is_handed_in_again_where_it_asks_for_that(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job = submit(auto_resume=True, slurm_requeue=False)
    keeper.look()
    slurm.set("1", "NODE_FAIL")
    keeper.look()
    keeper.look()
    assert slurm.ids() == ["1", "2"]
    assert slurm.get("1", "state") == "NODE_FAIL", "Slurm had finished with it"
    slurm.set("2", "TIMEOUT")
    keeper.look()
    assert store.get(job.id).state is State.LOST, "no allocation is long enough for a checkpoint"
    assert slurm.ids() == ["1", "2"]


def test_a_preempted_job_is_not_lost_while_slurm_puts_it_back(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, strftime=time.strftime)
    monkeypatch.setattr(asking, "time", clock)
    job = submit()
    keeper.look()
    slurm.set("1", "PREEMPTED")
    keeper.look()
    assert store.get(job.id).state is State.QUEUED
    slurm.set("1", "PENDING", restarts=1)
    keeper.look()
    assert store.get(job.id).state is State.QUEUED
    assert "requeued 1 time" in store.get(job.id).reason
    slurm.set("1", "RUNNING")
    keeper.look()
    now[0] += asking.BACK_WITHIN
    slurm.set("1", "PREEMPTED", restarts=1)
    keeper.look()
    assert store.get(job.id).state is State.STARTING, "the second time takes as long"
    now[0] += asking.BACK_WITHIN
    slurm.away()
    keeper.look()
    assert store.get(job.id).state is State.STARTING, "nobody knows"
    slurm.away(away=False)
    keeper.look()
    assert store.get(job.id).state is State.LOST, "this cluster does not put it back"
    assert slurm.get("1", "state") == "CANCELLED", "and cannot put it back later"


def test_the_controller_is_away(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job, later = submit(), submit(name="later")
    store.hold(later.id, True)
    keeper.look()
    slurm.set("1", "RUNNING")
    says(job, State.RUNNING, "all ranks are up")
    keeper.look()
    slurm.away()
    store.hold(later.id, False)
    keeper.look()
    assert store.get(job.id).state is State.RUNNING
    assert "all ranks are up; Slurm has not responded for" in store.get(job.id).reason
    assert "handed in later" in store.get(later.id).reason
    slurm.away(away=False)
    keeper.look()
    assert store.get(job.id).reason == "all ranks are up"
    assert slurm.ids() == ["1", "2"]


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a job that Slurm does not list no time to come back."""
    for name in ("UNKNOWN_FOR", "PENDING_UNKNOWN_FOR"):
        monkeypatch.setattr(settle, name, 0.0)
    monkeypatch.setattr(placing, "ASK_AFTER", 0.0)


def test_a_number_that_slurm_gives_again_is_not_missing_since_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller that was killed has forgotten its newest job, which is resumed after that."""
    monkeypatch.setattr(commands, "state_of", lambda slurm_id: "")
    missing = placing.MissingJobs()
    before, after = Submission("fsdp-tui-3-0", 0, "8"), Submission("fsdp-tui-3-1", 1, "8")
    missing.look(before, None, 0.0, other=False)
    assert missing.look(before, None, 400.0, other=False) == (400.0, True)
    assert missing.look(after, None, 401.0, other=False) == (0.0, False)


@pytest.mark.parametrize("listing", ["", "all nodes are down for maintenance\n", "1\x1fx\n"])
def test_a_list_without_our_job_is_no_evidence(
    listing: str,
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Empty, or not to be read: asked by its number, Slurm knows it."""
    waits, runs = submit(), submit(name="runs")
    keeper.look()
    slurm.set("2", "RUNNING")
    keeper.look()
    slurm.say("listing", listing)
    at_once(monkeypatch)
    for _ in range(5):
        keeper.look()
    assert store.get(waits.id).state is State.QUEUED
    assert store.get(runs.id).state is State.STARTING
    assert slurm.calls("scancel") == 0
    slurm.say("listing", None)
    keeper.look()
    assert store.get(waits.id).reason == "Slurm job 1 waits"


def test_variables_of_a_shell_reach_no_command(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SQUEUE_PARTITION", "SBATCH_PARTITION", "SLURM_CLUSTERS", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SOMETHING_ELSE", "y")
    kept = commands.environment()
    assert {"SLURM_CONF", "SOMETHING_ELSE", "PATH"} <= kept.keys()
    assert not {"SQUEUE_PARTITION", "SBATCH_PARTITION", "SLURM_CLUSTERS"} & kept.keys()


def test_slurm_forgets_a_job(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = submit()
    keeper.look()
    slurm.forget("1")
    keeper.look()
    assert store.get(job.id).state is State.QUEUED
    at_once(monkeypatch)
    keeper.look()
    assert store.get(job.id).state is State.LOST
    assert "Slurm no longer knows job 1" in store.get(job.id).reason


def test_slurm_gives_a_number_again(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is killed forgets what it took last: someone else gets the number."""
    job = submit()
    keeper.look()
    slurm.set("1", "COMPLETED", name="someone-elses")
    keeper.look()
    assert store.get(job.id).state is State.QUEUED, "that was not our end"
    assert "state" not in slurm_facts(store, job)["slurm"]
    slurm.set("1", "RUNNING")
    service.stop(store, job.id, now=True)
    at_once(monkeypatch)
    keeper.look()
    assert store.get(job.id).state is State.STOPPED
    again = service.resume(store, job.id, {"auto_resume": False})
    write_submission(job.run_dir, Submission("lost", again.attempt, "1"))
    keeper.look()
    assert store.get(job.id).state is State.LOST
    assert slurm.get("1", "state") == "RUNNING", "and is not ours to cancel"


def test_slurm_refuses_a_job(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    slurm.say("refuse", "sbatch: error: Batch job submission failed: Invalid account\n")
    job = submit()
    keeper.look()
    assert store.get(job.id).state is State.FAILED
    assert "Slurm refused the job: Batch job submission failed: Invalid" in store.get(job.id).reason
    slurm.say("refuse", None)
    service.resume(store, job.id)
    keeper.look()
    assert slurm.ids() == ["1"]


def test_what_must_be_fetched_comes_before_slurm(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine fetches it; then the job is looked at again, and handed in."""
    job, other = submit(), submit(name="other")
    said = {job.run_dir: ("waiting for its model: 3 of 9 GiB", False), other.run_dir: ("", False)}
    monkeypatch.setattr(asking, "why_waiting", said.__getitem__)
    name = HubName.read("model", "org/name")
    assert name is not None
    note(job.run_dir, [name])
    keeper.look()
    assert store.get(job.id).reason == "waiting for its model: 3 of 9 GiB"
    assert slurm.ids() == ["1"], "it holds up no other"
    said[job.run_dir] = "", False
    keeper.look()
    assert noted(job.run_dir) == []
    assert slurm.ids() == ["1", "2"]
    gone = submit(name="gone")
    said[gone.run_dir] = "its model could not be fetched: no access", True
    keeper.look()
    assert store.get(gone.id).state is State.FAILED


def test_a_job_file_that_cannot_be_read_holds_up_no_other(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    broken, gone, good = submit(), submit(name="gone"), submit(name="good")
    broken.run_dir.job_file.write_text("no_such_key: 1\n")
    gone.run_dir.job_file.unlink()
    keeper.look()
    assert slurm.ids() == ["1"]
    assert read_submission(good.run_dir) is not None
    assert store.get(broken.id).state is State.FAILED
    assert 'unknown key "no_such_key"' in store.get(broken.id).reason
    assert store.get(gone.id).state is State.FAILED
    assert "no such" in store.get(gone.id).reason


def test_a_job_whose_database_is_busy_holds_up_no_other(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    good = submit(name="good")
    look_after = keeper._update

    def busy_once(job: Job, *, paused: bool) -> None:
        if job.id != good.id:
            raise UserError("the database is busy")
        look_after(job, paused=paused)

    monkeypatch.setattr(keeper, "_update", busy_once)
    keeper.look()
    assert read_submission(good.run_dir) is not None


def test_a_job_whose_keeper_was_killed_is_handed_in_once(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """It died between sbatch and the record; the name says whose job it is."""
    job = submit()
    keeper.look()
    handed = read_submission(job.run_dir)
    assert handed is not None
    write_submission(job.run_dir, Submission(handed.name, handed.attempt))
    Keeper(store, ask_every=0.0).look()
    assert slurm.ids() == ["1"]
    assert read_submission(job.run_dir) == handed


def test_a_job_whose_sbatch_outlives_its_keeper_is_handed_in_once(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """The next keeper's answer is from before: Slurm is asked again once that sbatch has ended."""
    job = submit()
    keeper.look()
    handed = read_submission(job.run_dir)
    assert handed is not None
    write_submission(job.run_dir, Submission(handed.name, handed.attempt))
    slurm.forget("1")
    following = Keeper(store, ask_every=1e9)
    with open(job.run_dir.root / ".handing-in", "a") as lock:
        assert file_lock.acquire(lock)
        following.look()
        (slurm.root / "forgotten-1").rename(slurm.root / "jobs/1")
    slurm.away()
    following.look()
    assert read_submission(job.run_dir) == Submission(handed.name, handed.attempt), "nobody knows"
    slurm.away(away=False)
    following._unreachable_since = None
    following.look()
    assert slurm.ids() == ["1"]
    assert read_submission(job.run_dir) == handed


def test_sbatch_gives_up_but_slurm_has_the_job(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    slurm.say("mute", "")
    job = submit()
    keeper.look()
    slurm.say("mute", None)
    keeper.look()
    keeper.look()
    assert slurm.ids() == ["1"]
    assert store.get(job.id).reason == "Slurm job 1 waits"


def test_a_second_slurm_job_of_the_same_name_is_cancelled(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    submit()
    keeper.look()
    slurm.root.joinpath("jobs/2").mkdir()
    for column in ("name", "reason", "restarts", "starts", "nodes"):
        slurm.root.joinpath("jobs/2", column).write_text(slurm.get("1", column))
    slurm.set("2", "PENDING")
    keeper.look()
    assert [slurm.get(one, "state") for one in slurm.ids()] == ["PENDING", "CANCELLED"]


def test_a_job_that_was_handed_in_cannot_be_edited(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would run here too, or in Slurm by an old script."""
    job = submit()
    before = load_spec(job.run_dir.job_file)
    after = before.model_copy(update={"max_train_steps": 9})

    def hand_in_meanwhile(*args: Any) -> Plan:
        plan = plan_change(*args)
        keeper.look()
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(edit, "plan_change", hand_in_meanwhile)
        with pytest.raises(StateError, match="in Slurm's queue; stop it first, then resume it"):
            edit.change(store, job.id, after, before)
    assert slurm.ids() == ["1"]
    assert load_spec(job.run_dir.job_file) == before
    with pytest.raises(StateError, match="in Slurm's queue"):
        plan_change(store, job.id, after)
    service.stop(store, job.id)
    keeper.look()
    keeper.look()
    service.resume(store, job.id)
    edit.change(store, job.id, after, before)
    assert load_spec(job.run_dir.job_file) == after


@pytest.mark.parametrize("what", ["edited", "made local", "held", "stopped"])
def test_what_changes_while_a_job_is_handed_in(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """The keeper looks again right before sbatch, and the next look goes by what is now."""
    job = submit()
    write_script = script_of
    before = load_spec(job.run_dir.job_file)
    local = {"launcher": "local", "num_machines": 1}

    def change(*args: Any, **more: Any) -> str:
        text = write_script(*args, **more)
        monkeypatch.setattr(handing, "script_of", write_script)
        if what == "held":
            service.hold(store, job.id)
        elif what == "stopped":
            service.stop(store, job.id)
        else:
            values = local if what == "made local" else {"num_machines": 4}
            edit.change(store, job.id, load_spec(job.run_dir.job_file, values), before)
        return text

    monkeypatch.setattr("jobs.service.dispatch", lambda store: None)
    monkeypatch.setattr("jobs.service.ensure_keepers", lambda store: None)
    monkeypatch.setattr(handing, "script_of", change)
    keeper.look()
    assert slurm.ids() == []
    assert read_submission(job.run_dir) is None
    keeper.look()
    assert slurm.ids() == (["1"] if what == "edited" else [])
    if what == "edited":
        assert "--nodes=4" in (slurm.root / "jobs/1/script").read_text()


def test_a_later_stage_is_handed_in_when_the_one_before_has_completed(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """It waits in our queue: there it may follow local jobs, and ones that are resumed."""
    spec = load_spec(submit().run_dir.job_file)
    service.carry_out(store, plan_submit(store, spec, (), [1]))
    keeper.look()
    assert slurm.ids() == ["1"]
    assert store.get(2).reason == "after job 1, which is queued"
    slurm.set("1", "RUNNING")
    slurm.set("1", "FAILED")
    keeper.look()
    keeper.look()
    assert slurm.ids() == ["1"]
    assert "resume job 1, or release this job" in store.get(2).reason
    service.hold(store, 2, False)
    keeper.look()
    assert slurm.ids() == ["1", "2"]


def test_stop_before_it_is_handed_in(store: Store, slurm: FakeSlurm, submit: Submit) -> None:
    job = submit()
    assert "removed from the queue" in service.stop(store, job.id)
    assert store.get(job.id).state is State.STOPPED
    Keeper(store).look()
    assert slurm.ids() == []


@pytest.mark.parametrize("has_it", [True, False])
def test_stop_after_sbatch_gave_up(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper, has_it: bool
) -> None:
    """Nobody knows yet whether Slurm has the job; it is never handed in again."""
    job = submit()
    slurm.say("mute", "")
    keeper.look()
    slurm.say("mute", None)
    slurm.away()
    if not has_it:
        slurm.forget("1")
    assert "taken out of Slurm's queue" in service.stop(store, job.id)
    store.pause(True)
    keeper.look()
    assert store.get(job.id).state is State.QUEUED
    assert "Slurm does not respond" in store.get(job.id).reason
    slurm.away(away=False)
    with open(job.run_dir.root / ".handing-in", "a") as lock:
        assert file_lock.acquire(lock)
        keeper.look()
        assert store.get(job.id).state is State.QUEUED, "sbatch of an earlier keeper still runs"
    for _ in range(3):
        keeper.look()
    assert store.get(job.id).state is State.STOPPED
    assert requested_stop(job.run_dir, 0) == 1, "a warden that starts all the same stops"
    assert slurm.calls("sbatch") == 1
    if has_it:
        assert slurm.get("1", "state") == "CANCELLED"


def test_stop_while_it_waits_in_slurm(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job = submit()
    keeper.look()
    with pytest.raises(StateError, match="scontrol hold"):
        service.hold(store, job.id)
    assert "taken out of Slurm's queue" in service.stop(store, job.id)
    keeper.look()
    keeper.look()
    assert store.get(job.id).state is State.STOPPED


def test_stop_in_three_levels(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    says(job, State.RUNNING, "all ranks are up")
    keeper.look()
    for level, words in enumerate(("after the current step", "SIGTERM", "is cancelled"), 1):
        assert words in service.stop(store, job.id)
        assert requested_stop(job.run_dir, 0) == level
        keeper.look()
        assert slurm.get("1", "state") == ("CANCELLED" if level == 3 else "RUNNING")
    keeper.look()
    assert store.get(job.id).state is State.STOPPED
    service.resume(store, job.id)
    keeper.look()
    assert requested_stop(store.get(job.id).run_dir, 1) == 0, "the next attempt was not asked"
    assert slurm.ids() == ["1", "2"]
    service.stop(store, job.id, now=True)
    keeper.look()
    keeper.look()
    service.remove(store, job.id)
    assert not job.run_dir.root.exists()


def test_a_stopped_job_that_slurm_preempts_does_not_come_back(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    says(job, State.RUNNING, "all ranks are up")
    keeper.look()
    service.stop(store, job.id)
    slurm.set("1", "PENDING", restarts=1)
    keeper.look()
    keeper.look()
    assert store.get(job.id).state is State.STOPPED
    assert slurm.get("1", "state") == "CANCELLED"


def test_the_runner_sees_that_somebody_asks_slurm(
    store: Store, submit: Submit, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(keeping, "ensure", lambda store, place: asked.append(place.name))
    store.pause(True)
    service.submit(store, load_spec(None, job_values))
    assert keeping.ensure_keepers(store, running="local")
    assert asked == [], "local jobs need nobody who does"
    job = submit()
    assert keeping.ensure_keepers(store, running="local")
    assert asked == ["slurm"]
    service.stop(store, job.id)
    assert keeping.ensure_keepers(store, running="local")
    assert asked == ["slurm"]


def test_a_rebuilt_database_finds_its_jobs_in_slurm(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """One runs, one has ended meanwhile; neither is handed in again."""
    runs, done = submit(), submit(name="done")
    keeper.look()
    slurm.set("1", "RUNNING")
    slurm.set("2", "COMPLETED")
    says(runs, State.RUNNING, "all ranks are up")
    says(done, State.COMPLETED, "trained 6 steps", slurm_id="2")
    store.path.write_bytes(b"no database")
    for side in ("-wal", "-shm"):
        store.path.with_name(f"jobs.db{side}").unlink(missing_ok=True)
    assert repair(store.home).restored == (1, 2)
    Keeper(store, ask_every=0.0).look()
    assert store.get(runs.id).state is State.RUNNING
    assert store.get(done.id).state is State.COMPLETED
    assert slurm.ids() == ["1", "2"]


def test_only_the_keeper_asks_slurm(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """Whoever lists jobs reads what it wrote: a controller that hangs holds nobody up."""
    job = submit()
    keeper.look()
    slurm.away()
    asked = (slurm.root / "calls").read_text()
    service.refresh(store)
    service.as_dicts(store, store.all(), [])
    slurm_facts(store, store.get(job.id))
    assert (slurm.root / "calls").read_text() == asked


def test_a_keeper_of_older_code_makes_way(
    store: Store, slurm: FakeSlurm, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    changed, started = iter([1.0, 1.0, 2.0, 3.0, 3.0]), list[str]()
    monkeypatch.setattr(keeping, "ensure", lambda store, place: started.append(place.name))
    monkeypatch.setattr(keeping, "newest_code", lambda: next(changed))
    monkeypatch.setattr(keeping, "_CODE_INTERVAL", 0.0)
    monkeypatch.setattr(keeping, "POLL_INTERVAL", 0.0)
    keeping.keep(store, backend("slurm"))
    assert slurm.ids() == ["1"], "it worked until then"
    assert started == ["slurm"], "the next goes on"


def test_one_question_for_hundreds_of_jobs(
    store: Store, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One an interval; jobs that wait as before cost no file and no row."""
    now = [time.monotonic()]
    opened: list[object] = []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, strftime=time.strftime)
    monkeypatch.setattr(asking, "time", clock)
    for room, name in (
        (records, "read_submission"),
        (records, "read_warden_report"),
        (asking, "move"),
    ):
        monkeypatch.setattr(room, name, counted(getattr(room, name), opened))
    listed = many_slurm_jobs(store, 200)
    listed[7] = replace(listed[7], state="RUNNING", reason="", nodes="n1")
    slurm.say("listing", as_squeue(listed))
    keeper = Keeper(store)

    def look(seconds: int) -> int:
        opened.clear()
        for _ in range(seconds):
            keeper.look()
            now[0] += keeping.POLL_INTERVAL
        return len(opened)

    look(3)
    assert {job.reason for job in store.all()} == {
        *(f"Slurm job {job.id}: other jobs go first" for job in store.all() if job.id != 8),
        "Slurm job 8 starts on n1",
    }
    rows, before = keeper._rows.look(), slurm.calls("squeue --noheader --me")
    assert look(60) <= 60 * 5, "the files of the one that runs"
    assert slurm.calls("squeue --noheader --me") - before == 60 / asking.ASK_EVERY
    assert keeper._rows.look() is rows, "nothing was written"
    slurm.say("listing", as_squeue([*listed[:-1], replace(listed[-1], reason="Resources")]))
    look(16)
    assert store.get(200).reason == "Slurm job 200: waiting for free nodes"
    slurm.away()
    look(80)
    assert "has not responded for" in store.get(200).reason
    assert look(30) < 30 * 200, "nor while Slurm is silent, until the age is said differently"


def test_a_waiting_job_says_its_place_in_the_queue(
    store: Store, slurm: FakeSlurm, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, strftime=time.strftime)
    monkeypatch.setattr(asking, "time", clock)
    keeper, job, question = Keeper(store), submit(), "squeue --noheader --states=PENDING"
    slurm.say("waiting", "90|gpu|500|Resources\n1|gpu|10|Priority\n80|gpu|900|Dependency\n")

    def look(seconds: float) -> str:
        now[0] += seconds
        keeper.look()
        return store.get(job.id).reason

    keeper.look()
    slurm.set("1", "PENDING", reason="Priority", starts="2027-01-02T03:04:05")
    look(20)
    expected = "; expected to start 2027-01-02 03:04"
    assert look(20) == f"Slurm job 1: other jobs go first; place 2 of 2 in gpu{expected}"
    asked = slurm.calls(question)
    slurm.say("waiting", "1|gpu|10|Priority\n")
    look(20)
    assert slurm.calls(question) == asked, "once a minute is enough"
    assert "; place 1 of 1 in gpu; " in look(60)
    assert slurm_facts(store, job)["slurm"]["place"] == "1 of 1 in gpu"
    slurm.set("1", "RUNNING", nodes="n1")
    assert look(20) == "Slurm job 1 starts on n1"
    asked = slurm.calls(question)
    look(100)
    assert slurm.calls(question) == asked, "none waits"


def test_places_follow_priority_and_leave_out_who_is_held() -> None:
    found = queue_positions(
        [
            Waiting("100", ("gpu",), 5, "Priority"),
            Waiting("99", ("gpu", "long"), 5, "Priority"),
            Waiting("7_[1-4]", ("long",), 9, "Resources"),
            Waiting("5", ("gpu",), 99, "JobHeldUser"),
            Waiting("6", ("gpu",), 7, "QOSMaxJobsPerUserLimit"),
        ]
    )
    assert found == {
        "6": "1 of 3 in gpu",
        "99": "2 of 3 in gpu",
        "100": "3 of 3 in gpu",
        "7_[1-4]": "1 of 2 in long",
    }


def test_only_one_process_asks_slurm(store: Store, slurm: FakeSlurm, submit: Submit) -> None:
    submit()
    with open(store.home / backend("slurm").lock, "a") as lock:
        assert file_lock.acquire(lock)
        keeping.keep(store, backend("slurm"))
    assert slurm.calls("squeue") == 0


def test_what_a_slurm_job_may_not_say(
    job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    more = job_values | {"launcher": "slurm", "num_machines": 2, "num_processes": 4}
    for changes, words in (
        ({"gpus": 4}, "Slurm chooses the GPUs"),
        ({"accelerate_extra_args": ["--debug"]}, "use slurm_srun_args"),
        ({"num_processes": 3}, "cannot be divided evenly"),
        ({"machine_rank": 1}, "machine_rank is set by Slurm"),
        ({"slurm_extra_args": "--nodes=3"}, "--nodes is set by num_machines"),
        ({"slurm_extra_args": "-p gpu"}, "-p is set by slurm_partition"),
        ({"slurm_srun_args": "--kill-on-bad-exit"}, "is set by the launcher"),
        ({"slurm_time": "soon"}, "is not a time"),
    ):
        with pytest.raises(SpecError, match=words):
            load_spec(None, more | changes)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SpecError, match="sbatch is not installed"):
        service.submit(store, load_spec(None, more))
