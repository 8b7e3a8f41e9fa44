"""Jobs of the self-test: on the toy model, through the queue, the supervisor and the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.machine.processes import ProcessId, with_run_id
from jobs.queue.states import State
from jobs.run.eventlog import EventLog
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from jobs.machine.gpu import Gpu
    from jobs.queue.store import Job, Store

STEPS: Final = 8
PREFIX: Final = "selftest-"
_LOOK_EVERY: Final = 0.05  # seconds
_LONGEST: Final = 900.0  # seconds a job may take; the slowest machine takes a tenth of it

COMMON: Final[dict[str, Any]] = {
    "model_type": "lora",
    "model_family": "flux",
    "resolution": 64,
    "max_sequence_length": 32,
    "max_train_steps": STEPS,
    "checkpointing_steps": STEPS // 2,
    "learning_rate": 1e-3,
    "lora_rank": 8,
    "mixed_precision": "no",
    "allow_tf32": False,
    "deterministic": True,  # so that equal means equal, bit for bit
    "seed": 42,
}


class SceneFailed(Exception):
    """A scene did not go as it must; one sentence, and the job to look at."""

    def __init__(self, sentence: str, job: Job | None = None) -> None:
        super().__init__(sentence)
        self.job = job


@dataclass
class Stage:
    """Where scenes run.

    Attributes:
        store: The jobs of this user: the self-test's stand in the same queue, so that no other job
            gets its GPUs meanwhile.
        root: A directory of its own for models, images and caches.
        gpus: The GPUs to test; empty for CPU ranks.
        ranks: How many ranks use all of them.
        say: Called with what is being done.
        jobs: Ids of the jobs that were submitted.
        failed: Ids of failed jobs, which are kept.
    """

    store: Store
    root: Path
    gpus: Sequence[Gpu]
    ranks: int
    say: Callable[[str], None] = lambda words: None
    jobs: list[int] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    def values(self, name: str, ranks: int, **changes: Any) -> dict[str, Any]:
        """Return a job on the toy, as it would stand in a YAML file."""
        toy = self.root / "toy"
        return (
            COMMON
            | {
                "name": f"{PREFIX}{name}",
                "pretrained_model_name_or_path": str(toy / "model"),
                "dataset": str(toy / "data"),
                "cache_dir": str(self.root / "cache"),
                "num_processes": ranks,
            }
            | self._devices(ranks)
            | changes
        )

    def _devices(self, ranks: int) -> dict[str, Any]:
        if self.gpus:
            return {"gpus": [gpu.uuid for gpu in self.gpus[:ranks]]}
        return {"device": "cpu"}

    def submit(self, values: dict[str, Any]) -> Job:
        """Queue a job, and start it.

        Raises:
            jobs.errors.UserError: It cannot run.
        """
        job = service.submit(self.store, load_spec(None, values))
        self.jobs.append(job.id)
        return job

    def run(self, values: dict[str, Any]) -> Job:
        """Run a job to its end.

        Raises:
            SceneFailed: It did not complete.
        """
        job = self.ended(self.submit(values))
        self.expect(job, State.COMPLETED)
        return job

    def ended(self, job: Job) -> Job:
        """Wait until a job has ended, and none of its processes is left."""
        job = self.until(job, lambda job: job.state.ended)
        left = [process.pid for process in with_run_id(job.run_id)]
        if left:
            raise SceneFailed(f"it ended, but processes {left} are still running", job)
        return job

    def expect(self, job: Job, state: State) -> None:
        """Raise `SceneFailed` unless a job has ended like this."""
        if job.state is not state:
            why = f": {job.reason}" if job.reason else ""
            raise SceneFailed(f"it is {job.state}, not {state}{why}", job)

    def until(self, job: Job, reached: Callable[[Job], bool]) -> Job:
        """Wait for something about a job.

        Raises:
            SceneFailed: It takes far longer than it ever should.
        """
        deadline = time.monotonic() + _LONGEST
        while True:
            service.refresh(self.store)
            job = self.store.get(job.id)
            if reached(job):
                return job
            if time.monotonic() > deadline:
                raise SceneFailed(f"it is still {job.state} after {_LONGEST:g} s", job)
            time.sleep(_LOOK_EVERY)

    def kill_rank(self, job: Job, rank: int) -> None:
        """SIGKILL a rank of a running job."""
        (status,) = [
            rank_status for rank_status in job.run_dir.rank_statuses() if rank_status.rank == rank
        ]
        identity = ProcessId.of(status.pid)
        if identity is None or not identity.signal(signal.SIGKILL):
            raise SceneFailed(f"rank {rank} exited before it could be killed", job)

    def engine(self, *words: str) -> dict[str, Any]:
        """Return the JSON answer of `python -m engine.…`.

        Raises:
            SceneFailed: It gave none.
        """
        environment = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
        if not self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        else:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[0].uuid
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=_LONGEST,
            )
        except subprocess.TimeoutExpired:
            raise SceneFailed(f"{words[0]} gave no answer after {_LONGEST:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SceneFailed(last.removeprefix("fsdp-tui: "))
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    def clear(self) -> None:
        """Stop what still runs, and remove every job but those that failed."""
        for number in self.jobs:
            job = self.store.get(number)
            if not job.state.ended:
                service.stop(self.store, number, now=True)
                job = self.until(job, lambda job: job.state.ended)
            if number not in self.failed:
                with suppress(service.FilesLeftError):
                    service.remove(self.store, number)
        self.jobs = sorted(self.failed)


def losses(job: Job) -> list[float]:
    """Return the loss of each step of a job."""
    return [step.loss for step in EventLog(job.run_dir.events).read_all().steps]


def steps_done(job: Job) -> int:
    """Return the last step of a job that is in its events."""
    last = EventLog(job.run_dir.events).read_all().last
    return last.step if last is not None else 0
