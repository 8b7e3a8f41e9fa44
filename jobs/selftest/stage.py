"""Run the self-test's jobs on a toy model, through the queue, the supervisor and the launcher."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.doctor.examine import Finding, fail, ok, warn
from jobs.errors import UserError
from jobs.machine import devices
from jobs.machine.engine_tools import ToolError
from jobs.machine.processes import ProcessId, with_run_id
from jobs.memory import calibration
from jobs.memory.calibration import record_beside, record_rate
from jobs.memory.cards import card_named
from jobs.memory.question import Server, predict
from jobs.memory.seconds import link_of, seconds_of
from jobs.queue.states import State
from jobs.run.eventlog import EventLog, read_report
from jobs.spec.file.load import load_spec
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from jobs.machine.gpu import Gpu
    from jobs.queue.store import Job, Store


STEPS: Final = 8
PREFIX: Final = "selftest-"
_POLL_INTERVAL: Final = 0.05  # seconds
_LONGEST: Final = 900.0  # maximum seconds of a job; the slowest machine takes a tenth of it

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
    "deterministic": True,  # so that results can be compared bit by bit
    "seed": 42,
}


class SceneFailed(Exception):
    """A scene failed: one sentence, and the job to inspect."""

    def __init__(self, sentence: str, job: Job | None = None) -> None:
        super().__init__(sentence)
        self.job = job


@dataclass
class Stage:
    """The environment in which scenes run.

    Attributes:
        store: This user's jobs. The self-test uses the same queue, so that no other job gets its
            GPUs meanwhile.
        root: A separate directory for models, images and caches.
        gpus: The GPUs to test; empty for CPU ranks.
        ranks: Number of ranks that use all of them.
        say: Called with a description of the current action.
        jobs: Ids of the submitted jobs.
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
        """Return the values of a job on the toy model, as in a job file."""
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
        """Wait until a job has ended; raise `SceneFailed` if it left processes behind."""
        job = self.until(job, lambda job: job.state.ended)
        left = [process.pid for process in with_run_id(job.run_id)]
        if left:
            raise SceneFailed(f"it ended, but processes {left} are still running", job)
        return job

    def expect(self, job: Job, state: State) -> None:
        """Raise `SceneFailed` unless a job is in this state."""
        if job.state is not state:
            why = f": {job.reason}" if job.reason else ""
            raise SceneFailed(f"it is {job.state}, not {state}{why}", job)

    def until(self, job: Job, reached: Callable[[Job], bool]) -> Job:
        """Wait until a condition on a job is met.

        Raises:
            SceneFailed: It takes far longer than it should.
        """
        deadline = time.monotonic() + _LONGEST
        while True:
            service.refresh(self.store)
            job = self.store.get(job.id)
            if reached(job):
                return job
            if time.monotonic() > deadline:
                raise SceneFailed(f"it is still {job.state} after {_LONGEST:g} s", job)
            time.sleep(_POLL_INTERVAL)

    def kill_rank(self, job: Job, rank: int) -> None:
        """Send SIGKILL to a rank of a running job."""
        (status,) = [
            rank_status for rank_status in job.run_dir.rank_statuses() if rank_status.rank == rank
        ]
        identity = ProcessId.of(status.pid)
        if identity is None or not identity.signal(signal.SIGKILL):
            raise SceneFailed(f"rank {rank} exited before it could be killed", job)

    def engine(self, *words: str) -> dict[str, Any]:
        """Run `python -m engine.…` and return its JSON answer.

        Raises:
            SceneFailed: It failed or did not answer.
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
        """Stop jobs that are still running, and remove all but failed ones."""
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
    """Return the last step in a job's events; 0 if there is none."""
    last = EventLog(job.run_dir.events).read_all().last
    return last.step if last is not None else 0


# -- speed ----------------------------------------------------------------------------------
# Measure how fast GPUs train, and how accurate the memory prediction is.


# FLUX.1's width with 2 of its 19 double-stream and 4 of its 38 single-stream blocks.
_SCALE: Final = 24
_WIDTH: Final = 3072
_BLOCKS: Final = 6
_RESOLUTION: Final = 1024
_TOKENS: Final = (_RESOLUTION // 16) ** 2 + 32
_PICTURES: Final = 16
_STEPS: Final = 30
_WARM: Final = 10  # warm-up steps, which are not counted

_BUSY: Final = 0.8  # share of time in which a GPU must be busy with a job of this size
_OFF: Final = 0.10  # acceptable relative error of the predicted memory
_LARGEST_GPU: Final = 2**40  # bytes; used if the driver does not report the memory
# lower bound of the bytes of activations; these blocks take more than twice as much
_IMAGE_TAKES: Final = 2**30


def speed(stage: Stage) -> Iterator[Finding]:
    """Measure a LoRA at 1024 px on one GPU and on all: seconds, MFU, idle share, memory."""
    layouts = [(1, "single")] + ([(stage.ranks, "fsdp2")] if stage.ranks > 1 else [])
    for ranks, strategy in layouts:
        values = wide_values(stage, f"speed-{ranks}", ranks, strategy=strategy)
        stage.say(f"training at 1024 px on {ranks} GPU{'s' if ranks > 1 else ''}")
        _predict(values, strategy, ranks)
        job, busy, beside = _run_and_poll(stage, values)
        name = "1 GPU" if ranks == 1 else f"{ranks} GPUs, fsdp2"
        yield _report_speed(name, job, ranks, stage.gpus[0].name, busy)
        yield _report_memory(f"{name}, memory", job, beside)


def wide_values(
    stage: Stage, name: str, ranks: int, *, too_large: bool = False, **changes: Any
) -> dict[str, Any]:
    """Return a 1024 px LoRA job on a model of FLUX.1's width, writing the model on first use.

    Args:
        stage: The environment.
        name: Name of the job.
        ranks: Number of ranks.
        too_large: Whether its batch is to exceed the memory of every GPU. It needs little host
            memory nevertheless.
        changes: Further keys.
    """
    wide = stage.root / "wide"
    if not wide.exists():
        stage.say("writing a model of FLUX.1's width")
        stage.engine(
            "engine.toy",
            str(wide),
            "--family=flux",
            f"--pictures={_PICTURES}",
            "--size=1024",
            f"--hidden_scale={_SCALE}",
            "--dtype=bfloat16",
            "--json",
        )
    batch = 1
    if too_large:
        largest = max(gpu.memory_total for gpu in stage.gpus)
        batch = 1 + (largest or _LARGEST_GPU) // _IMAGE_TAKES
    data = {"path": str(wide / "data"), "repeats": -(-batch * ranks // _PICTURES)}
    usual: dict[str, Any] = {
        "resolution": _RESOLUTION,
        "mixed_precision": "bf16",
        "deterministic": False,
        "pretrained_model_name_or_path": str(wide / "model"),
        "dataset": None,
        "datasets": [data],
        "max_train_steps": _STEPS,
        "checkpointing_steps": 0,
        "allow_tf32": True,
        "lora_rank": 16,
        "train_batch_size": batch,
    }
    return stage.values(name, ranks, **usual | changes)


def _predict(values: dict[str, Any], strategy: str, ranks: int) -> None:
    """Cache the prediction before the job starts; on failure, it is reported as missing later."""
    server = Server()
    try:
        predict(load_spec(None, values), server, strategy=strategy, ranks=ranks, on_gpus=True)
    except (UserError, ToolError, OSError):
        return
    finally:
        server.close()


def _run_and_poll(stage: Stage, values: dict[str, Any]) -> tuple[Job, float | None, int | None]:
    """Run a job and poll its GPUs while it trains.

    Returns:
        The job; the share of polls in which a GPU computed; the peak bytes on a GPU outside of
            torch's reservation, relative to before the job.
    """
    uuids, seen, beside = set(values["gpus"]), list[int](), list[int]()
    before = {gpu.uuid: gpu.memory_used for gpu in devices.gpus()}
    job = stage.submit(values)
    log = EventLog(job.run_dir.events)

    def look(job: Job) -> bool:
        log.poll()
        if log.last is not None and _WARM <= log.last.step < _STEPS:
            shown = [gpu for gpu in devices.gpus() if gpu.uuid in uuids]
            seen.extend(gpu.utilisation for gpu in shown if gpu.utilisation is not None)
            used = {gpu.uuid: (gpu.memory_used, before.get(gpu.uuid)) for gpu in shown}
            for status in job.run_dir.rank_statuses():
                now, then = used.get(status.device_uuid or "", (None, None))
                if now is not None and then is not None and status.reserved is not None:
                    beside.append(now - then - status.reserved)
        return job.state.ended

    job = stage.until(job, look)
    stage.expect(job, State.COMPLETED)
    most = max(beside, default=0)
    return job, statistics.fmean(seen) / 100 if seen else None, most if most > 0 else None


def _report_speed(name: str, job: Job, ranks: int, gpu: str, busy: float | None) -> Finding:
    steps = EventLog(job.run_dir.events).read_all().steps[_WARM:]
    times = [step.seconds for step in steps if step.seconds]
    if not times:
        raise SceneFailed("steps took no time", job)
    seconds = statistics.median(times)
    share = utilisation(seconds, gpu)
    if ranks == 1:
        _record_speed(job, seconds, gpu)
    words = f"{seconds * 1e3:.0f} ms a step, {ranks / seconds:.2f} images/s"
    if share is not None:
        words += f", MFU {share:.0%}"
    if busy is not None:
        words += f", GPUs idle {1 - busy:.0%} of the time"
    facts = {
        "seconds": seconds,
        "images_per_second": ranks / seconds,
        "mfu": share,
        "idle": None if busy is None else 1 - busy,
    }
    if share is not None and share > 1:
        words += "; no GPU is this fast"
        return fail(name, words, "the GPU does not compute, or its clock is wrong", **facts)
    if busy is not None and busy < _BUSY:
        advice = "check whether the CPU is the bottleneck or busy with other work"
        return warn(name, words, advice, **facts)
    return ok(name, words, **facts)


def _record_speed(job: Job, seconds: float, gpu: str) -> None:
    """Record how a step compares with what is computed, for later estimates on this machine."""
    predicted, card = calibration.read(job.run_dir), card_named(gpu)
    if predicted is None or not predicted.work or card is None:
        return
    computed = seconds_of(predicted, card, link_of(card, ())).middle
    record_rate("speed", gpu, round(seconds / computed, 3))


def utilisation(seconds: float, gpu: str) -> float | None:
    """Return the MFU of a step: its model FLOPs over the GPU's peak; None for an unknown GPU. Pure.

    A LoRA's backward computes gradients of activations only, so it costs as much as the forward;
    attention's backward costs twice its forward.
    """
    card = card_named(gpu)
    if card is None:
        return None
    linear = 4 * _BLOCKS * 12 * _WIDTH**2 * _TOKENS
    attention = 3 * _BLOCKS * 4 * _TOKENS**2 * _WIDTH
    return (linear + attention) / (seconds * card.half * 1e12)


def _report_memory(name: str, job: Job, beside: int | None) -> Finding:
    """Compare predicted and measured memory, and record the non-tensor part for later estimates."""
    predicted, report = calibration.read(job.run_dir), read_report(job.run_dir)
    compared = calibration.compare(predicted, report.measure, report.peaks) if predicted else []
    phases = [phase for phase in compared if phase.measured]
    if predicted is None or not phases:
        missing = "measured" if predicted else "predicted"
        return warn(name, f"nothing {missing}", "see `fsdp-tui estimate`", beside=beside)
    measured = max(max(phase.measured) for phase in phases)
    expected = max(phase.predicted for phase in phases)
    off = measured / expected - 1
    words = f"{size(measured)} measured, {size(expected)} predicted ({off:+.1%})"
    facts = {"measured": measured, "predicted": expected, "beside": beside}
    if beside is not None:
        record_beside(predicted.ranks, beside, predicted)
        assumed = sum(predicted.overheads.values())
        words += f"; the driver and libraries took {size(beside)}, {size(assumed)} assumed"
    if abs(off) > _OFF:
        return warn(
            name, words, "estimates on this machine are corrected by measured jobs", **facts
        )
    return ok(name, words, **facts)
