"""Random faults on jobs of fake ranks, with the real supervisor, queue and database.

Whatever happens: the state is true within 2 s, the job ends, nothing of it is left, no GPU stays
claimed, every complete checkpoint verifies, the reason is one sentence, the job can be resumed to
its end, and the next one starts.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from PIL import Image

from jobs import service
from jobs.errors import StateError, UserError
from jobs.machine.devices import Gpu
from jobs.machine.processes import with_run_id
from jobs.queue.states import State
from jobs.queue.store import PERSON, Store
from jobs.queue.tables import trouble
from jobs.run.checkpoint_files import list_all, verify
from tests.campaign.journal import dice
from tests.campaign.mutate import damaged
from tests.support.jobs.lab import Lab, opened
from tests.support.left_over import name_of

if TYPE_CHECKING:
    import random

    from jobs.machine.processes import ProcessId
    from jobs.queue.store import Job
    from tests.campaign.journal import Journal

TRUE_WITHIN: Final = 2.0  # seconds, on a machine that has nothing else to do
HANGS_AFTER: Final = 12.0  # seconds, however busy the machine; undisturbed, a job takes two
ENDS_WITHIN: Final = 60.0  # seconds of a job that was killed
_STEPS: Final = 40
_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_WORDS: Final = ("crash", "exit", "leave", "save")


class Broken(Exception):  # what a trial found, no error of the trial
    """An invariant does not hold."""


def trial(journal: Journal, number: int) -> None:
    """One job, its faults, and what became of it."""
    rng = dice("faults", journal.seed, number)
    with (
        tempfile.TemporaryDirectory(prefix="campaign-") as folder,
        pytest.MonkeyPatch.context() as p,
    ):
        root = Path(folder)
        for name in ("home", "cache", "config"):
            (root / name).mkdir(mode=0o700)
        p.setenv("FSDP_TUI_HOME", str(root / "home"))
        p.setenv("XDG_CACHE_HOME", str(root / "cache"))
        p.setenv("XDG_CONFIG_HOME", str(root / "config"))
        gpus = [Gpu(n, f"GPU-{n:08}", "fake", 80 << 30) for n in range(rng.randrange(3))]
        p.setattr("jobs.machine.devices.gpus", lambda: gpus)
        # Who looks here does what a keeper would, and a process more for each trial is dear.
        p.setattr("jobs.service.ensure_keepers", lambda store: None)
        done: list[str] = []
        try:
            with opened(Store(root / "home"), job_values(root), p, root / "gates") as lab:
                _one(lab, rng, len(gpus), done)
        except (Broken, AssertionError) as error:
            journal.note(number, "+".join(done) or "none", f"{error} after {done}")
        except Exception as error:
            journal.note(number, "+".join(done), f"{type(error).__name__}: {error} after {done}")
        else:
            journal.note(number, _family(done))


def _family(done: list[str]) -> str:
    return f"{len(done)} faults"


def _one(lab: Lab, rng: random.Random, gpus: int, done: list[str]) -> None:
    ranks = rng.randint(1, 3) if not gpus else rng.randint(1, gpus)
    lab.set(
        step_seconds="0.02",
        save_every=str(rng.choice((0, 3, 5))),
        failure_grace="0.3",
        term_grace="1",
    )
    faults = [rng.choice(list(FAULTS)) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    if rng.random() < 0.25:
        rank, word = rng.randrange(ranks), rng.choice(_WORDS)
        lab.set(ranks=f"{rank}:{word}@{rng.randrange(_STEPS)} once")
        done.append(f"{rank}:{word}")
    values = {
        "num_processes": ranks,
        "max_train_steps": _STEPS,
        "stop_grace_seconds": 1.0,
        "max_restarts": rng.choice((0, 0, 1)),
    }
    values |= {"gpus": list(range(ranks)), "device": "auto"} if gpus else {}
    job = lab.submit(**values)
    for fault in faults:
        _wait(lab, job, rng.random() * 0.8)
        if lab.get(job).state.ended:
            break
        with suppress(AssertionError, StopIteration, ValueError, OSError, StateError):
            FAULTS[fault](lab, job, rng)  # what it is for may be gone, or not there yet
            done.append(fault)
    ended = _until_ended(lab, job, disturbed=bool(done))
    _check_ended(lab, ended, done)
    lab.monkeypatch.delenv("FAKE_RANKS", raising=False)
    if ended.state is not State.COMPLETED and rng.random() < 0.7:
        lab.set(save_every="0")
        _complete(lab, service.resume(lab.store, job.id), "resumed")
        _check_ended(lab, lab.get(job), done)
    _complete(lab, lab.submit(**values | {"name": "next", "max_train_steps": 2}), "the next")


def _wait(lab: Lab, job: Job, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not lab.get(job).state.ended:
        service.refresh(lab.store)
        time.sleep(0.05)


def _until_ended(lab: Lab, job: Job, *, disturbed: bool = False) -> Job:
    """Look at it as a dashboard does; what hangs may be stopped, as a person would."""
    begun, untrue_since, asked = time.monotonic(), None, False
    while not (now := lab.get(job)).state.ended:
        service.refresh(lab.store)
        passed = time.monotonic() - begun
        supervisor = now.supervisor
        watched = supervisor is not None and supervisor.alive() and not supervisor.suspended()
        alive = watched or bool(with_run_id(job.run_id))
        if alive or now.state is State.QUEUED:
            untrue_since = None
        else:
            untrue_since = untrue_since or time.monotonic()
            if time.monotonic() - untrue_since > TRUE_WITHIN * load():
                raise Broken(f"is {now.state} ({now.reason}) and has no process")
        if disturbed and passed > HANGS_AFTER and not asked:
            asked = True
            with suppress(StateError):
                service.stop(lab.store, job.id, now=True)
        if passed > ENDS_WITHIN * load():
            raise Broken(f"does not end: {now.state}: {now.reason}")
        time.sleep(0.1)
    return lab.get(job)


def load() -> float:
    """How much longer things take than on a machine that has nothing else to do."""
    return max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def _check_ended(lab: Lab, job: Job, done: list[str]) -> None:
    until = time.monotonic() + TRUE_WITHIN * load()
    while left := with_run_id(job.run_id):
        if time.monotonic() > until:
            raise Broken(f"is {job.state}, and {[name_of(one) for one in left]} live")
        time.sleep(0.02)
    if job.id in lab.store.claims().values():
        raise Broken("holds a GPU")
    for listed in list_all(job.run_dir):
        if (seen := verify(listed)).damage:
            raise Broken(f"{listed.name} is damaged: {seen.damage}")
    reason = job.reason
    if not 3 < len(reason) < 400 or "\n" in reason or "Error:" in reason.split(";")[0][:40]:
        raise Broken(f"no sentence: {reason!r}")
    if "its supervisor failed" in reason:
        raise Broken(reason)
    crashed = len(done) == 1 and job.state is State.FAILED and ":crash" in done[0]
    if crashed and "bad day" not in reason:
        raise Broken(f"not true: {reason}")


def _complete(lab: Lab, job: Job, what: str) -> None:
    ended = _until_ended(lab, job)
    if ended.state is not State.COMPLETED:
        raise Broken(f"{what} job is {ended.state}: {ended.reason}")
    newest = ended.run_dir.latest_checkpoint()
    if newest is None or newest[0] != ended.total_steps:
        raise Broken(f"{what} job has no checkpoint of its last step")


# -- faults --------------------------------------------------------------------------------------


def _signal_rank(lab: Lab, job: Job, rng: random.Random) -> None:
    statuses = job.run_dir.rank_statuses()
    lab.rank(job, rng.randrange(len(statuses))).signal(rng.choice(_SIGNALS))


def _signal_launcher(lab: Lab, job: Job, rng: random.Random) -> None:
    lab.launcher(job).signal(rng.choice(_SIGNALS))


def _signal_supervisor(lab: Lab, job: Job, rng: random.Random) -> None:
    supervisor = lab.supervisor(job)
    supervisor.signal(rng.choice(_SIGNALS))
    _end_if_it_keeps_the_database(lab, supervisor)


def _end_if_it_keeps_the_database(lab: Lab, supervisor: ProcessId) -> None:
    """A supervisor suspended inside a transaction blocks everyone: the message must name it."""
    try:
        with Store(lab.store.home, patience=PERSON).write():
            pass
    except (sqlite3.OperationalError, UserError) as error:
        message = str(error if isinstance(error, UserError) else trouble(error, lab.store.path))
        if f"by process {supervisor.pid}, which is suspended" not in message:
            raise Broken(message) from error
        supervisor.signal(signal.SIGKILL)


def _pause_supervisor(lab: Lab, job: Job, rng: random.Random) -> None:
    """As a machine that is suspended, for the supervisor alone."""
    supervisor = lab.supervisor(job)
    supervisor.signal(signal.SIGSTOP)
    time.sleep(rng.random())
    supervisor.signal(signal.SIGCONT)


def _kill_everything(lab: Lab, job: Job, rng: random.Random) -> None:
    for one in (lab.supervisor(job), *with_run_id(job.run_id)):
        one.signal(signal.SIGKILL)


def _signal_all(lab: Lab, job: Job, rng: random.Random) -> None:
    number = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    for one in (lab.supervisor(job), *with_run_id(job.run_id)):
        one.signal(number)


def _stop(lab: Lab, job: Job, rng: random.Random) -> None:
    service.stop(lab.store, job.id, now=rng.random() < 0.3)


def _damage(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    if rng.random() < 0.2:
        path.unlink()
    else:
        path.write_bytes(damaged(rng, content))


def _damage_rank_file(lab: Lab, job: Job, rng: random.Random) -> None:
    _damage(rng.choice(sorted(job.run_dir.ranks.glob("*.json")) or [job.run_dir.rank_file(0)]), rng)


def _damage_events(lab: Lab, job: Job, rng: random.Random) -> None:
    with open(job.run_dir.events, "ab") as file:
        file.write(damaged(rng, b'{"kind": "step", "step": 3, "loss": 0.5}\n'))


def _damage_launch(lab: Lab, job: Job, rng: random.Random) -> None:
    _damage(job.run_dir.launch_file, rng)


def _damage_launcher_log(lab: Lab, job: Job, rng: random.Random) -> None:
    _damage(job.run_dir.launcher_log, rng)


def _remove_requests(lab: Lab, job: Job, rng: random.Random) -> None:
    for path in job.run_dir.control.iterdir():
        path.unlink()


FAULTS: Final[dict[str, Any]] = {
    "rank": _signal_rank,
    "launcher": _signal_launcher,
    "supervisor": _signal_supervisor,
    "pause": _pause_supervisor,
    "massacre": _kill_everything,
    "all": _signal_all,
    "stop": _stop,
    "rank file": _damage_rank_file,
    "events": _damage_events,
    "launch.json": _damage_launch,
    "launcher.log": _damage_launcher_log,
    "requests": _remove_requests,
}


def job_values(root: Path) -> dict[str, Any]:
    """A job that passes every check."""
    empty = struct.pack("<Q", 2) + b"{}"
    model = root / "model"
    for part in ("transformer", "vae"):
        (model / part).mkdir(parents=True)
        (model / part / "config.json").write_text("{}")
        (model / part / "diffusion_pytorch_model.safetensors").write_bytes(empty)
    (model / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    data = root / "data"
    data.mkdir()
    Image.new("RGB", (512, 512)).save(data / "0.png")
    (data / "0.txt").write_text("a picture")
    return {
        "name": "t",
        "pretrained_model_name_or_path": str(model),
        "dataset": str(data),
        "device": "cpu",
        "mixed_precision": "no",
    }
