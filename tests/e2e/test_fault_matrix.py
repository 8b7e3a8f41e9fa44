"""Everything is killed, at every moment, for real; afterwards all that is shown is true.

Launcher and ranks are light fakes; dashboard, runner and supervisor are the real ones. Behind the
job that suffers another one waits. The matrix is printed as a table at the end.
"""

from __future__ import annotations

import hashlib
import os
import pty
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs import service
from jobs.backends import backend
from jobs.backends import keeper as runner
from jobs.machine.processes import ProcessId, with_run_id
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.run.eventlog import EventLog
from jobs.run.rundir import MANIFEST, RunDir, read_json
from tests.support.jobs.fakes.rank import publish_checkpoint, write_data
from tests.support.jobs.fakes.supervise import start_supervisor
from tests.support.jobs.lab import ENDLESS, opened
from tests.support.paths import SUPPORT
from tests.support.tui.terminal import Reader
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.queue.store import Job
    from tests.support.jobs.lab import Lab

SEEDED: Final = 4  # the step of the checkpoint that is there before anything happens
HELD_AT: Final = 6  # the step at which a job is `mid-run`
SAVES_AT: Final = 8  # the step of the save that is disturbed
SITE: Final = SUPPORT / "jobs" / "fakes" / "site"
TARGETS: Final = ("dashboard", "runner", "supervisor", "launcher", "rank 0", "rank 1")
MOMENTS: Final = ("start", "mid-run", "save")
# Each target and each moment is in the fast tier: with the whole machine these are its seven.
FAST: Final = {
    ("dashboard", "mid-run"),
    ("runner", "start"),
    ("supervisor", "save"),
    ("launcher", "mid-run"),
    ("rank 0", "save"),
    ("rank 1", "start"),
}
CELLS: Final = [
    pytest.param(target, moment, marks=[] if (target, moment) in FAST else pytest.mark.slow)
    for target in TARGETS
    for moment in MOMENTS
]


@dataclass
class Row:
    """One line of the matrix."""

    fault: str
    moment: str
    true_after: str = "–"
    state: str = "–"
    reason: str = "–"
    following: str = "–"
    checkpoint: str = "–"
    left: str = "–"


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """The rows; printed when all are there."""
    rows: list[Row] = []
    yield rows
    heads = ["fault", "moment", "true after", "state", "next job", "newest ckpt", "left", "reason"]
    lines = [heads] + [
        [r.fault, r.moment, r.true_after, r.state, r.following, r.checkpoint, r.left, r.reason]
        for r in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        for line in lines:
            print("  ".join(f"{word:{width}}" for word, width in zip(line, widths, strict=True)))


@dataclass
class Bed:
    """One job that suffers, one that waits behind it, and who else looks after them."""

    lab: Lab
    gates: Path
    job: Job
    following: Job
    row: Row
    checkpoints: dict[str, str] = field(default_factory=dict)

    # -- before ----------------------------------------------------------------------------

    def bring_to(self, moment: str) -> None:
        """Wait until the job is there; it stays there until it is let go on."""
        run_dir = self.job.run_dir
        self.lab.wait_for_ranks(self.job, 2)
        assert self.lab.get(self.job).state is State.STARTING
        if moment == "start":
            return
        self.open("start")
        if moment == "mid-run":
            self.lab.wait(self.job, State.RUNNING)
            self.lab.wait_for_step(self.job, HELD_AT)
            return
        self.open("train")
        eventually(
            lambda: {(s.phase, s.step) for s in run_dir.rank_statuses()} == {("save", SAVES_AT)},
            told=self.told,
        )
        eventually((run_dir.checkpoints / f".step-{SAVES_AT}.tmp" / "data.bin").exists)

    def open(self, *gates: str) -> None:
        for gate in gates:
            (self.gates / gate).touch()

    def go_on(self) -> None:
        self.open("start", "train", "save")

    # -- after -----------------------------------------------------------------------------

    def look_until_true(self) -> None:
        """The next look, and then the time until what is shown is what is.

        One look is enough: nobody looks again meanwhile. How long it takes is a matter of the
        machine, and in the table that is printed; on a quiet one it is less than two seconds.
        """
        begun = time.monotonic()
        service.refresh(self.lab.store)
        eventually(self.is_true, told=self.told)
        self.row.true_after = f"{time.monotonic() - begun:.2f} s"

    def is_true(self) -> bool:
        """An active state if processes of the run live, and only then."""
        before = self.lab.get(self.job)
        living = with_run_id(self.job.run_id)
        now = self.lab.get(self.job)
        assert not (before.state.ended and living), f"{before.state}, but {living} live"
        return before.state is now.state and now.state.active == bool(living)

    def until_the_end(self, *states: State) -> Job:
        """Everyone looks now and then; it must end like this, and the next job must complete."""

        def ended() -> bool:
            service.refresh(self.lab.store)
            now = self.lab.get(self.job)
            if now.state.ended:
                assert not with_run_id(now.run_id), f"{now.state}, but something is left"
            return now.state.ended

        eventually(ended, told=self.told)
        job = self.lab.get(self.job)
        self.row.state, self.row.reason = str(job.state), job.reason
        assert job.state in states, job.reason
        assert "\n" not in job.reason
        assert "Traceback" not in job.reason
        self.following_completes()
        self.nothing_is_left()
        self.checkpoints_are_intact()
        return job

    def following_completes(self) -> None:
        def ended() -> bool:
            service.refresh(self.lab.store)
            return self.lab.get(self.following).state.ended

        eventually(ended, told=lambda: self.lab.get(self.following))
        following = self.lab.get(self.following)
        self.row.following = str(following.state)
        assert following.state is State.COMPLETED, following.reason
        changes = [change.after for change in self.lab.store.history(following.id)]
        assert changes.count(State.STARTING) == 1
        assert following.run_dir.supervisor_log.read_text().count(" launched ") == 1
        assert following.run_dir.events.read_text().count('"start"') == 1
        self.row.following += " once"

    def nothing_is_left(self) -> None:
        left = [p for job in (self.job, self.following) for p in with_run_id(job.run_id)]
        self.row.left = str(len(left))
        assert left == []

    def checkpoints_are_intact(self) -> None:
        newest = self.job.run_dir.latest_checkpoint()
        assert newest is not None
        now = hashes(self.job.run_dir)
        assert self.checkpoints.items() <= now.items(), "what was there is there, unchanged"
        for _, path in self.job.run_dir.complete_checkpoints():
            manifest = read_json(path / MANIFEST)
            assert manifest is not None
            assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {MANIFEST}
            for name, facts in manifest["files"].items():
                assert hash_of(path / name) == facts["sha256"], path
        self.row.checkpoint = f"step {newest[0]} intact"

    def told(self) -> str:
        return f"{self.lab.get(self.job)}\n{self.job.run_dir.supervisor_log.read_text()}"


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(run_dir: RunDir) -> dict[str, str]:
    """Every file of every complete checkpoint, and its hash."""
    return {
        str(file): hash_of(file)
        for _, path in run_dir.complete_checkpoints()
        for file in path.iterdir()
    }


def seed_checkpoint(run_dir: RunDir) -> None:
    """A complete checkpoint of an earlier attempt; the ranks go on after it."""
    aside = run_dir.checkpoints / f".step-{SEEDED}.tmp"
    aside.mkdir(parents=True)
    write_data(aside, SEEDED)
    publish_checkpoint(aside, run_dir.checkpoint(SEEDED), SEEDED)


@pytest.fixture
def lab(
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    with opened(store, job_values, monkeypatch, tmp_path / "gates") as made:
        made.set(step_seconds="0.01", failure_grace="0", lockstep="1", save_every=str(SAVES_AT))
        made.set(ranks=f"hold@{HELD_AT}")
        yield made


def prepare(lab: Lab, rows: list[Row], fault: str, moment: str, **job: Any) -> Bed:
    """A job with an older checkpoint that is about to start, and one that waits behind it."""
    lab.set(gates=str(lab.gates))
    row = Row(fault, moment)
    rows.append(row)
    values = {"name": "suffers", "max_train_steps": 16, "stop_grace_seconds": 5.0} | job
    suffers = lab.submit_unsupervised(**values)
    following = lab.submit_unsupervised(name="following", num_processes=1, max_train_steps=2)
    assert suffers.state is State.STARTING
    assert following.state is State.QUEUED
    seed_checkpoint(suffers.run_dir)
    start_supervisor(suffers)
    return Bed(lab, lab.gates, suffers, following, row, hashes(suffers.run_dir))


@dataclass
class Dashboard:
    """A real dashboard on a terminal of its own."""

    process: ProcessId
    child: subprocess.Popen[bytes]
    terminal: Reader
    shown: bytearray

    @classmethod
    def opened(cls) -> Dashboard:
        terminal, other_end = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-m", "tui"],
            stdin=other_end,
            stdout=other_end,
            stderr=other_end,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(other_end)
        process = ProcessId.of(child.pid)
        assert process is not None
        shown = bytearray()
        made = cls(process, child, Reader(terminal, shown.extend), shown)
        eventually(lambda: b"suffers" in made.shown, told=lambda: bytes(made.shown[-2000:]))
        return made


def _own_terminal() -> None:
    """What a terminal emulator does: this terminal's hang-up is the session's."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def runner_of(home: Path) -> ProcessId:
    """The process that the newest line `started` in the runner's log names."""
    log = home / "runner.log"
    eventually(lambda: log.exists() and "started" in log.read_text())
    line = [line for line in log.read_text().splitlines() if "] started" in line][-1]
    found = ProcessId.of(int(line.split("[")[1].split("]")[0]))
    assert found is not None
    return found


# -- one process is killed -----------------------------------------------------------------


@pytest.mark.parametrize(("target", "moment"), CELLS)
def test_one_is_killed(lab: Lab, matrix: list[Row], target: str, moment: str) -> None:
    bed = prepare(lab, matrix, f"SIGKILL {target}", moment)
    victim: ProcessId | None = None
    if target == "dashboard":
        dashboard = Dashboard.opened()
        victim = dashboard.process
    elif target == "runner":
        runner.ensure(lab.store, backend("local"))
        victim = runner_of(lab.store.home)
    bed.bring_to(moment)
    if victim is None:
        victim = {
            "supervisor": lambda: lab.supervisor(bed.job),
            "launcher": lambda: lab.launcher(bed.job),
            "rank 0": lambda: lab.rank(bed.job, 0),
            "rank 1": lambda: lab.rank(bed.job, 1),
        }[target]()
    lab.kill(victim)
    if target == "dashboard":
        dashboard.child.wait()
        dashboard.terminal.close()
    if target == "runner":
        runner.ensure(lab.store, backend("local"))
        eventually(lambda: (lab.store.home / "runner.log").read_text().count("started") == 2)
        assert runner_of(lab.store.home) != victim
    bed.look_until_true()
    bed.go_on()

    if target in ("dashboard", "runner", "supervisor"):
        job = bed.until_the_end(State.COMPLETED)
        assert job.reason == "trained 16 steps"
        assert steps(job) == list(range(SEEDED + 1, 17)), "not one step twice"
        return
    job = bed.until_the_end(State.FAILED)
    assert f"{'the launcher' if target == 'launcher' else target} was killed by SIGKILL" in (
        job.reason
    )
    if target != "launcher":
        assert {"start": "start", "mid-run": "train", "save": "save"}[moment] in job.reason
        newest = job.run_dir.latest_checkpoint()
        assert newest is not None
        assert moment == "mid-run" or newest[0] == SEEDED, "the cut-off save left nothing"


def steps(job: Job) -> list[int]:
    return [record.step for record in EventLog(job.run_dir.events).read_all().steps]


# -- signals to all ------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_gets_a_hang_up(lab: Lab, matrix: list[Row]) -> None:
    """Sent to each process; all go on, since what a supervisor ignores its children ignore."""
    bed = prepare(lab, matrix, "SIGHUP everything", "mid-run")
    runner.ensure(lab.store, backend("local"))
    keeper = runner_of(lab.store.home)
    bed.bring_to("mid-run")
    everyone = [keeper, lab.supervisor(bed.job), *with_run_id(bed.job.run_id)]
    assert len(everyone) == 5
    lab.kill(*everyone, number=signal.SIGHUP)
    bed.look_until_true()
    assert all(process.alive() for process in everyone)
    bed.go_on()
    job = bed.until_the_end(State.COMPLETED)
    assert steps(job) == list(range(SEEDED + 1, 17))
    assert lab.supervisor(bed.job) == everyone[1], "it was not replaced"


@pytest.mark.slow
def test_the_terminal_is_closed(lab: Lab, matrix: list[Row]) -> None:
    """As when an SSH connection drops: only the dashboard notices."""
    bed = prepare(lab, matrix, "SIGHUP terminal closed", "mid-run")
    dashboard = Dashboard.opened()
    bed.bring_to("mid-run")
    dashboard.terminal.close()
    dashboard.child.wait(PATIENCE)
    bed.look_until_true()
    bed.go_on()
    job = bed.until_the_end(State.COMPLETED)
    assert steps(job) == list(range(SEEDED + 1, 17))


def test_everything_is_killed(lab: Lab, matrix: list[Row]) -> None:
    """Supervisor, launcher and ranks at once, in the middle of a save."""
    bed = prepare(lab, matrix, "SIGKILL everything", "save")
    bed.bring_to("save")
    lab.kill_everything(bed.job)
    bed.go_on()
    bed.look_until_true()
    job = bed.until_the_end(State.LOST)
    assert job.reason == f"all processes were killed; resume continues after step {SEEDED}"


@pytest.mark.slow
def test_a_rank_is_suspended(lab: Lab, matrix: list[Row]) -> None:
    bed = prepare(
        lab,
        matrix,
        "SIGSTOP rank 1",
        "mid-run",
        max_train_steps=ENDLESS,
        hang_timeout=60,
    )
    bed.bring_to("mid-run")
    lab.kill(lab.rank(bed.job, 1), number=signal.SIGSTOP)
    bed.go_on()
    bed.open("haste")
    bed.look_until_true()
    job = bed.until_the_end(State.FAILED)
    assert job.reason.startswith("hang: rank 1 sent no heartbeat")


# -- the machine ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """The state directory, on a file system of 8 MiB."""
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "none", str(home)],
            capture_output=True,
            text=True,
            check=False,
        )
        if shutil.which("mount")
        else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted and mounted.stderr.strip()}")
    try:
        yield home
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


@pytest.mark.slow
def test_the_disk_is_full_while_saving(
    small_disk: Path,
    job_values: dict[str, Any],
    no_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    matrix: list[Row],
) -> None:
    """3 MiB of an older checkpoint fit, 6 MiB more do not; the 1.5 MiB of the next job do."""
    with opened(Store(small_disk), job_values, monkeypatch, tmp_path / "gates") as lab:
        lab.set(step_seconds="0.01", failure_grace="0", lockstep="1")
        lab.set(save_every=str(SAVES_AT), step_bytes=str(768 << 10))
        bed = prepare(lab, matrix, "disk full", "save")
        bed.go_on()
        data = bed.job.run_dir.checkpoints / f".step-{SAVES_AT}.tmp" / "data.bin"
        eventually(lambda: free(small_disk) == 0 and data.exists(), told=bed.told)
        try:
            bed.look_until_true()
        finally:
            bed.open("full")
        bed.look_until_true()
        job = bed.until_the_end(State.FAILED)
        assert job.reason == (
            f"rank 0 failed at step {SAVES_AT} during save:"
            " OSError: [Errno 28] No space left on device"
        )


def free(path: Path) -> int:
    return shutil.disk_usage(path).free


@pytest.mark.slow
@pytest.mark.parametrize("auto_resume", [False, True], ids=["stays lost", "auto_resume"])
def test_the_state_directory_of_a_machine_that_was_restarted(
    lab: Lab, tmp_path: Path, matrix: list[Row], auto_resume: bool
) -> None:
    """The state directory as it was in the middle of the run, under another boot id."""
    fault = "reboot, auto_resume" if auto_resume else "reboot"
    bed = prepare(lab, matrix, fault, "save", auto_resume=auto_resume)
    bed.bring_to("save")
    home = lab.store.home
    for process in (lab.supervisor(bed.job), *with_run_id(bed.job.run_id)):
        assert process.signal(signal.SIGSTOP)
    shutil.copytree(home, tmp_path / "copy")
    lab.kill_everything(bed.job)
    shutil.rmtree(home)
    (tmp_path / "copy").rename(home)
    with closing(sqlite3.connect(home / "jobs.db")) as db:
        # Also the worst of luck: the pid of the dead supervisor belongs to someone else now.
        db.execute(
            "UPDATE jobs SET boot_id='earlier', supervisor_pid=? WHERE id=?",
            (os.getpid(), bed.job.id),
        )
        db.commit()
    bed.go_on()
    bed.look_until_true()
    if not auto_resume:
        job = bed.until_the_end(State.LOST)
        assert job.reason == "the machine rebooted"
        assert job.run_dir.latest_checkpoint() == (SEEDED, job.run_dir.checkpoint(SEEDED))
        return
    assert "resumed after a reboot" in lab.reasons(bed.job)
    bed.following_completes()
    lab.wait(bed.job, State.COMPLETED, look=True)
    job = bed.until_the_end(State.COMPLETED)
    assert steps(job) == list(range(SEEDED + 1, 17))
    assert job.attempt == 1
