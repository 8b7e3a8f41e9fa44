"""Random faults on jobs of fake ranks in a real Slurm: `python -m tests.campaign slurm`.

SLURM_CONF must name a Slurm that may be broken: all its daemons run on this machine, and this is
their user. Several campaigns may share it, each with its own seed, and disturb each other.

Whatever happens: the state agrees with Slurm, each attempt is one Slurm job, no checkpoint is lost
or damaged, no step is trained by two allocations, nothing is left running, and the job can be
resumed to its end.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs import service
from jobs.backends import backend
from jobs.backends.keeper import ensure
from jobs.backends.slurm import commands
from jobs.backends.slurm.records import read_submission
from jobs.backends.slurm.settle import ALIVE, LAUNCH_FAILED, LOST
from jobs.errors import StateError
from jobs.machine.processes import ProcessId
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.run.checkpoint_files import list_all, verify
from jobs.spec.file.load import load_spec
from jobs.supervise.port import UnreachableError
from tests.campaign.faults import Broken, job_values, load
from tests.campaign.journal import dice
from tests.support.left_over import end_all_of, name_of, processes_of
from tests.support.paths import ROOT

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from jobs.backends.slurm.commands import Listed
    from jobs.queue.store import Job
    from tests.campaign.journal import Journal

TRUE_WITHIN: Final = 15.0  # seconds: a preempted job may come back for ten
ENDS_WITHIN: Final = 420.0  # seconds; Slurm starts a job that was put back after 2 minutes
LETS_GO_WITHIN: Final = 5.0  # seconds until ranks notice that they have been superseded
APPEARS_WITHIN: Final = 20.0  # seconds
DOWN_FOR: Final = 15.0  # seconds of a node; SlurmdTimeout should be less
ASK_EVERY: Final = 2.0  # seconds between two questions to Slurm, of the keeper and of ours
TRIES: Final = 12
_STEPS: Final = 60
_SHOWN: Final[dict[str, set[str]]] = {
    "PENDING": {"queued"},
    "RUNNING": {"starting", "running", "saving", "stopping"},
}


def trial(journal: Journal, number: int) -> None:
    """One job, its faults, and what became of it."""
    rng = dice("slurm", journal.seed, number)
    one = Trial(_store(), rng)
    began = time.monotonic()
    try:
        one.run()
    except SystemExit:
        one.give_up()
        raise
    except Exception as error:
        one.keep_files()
        one.give_up()
        what = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        journal.note(number, "+".join(one.done) or "none", f"{what}{error} after {one.done}")
    else:
        seconds = round(time.monotonic() - began, 1)
        journal.note(number, "+".join(sorted(one.done)) or "none", seconds=seconds, ends=one.ends)


@cache
def _store() -> Store:
    """One state directory for all trials, and so one process that asks Slurm."""
    folder = tempfile.TemporaryDirectory(prefix="campaign-slurm-")
    root = Path(folder.name)
    for name in ("home", "cache", "config"):
        (root / name).mkdir(mode=0o700)
    patch = pytest.MonkeyPatch()
    patch.setenv("FSDP_TUI_HOME", str(root / "home"))
    patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    patch.setenv("XDG_CONFIG_HOME", str(root / "config"))
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("FSDP_TUI_SLURM_INTERVAL", str(ASK_EVERY))
    patch.setenv("FAKE_LOCKSTEP", "1")
    patch.setattr("jobs.service.ensure_keepers", lambda store: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # or nobody would clean up
    atexit.register(folder.cleanup)
    atexit.register(end_all_of, root)
    return Store(root / "home")


@dataclass
class Trial:
    """A job, and what was seen of it.

    Attributes:
        store: Where it is.
        rng: What happens.
        done: Faults, in order.
        ends: States in which it has ended.
    """

    store: Store
    rng: random.Random
    done: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    job: Job = field(init=False)
    newest: int = 0
    untrue_since: float | None = None
    looked_at: float = 0.0
    urgent: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Submit it, disturb it, resume it, and look at what it left behind."""
        rng = self.rng
        _revive()
        self.job = service.submit(self.store, load_spec(None, self._settings()))
        for attempt in range(TRIES):
            faults = rng.choice((1, 1, 2, 3)) if attempt == 0 else int(rng.random() < 0.3)
            for _ in range(faults):
                self._watch(rng.random() * 4)
                if self.now.state.ended:
                    break
                self._disturb(rng.choice(list(FAULTS)))
            self._watch()
            self.ends.append(str(self.now.state))
            self._check_ended()
            if self.now.state is State.COMPLETED:
                break
            service.resume(self.store, self.job.id)
        else:
            raise Broken(f"does not complete: {self.ends}, {self.now.reason}")
        self._check_history()
        service.remove(self.store, self.job.id)
        for slurm_id in self.urgent:
            commands.cancel(slurm_id)

    def _disturb(self, fault: str) -> None:
        """As soon as there is what it is for."""
        until = time.monotonic() + APPEARS_WITHIN * load()
        self.done.append(fault)
        while not self.now.state.ended and time.monotonic() < until:
            try:
                # scancel retries for over a minute while a job changes state: no fault then.
                with suppress(OSError, StateError, UnreachableError, subprocess.TimeoutExpired):
                    FAULTS[fault](self)
                return
            except (StopIteration, IndexError):
                self._watch(0.3)
        self.done.remove(fault)

    def keep_files(self) -> None:
        """For whoever looks."""
        with suppress(Exception):
            kept = Path(tempfile.gettempdir(), f"broken-{os.getpid()}-{self.job.id}")
            subprocess.run(["cp", "-a", self.job.run_dir.root, kept], check=False)
            subprocess.run(["cp", self.store.home / "slurm.log", kept], check=False)
            print(f"kept in {kept}", file=sys.stderr, flush=True)

    def give_up(self) -> None:
        """Take it out of everybody's way."""
        with suppress(Exception):
            for one in self._mine():
                commands.cancel(one.id)
            for slurm_id in self.urgent:
                commands.cancel(slurm_id)

    def _settings(self) -> dict[str, Any]:
        rng, machines = self.rng, self.rng.choice((1, 1, 2))
        python = [sys.executable, str(ROOT / "tests/support/jobs/fakes/task.py")]
        return _model() | {
            "launcher": "slurm",
            "num_machines": machines,
            "num_processes": machines * rng.choice((1, 2)),
            "max_train_steps": _STEPS,
            "max_restarts": rng.choice((0, 0, 1)),
            "slurm_requeue": rng.random() < 0.7,
            "auto_resume": rng.random() < 0.2,
            "slurm_time": "10",
            "stop_grace_seconds": 10.0,
            "slurm_setup": [
                f"export FSDP_TUI_PYTHON={shlex.quote(shlex.join(python))}",
                f"export FAKE_STEPS={_STEPS} FAKE_STEP_SECONDS=0.05",
                f"export FAKE_SAVE_EVERY={rng.choice((5, 10, 20))}",
            ],
        }

    # -- looking ---------------------------------------------------------------------------

    @property
    def now(self) -> Job:
        return self.store.get(self.job.id)

    def _watch(self, seconds: float | None = None) -> None:
        """Look at it as a dashboard does: for a time, or until it has ended."""
        begun = time.monotonic()
        while not self.now.state.ended:
            passed = time.monotonic() - begun
            if seconds is not None and passed >= seconds:
                return
            if passed > ENDS_WITHIN * load():
                raise Broken(f"does not end: {self.now.state}: {self.now.reason}")
            ensure(self.store, backend("slurm"))
            self._compare()
            self._look_at_checkpoints()
            time.sleep(0.5)

    def _compare(self) -> None:
        """What is shown against what Slurm says, unless its controller is away."""
        if time.monotonic() - self.looked_at < ASK_EVERY:
            return
        self.looked_at = time.monotonic()
        try:
            _resume()
            mine = self._mine()
        except UnreachableError:
            self.untrue_since = None
            return
        job, record = self.now, read_submission(self.job.run_dir, self.now.attempt)
        listed = next((one for one in mine if record and one.id == record.id), None)
        shown = _SHOWN.get(listed.state) if listed is not None else None
        true = listed is None or listed.state == "COMPLETING" or (shown and job.state in shown)
        asked = job.stop_level or "has not responded" in job.reason
        if true or (asked and listed is not None and listed.state in ALIVE):
            self.untrue_since = None
            return
        self.untrue_since = self.untrue_since or time.monotonic()
        if time.monotonic() - self.untrue_since > TRUE_WITHIN * load():
            raise Broken(f"is shown as {job.state} ({job.reason}), Slurm says {listed}")

    def _mine(self) -> list[Listed]:
        name = f"fsdp-tui-{self.job.id}-{self.job.run_id[:8]}-"
        return [one for one in commands.queue().values() if one.name.startswith(name)]

    def _look_at_checkpoints(self) -> None:
        found = self.job.run_dir.latest_checkpoint()
        newest = found[0] if found else 0
        if newest < self.newest:
            raise Broken(f"the checkpoint of step {self.newest} is gone; the newest is {newest}")
        self.newest = newest

    # -- what became of it -----------------------------------------------------------------

    def _check_ended(self) -> None:
        job, until = self.now, time.monotonic() + TRUE_WITHIN * load()
        while (alive := [one for one in self._known() if one.state in ALIVE]) or (
            left := processes_of(job.run_dir.root)
        ):
            if time.monotonic() > until:
                raise Broken(f"is {job.state} ({job.reason}), and {alive or left} live")
            _revive()
            time.sleep(0.5)
        self._look_at_checkpoints()
        for listed in list_all(job.run_dir):
            if (seen := verify(listed)).damage:
                raise Broken(f"{listed.name} is damaged: {seen.damage}")
        if not 3 < len(job.reason) < 400 or "\n" in job.reason or "its supervisor" in job.reason:
            raise Broken(f"no sentence: {job.reason!r}")
        if job.state is State.COMPLETED and self.newest != _STEPS:
            raise Broken(f"completed, but the newest checkpoint is of step {self.newest}")
        self._check_state(job)

    def _check_state(self, job: Job) -> None:
        """An end that no fault of ours explains must be Slurm's: others disturb it too."""
        allowed = {State.COMPLETED}.union(*(FAULTS_END.get(one, ()) for one in self.done))
        record = read_submission(job.run_dir, job.attempt)
        listed = next((one for one in self._known() if record and one.id == record.id), None)
        if listed is None or listed.state in LOST or listed.reason == LAUNCH_FAILED:
            allowed.add(State.LOST)
        elif listed.state == "CANCELLED":
            allowed.add(State.STOPPED)
        if job.state not in allowed:
            raise Broken(f"is {job.state} ({job.reason}), Slurm says {listed}")

    def _known(self) -> list[Listed]:
        """What Slurm knows of it, once it responds."""
        while True:
            try:
                return self._mine()
            except UnreachableError:
                _revive()
                time.sleep(0.5)

    def _check_history(self) -> None:
        """One Slurm job an attempt; steps without a gap, each allocation after the one before."""
        each = Counter(one.name for one in self._known())
        if twice := {name: count for name, count in each.items() if count > 1}:
            raise Broken(f"more than one Slurm job for an attempt: {twice}")
        lines = self.job.run_dir.events.read_text().splitlines()
        check_events([_event(line) for line in lines])


def _event(line: str) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(line)
    return found


def check_events(events: list[dict[str, Any]]) -> None:
    """Nothing was trained twice, and nothing that was saved was trained again.

    Raises:
        Broken: Something was.
    """
    saved, step, begun = 0, 0, 0.0
    over: set[str | None] = set()
    current: str | None = None
    for one in events:
        whose = one.get("allocation")
        if whose is None:
            continue
        if whose in over:
            if one["t"] - begun > LETS_GO_WITHIN * load():
                raise Broken(
                    f"{whose} still trains {one['t'] - begun:.1f} s after {current}: {one}"
                )
            continue
        if whose != current:
            over, current, begun = over | {current}, whose, one["t"]
        if one["kind"] == "start":
            if one["step"] < saved:
                raise Broken(f"{whose} begins after step {one['step']}, saved was {saved}")
            step = one["step"]
        elif one["kind"] == "step":
            if one["step"] != step + 1:
                raise Broken(f"{whose} trains step {one['step']} after {step}")
            step += 1
        elif one["kind"] == "checkpoint":
            saved = max(saved, one["step"])
    if step != _STEPS:
        raise Broken(f"the last step is {step}")


# -- the cluster ---------------------------------------------------------------------------------


@cache
def _model() -> dict[str, Any]:
    return job_values(_store().home.parent)


def _conf() -> Path:
    return Path(os.environ["SLURM_CONF"])


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@contextmanager
def _daemons() -> Iterator[str]:
    """The configuration, for one who ends and starts daemons at a time."""
    with open(_conf()) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.read()


def _pid(conf: str, key: str, node: str = "") -> ProcessId | None:
    found = re.search(rf"^{key}=(\S+)", conf, re.MULTILINE)
    assert found is not None, f"{key} is not in {_conf()}"
    with suppress(OSError, ValueError):
        return ProcessId.of(int(Path(found[1].replace("%n", node)).read_text()))
    return None


def _kill(conf: str, key: str, node: str = "") -> None:
    one = _pid(conf, key, node)
    while one is not None and one.alive():
        one.signal(signal.SIGKILL)
        time.sleep(0.05)


def _revive() -> None:
    """Start every daemon that is not there."""
    with _daemons() as conf:
        if (one := _pid(conf, "SlurmctldPidFile")) is None or not one.alive():
            subprocess.run(["slurmctld"], check=False, capture_output=True)
        for node in _nodes(_every_node(conf)):
            if (one := _pid(conf, "SlurmdPidFile", node)) is None or not one.alive():
                subprocess.run(["slurmd", "-N", node], check=False, capture_output=True)


def _resume() -> None:
    """As who looks after the cluster: Slurm drains nodes, and holds jobs, that could not start."""
    if drained := _run("sinfo", "--noheader", "--states=drain,draining", "--format=%N"):
        _run("scontrol", "update", f"NodeName={drained}", "State=RESUME")
    for one in commands.queue().values():
        if one.state == "PENDING" and "held" in one.reason:
            _run("scontrol", "release", one.id)


def _every_node(conf: str) -> str:
    found = re.search(r"^NodeName=(\S+)", conf, re.MULTILINE)
    assert found is not None
    return found[1]


@cache
def _nodes(text: str) -> list[str]:
    """`n[1-2]` → n1, n2; without its controller."""
    found = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", text)
    if found is None:
        return text.split(",") if text else []
    return [f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)]


# -- faults --------------------------------------------------------------------------------------


def _slurm_id(one: Trial) -> str:
    record = read_submission(one.job.run_dir, one.now.attempt)
    return next(iter([record.id] if record is not None and record.id else []))


def _listed(one: Trial) -> Listed:
    return (
        commands.queue()[_slurm_id(one)] if _slurm_id(one) in commands.queue() else next(iter(()))
    )


def _some_node(one: Trial) -> str:
    return one.rng.choice(_nodes(_listed(one).nodes))


def _kill_rank(one: Trial) -> None:
    status = one.rng.choice(one.job.run_dir.rank_statuses())
    number = one.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV))
    if not ProcessId(status.pid, status.started).signal(number):
        raise StopIteration


def _warden(one: Trial) -> ProcessId:
    for found in processes_of(one.job.run_dir.root.parent.parent):
        if (
            "jobs.backends.slurm.warden" in (said := name_of(found))
            and str(one.job.run_dir.root) in said
        ):
            return found
    raise StopIteration


def _kill_warden(one: Trial) -> None:
    _warden(one).signal(signal.SIGKILL)


def _pause_warden(one: Trial) -> None:
    warden = _warden(one)
    warden.signal(signal.SIGSTOP)
    time.sleep(one.rng.random() * 4)
    warden.signal(signal.SIGCONT)


def _kill_slurmd(one: Trial) -> None:
    """Its steps go on; it comes back before anybody has missed it."""
    node = _some_node(one)
    with _daemons() as conf:
        _kill(conf, "SlurmdPidFile", node)
    one._watch(one.rng.random() * 3)
    _revive()


def _kill_node(one: Trial) -> None:
    """With everything on it; it comes back after Slurm has called it down, or before."""
    node = _some_node(one)
    with _daemons() as conf:
        _kill(conf, "SlurmdPidFile", node)
        for found in _of_node(node, one.job):
            found.signal(signal.SIGKILL)
    one._watch(one.rng.choice((2.0, DOWN_FOR)))
    _revive()


def _of_node(node: str, job: Job) -> list[ProcessId]:
    """All that runs there for a job."""
    found = []
    for process in processes_of(job.run_dir.root):
        with suppress(OSError):
            text = Path(f"/proc/{process.pid}/environ").read_bytes()
            if f"\0SLURMD_NODENAME={node}\0".encode() in text:
                found.append(process)
    return found


def _cut_off(one: Trial) -> None:
    """A node that nobody reaches, and whose ranks go on."""
    node = _some_node(one)
    with _daemons() as conf:
        _kill(conf, "SlurmdPidFile", node)
    one._watch(DOWN_FOR)
    _revive()


def _kill_controller(one: Trial) -> None:
    with _daemons() as conf:
        _kill(conf, "SlurmctldPidFile")
    one._watch(one.rng.random() * 8)
    _revive()


def _kill_submitter(one: Trial) -> None:
    """Whoever looks next starts another; it may be between `sbatch` and its answer."""
    time.sleep(one.rng.random())
    found = [
        p
        for p in processes_of(one.store.home)
        if "-m jobs.backends.keeper slurm " in f"{name_of(p)} "
    ]
    found[0].signal(signal.SIGKILL)


def _hand_in_badly(one: Trial) -> None:
    """Another submission whose keeper is killed again and again."""
    for _ in range(3):
        with suppress(IndexError):
            _kill_submitter(one)
        ensure(one.store, backend("slurm"))


def _scancel(one: Trial) -> None:
    commands.cancel(_slurm_id(one))


def _preempt(one: Trial) -> None:
    node, seconds = _some_node(one), one.rng.choice((1, 4))
    words = ["sbatch", "--parsable", "-p", "urgent", "-w", node, "--exclusive", "-o", "/dev/null"]
    one.urgent.append(_run(*words, "--wrap", f"sleep {seconds}"))


def _time_limit(one: Trial) -> None:
    """Slurm's signal before the limit, to the batch script alone."""
    _run("scancel", "--batch", "--signal=USR2", _slurm_id(one))


def _out_of_time(one: Trial) -> None:
    """The limit itself, without a word before."""
    _run("scontrol", "update", f"JobId={_slurm_id(one)}", "EndTime=now")


def _requeue(one: Trial) -> None:
    _run("scontrol", "requeue", _slurm_id(one))


def _suspend(one: Trial) -> None:
    _run("scontrol", "suspend", number := _slurm_id(one))
    one._watch(one.rng.random() * 4)
    _run("scontrol", "resume", number)


def _stop(one: Trial) -> None:
    service.stop(one.store, one.job.id, now=one.rng.random() < 0.3)


FAULTS: Final[dict[str, Any]] = {
    "rank": _kill_rank,
    "warden": _kill_warden,
    "pause": _pause_warden,
    "slurmd": _kill_slurmd,
    "node": _kill_node,
    "cut off": _cut_off,
    "controller": _kill_controller,
    "submitter": _kill_submitter,
    "submitters": _hand_in_badly,
    "scancel": _scancel,
    "preemption": _preempt,
    "time limit": _time_limit,
    "out of time": _out_of_time,
    "requeue": _requeue,
    "suspend": _suspend,
    "stop": _stop,
}
# What may become of a job besides what Slurm says.
FAULTS_END: Final[dict[str, tuple[State, ...]]] = {
    "rank": (State.FAILED,),
    "warden": (State.FAILED,),
    "node": (State.FAILED,),
    "cut off": (State.FAILED,),
    "time limit": (State.FAILED, State.STOPPED),
    "stop": (State.STOPPED,),
}
