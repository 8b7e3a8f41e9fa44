"""A place that nobody thought of: a folder, and nothing else, runs jobs of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import jobs.backends
from jobs import service
from jobs.backends import backend, keeper, names
from jobs.backends.local.dispatch import dispatch, needs_attention
from jobs.errors import StateError, UserError
from jobs.queue.job import Terms
from jobs.queue.states import State
from jobs.run.rundir import event
from jobs.spec.file.load import dump_spec
from tests.support.jobs.checkpoints import save_checkpoint
from tui.dashboard.jobs_panel import job_groups
from tui.look.collector import where_of
from tui.look.snapshot import JobView

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

# Its ranks are lines of a file, which it runs one at a time, in the keeper's process.
BACKEND = """
from jobs.queue.states import State
from jobs.spec.file.load import load_spec
from jobs.supervise.port import Attempt, Outcome
from jobs.supervise.supervisor import Supervisor


class Ranks:
    def __init__(self, job, train):
        self.job, self.train = job, train

    def adopt(self):
        return None

    def launch(self, restarts):
        spec = load_spec(self.job.run_dir.job_file)
        self.alive = iter([True, True, False])
        attempt = Attempt(spec, "by hand", None, self, 0, restarts, 0)
        return attempt

    def poll(self):
        return None if next(self.alive) else 0

    def rest(self, attempt):
        self.train(self.job.run_dir)

    def leave_if_replaced(self):
        pass

    def gone(self, statuses):
        return set()

    def dump_stacks(self, statuses):
        pass

    def terminate(self, attempt):
        pass

    def kill(self, attempt, ranks=None):
        pass

    def clean_up(self, attempt, *, healthy, stop_request):
        return False

    def end_all(self):
        pass

    def must_end(self):
        return ""

    def reconsider(self, outcome, give_up):
        return outcome

    def conclude(self, outcome):
        return outcome


class Report:
    def __init__(self, store, job):
        self.store, self.job, self.lines = store, job, []

    def stop_request(self):
        return self.store.get(self.job.id).stop_level

    def set_state(self, state, reason):
        self.store.change(self.job.id, state, reason)

    def warn(self, text):
        pass

    def heartbeat(self, ranks):
        pass

    def end(self, outcome):
        self.store.change(self.job.id, outcome.state, outcome.reason)

    def log(self, text):
        self.lines.append(text)


class Paper:
    name, title, hold_hint = "paper", "Paper", "put a stone on it"
    lock, log = "paper.lock", "paper.log"
    train = print

    def request(self, spec):
        return ["paper"]

    def warnings(self, spec):
        return []

    def keeper(self, store):
        def look():
            mine = [j for j in store.all() if j.backend == "paper" and not j.state.ended]
            for job in mine:
                if job.state is State.QUEUED and not job.passed_over:
                    store.change(job.id, State.STARTING, "sharpens its pencil")
                    report = Report(store, job)
                    Supervisor(job.run_dir, Ranks(job, self.train), report).run()
            return bool(mine)

        return look

    def holds(self, job):
        return "a drawer" if (job.run_dir.root / "filed").exists() else ""

    def stop(self, store, job, *, now):
        store.raise_stop_level(job.id, 1)
        return "crossed out"

    def facts(self, store, job):
        return {"sheet": 7}

    def restore(self, run_dir):
        return {}

    def by_hand(self, spec):
        return "a letter"


BACKEND = Paper()
"""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder, beside the project's own."""
    (tmp_path / "more" / "paper").mkdir(parents=True)
    (tmp_path / "more" / "paper" / "__init__.py").touch()
    (tmp_path / "more" / "paper" / "backend.py").write_text(BACKEND)
    monkeypatch.setattr(
        jobs.backends, "__path__", [*jobs.backends.__path__, str(tmp_path / "more")]
    )
    backend.cache_clear()
    yield
    backend.cache_clear()


@pytest.fixture
def job(store: Store, job_spec: JobSpec, paper: None) -> Job:
    def prepare(run_dir: RunDir) -> None:
        service.write_job_file(run_dir, dump_spec(job_spec))

    wanted = backend("paper").request(job_spec)
    return store.add(name="t", terms=Terms.of(job_spec, wanted), run_id="x", prepare=prepare)


def test_it_is_known_by_its_folder(paper: None) -> None:
    assert names() == ("local", "slurm", "paper")
    assert backend("paper").title == "Paper"


def test_its_job_runs_from_its_queue_to_its_end(
    store: Store, job: Job, job_spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run_dir: RunDir) -> None:
        if run_dir.latest_checkpoint() is None:
            save_checkpoint(run_dir, 5)
        run_dir.events.write_text(event("end", reason="completed", step=5))

    monkeypatch.setattr(backend("paper"), "train", train)
    assert backend("paper").keeper(store)()
    assert not backend("paper").keeper(store)(), "nothing is left to do"
    ended = store.get(job.id)
    assert (ended.state, ended.reason) == (State.COMPLETED, "trained 5 steps")
    assert [change.after for change in store.history(job.id)] == [
        State.QUEUED,
        State.STARTING,
        State.COMPLETED,
    ]


def test_nobody_else_touches_its_job(store: Store, job: Job, started: list[int]) -> None:
    assert not needs_attention(store)
    dispatch(store)
    assert started == []
    assert store.get(job.id).state is State.QUEUED
    assert store.unended_backends() == {"paper"}


def test_a_person_sees_and_moves_it_like_any_other(store: Store, job: Job) -> None:
    assert where_of(job, []) == f"paper×{job.ranks}"
    assert [group.title for group in job_groups([JobView(job, where="")], [])] == ["Paper"]
    (job.run_dir.root / "filed").touch()
    with pytest.raises(StateError, match="in a drawer"):
        service.hold(store, job.id)
    assert service.stop(store, job.id) == "crossed out"
    (job.run_dir.root / "filed").unlink()
    assert service.stop(store, job.id) == f"job {job.id} was removed from the queue"


def test_its_queue_may_take_a_running_job_back(store: Store, job: Job) -> None:
    store.change(job.id, State.STARTING, "")
    store.change(job.id, State.RUNNING, "")
    store.change(job.id, State.QUEUED, "the ink ran out")
    assert store.get(job.id).reason == "the ink ran out"


def test_jobs_of_a_place_that_is_gone_end_no_keeper(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a downgrade: they wait, and local jobs go on."""
    monkeypatch.setattr(jobs.backends, "__path__", jobs.backends.__path__[:1])
    backend.cache_clear()
    asked: list[str] = []
    monkeypatch.setattr(keeper, "ensure", lambda store, place: asked.append(place.name))
    assert keeper.ensure_keepers(store)
    assert asked == ["local"]
    assert [group.title for group in job_groups([JobView(job)], [])] == ["paper"]
    assert backend(job.backend).facts(store, job) == {}
    store.change(job.id, State.STARTING, "")
    with pytest.raises(UserError, match="no launcher 'paper'"):
        service.stop(store, job.id)
    store.change(job.id, State.QUEUED, "")
    assert service.stop(store, job.id) == f"job {job.id} was removed from the queue"
