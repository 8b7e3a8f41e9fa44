"""Define the self-test's scenes, in the order in which to try a new machine."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.doctor.checks.gpus import LIMIT, STILL, connected_by_nvlink, judge, record_link
from jobs.doctor.checks.queue import claimed
from jobs.doctor.examine import Finding, fail, ok, warn
from jobs.doctor.nvml import read_driver
from jobs.doctor.processes import all_reduce
from jobs.errors import UserError
from jobs.machine import devices
from jobs.machine.processes import with_run_id
from jobs.queue.states import State
from jobs.run.checkpoint_files import find_damage, list_checkpoints
from jobs.run.failure import Cause, read_failure
from jobs.run.rundir import write_atomic
from jobs.run.samples import list_samples
from jobs.selftest.stage import STEPS, SceneFailed, Stage, losses, speed, steps_done, wide_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.machine.gpu import Gpu
    from jobs.queue.store import Job, Store


PARITY: Final = 1e-4
"""Largest relative difference of an fp32 loss that rounding explains."""
_PIXEL: Final = 2  # of 255; caused by rounding to 8 bits on two devices
_LONG: Final = 5_000  # never reached, but the job ends even if nothing kills it
_MEASURE: Final = 4.0  # seconds of measuring collectives

Scene = tuple[str, str, "Callable[[], Iterator[Finding]]"]


def run_scenes(stage: Stage) -> Iterator[Finding]:
    """Run every scene; a failing scene does not stop the others."""
    refused = list(_run_scene(stage, "toy", lambda: _toy(stage)))
    if refused:  # the other scenes need the model
        yield from (finding.plain("one device") for finding in refused)
        return
    first = _OneDevice(stage)
    everything = _layouts(stage.ranks)
    scenes: list[Scene] = [
        ("one device", "train, sample, export", first.train),
        ("one device", "stop, resume", first.stop_and_resume),
        ("one device", "exported LoRA", first.load_export),
        *(
            ("all devices", name, lambda name=name, keys=keys: first.compare(name, keys))
            for name, keys in everything.items()
        ),
        ("all devices", "bandwidth", lambda: _bandwidth(stage)),
        ("failures", "killed rank", lambda: _killed_rank(stage)),
    ]
    if stage.gpus:
        scenes += [
            ("failures", "out of memory", lambda: _out_of_memory(stage)),
            ("speed", "steps", lambda: speed(stage)),
        ]
    for group, name, play in scenes:
        stage.say(f"{group}: {name}")
        for finding in _run_scene(stage, name, play):
            yield finding.plain(group)


def _run_scene(stage: Stage, name: str, play: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from play()
    except SceneFailed as failed:
        advice = "nothing was kept to inspect"
        if failed.job is not None:
            stage.failed.add(failed.job.id)
            advice = f"see `fsdp-tui logs {failed.job.id}`; the job is kept"
        yield fail(name, str(failed), advice)
    except UserError as error:
        yield fail(name, f"the job was refused: {error}", "`fsdp-tui doctor` may say more")
    except Exception as error:  # the other scenes and the report must still run
        what = f"the self-test failed here: {type(error).__name__}: {error}"
        yield fail(name, what, "this is a bug in fsdp-tui; please report it")


def _layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the strategies that this number of ranks supports. Pure."""
    if ranks < 2:
        return {}
    layouts: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "fsdp2": {"strategy": "fsdp2"},
    }
    if ranks >= 4 and ranks % 2 == 0:
        layouts["hsdp"] = {"strategy": "hsdp", "dp_replicate_size": 2}
    return layouts


def _toy(stage: Stage) -> Iterator[Finding]:
    stage.say("writing a small FLUX.1 and captioned images")
    stage.engine(
        "engine.toy",
        str(stage.root / "toy"),
        "--family=flux",
        "--pictures=32",
        "--size=64",
        "--json",
    )
    yield from ()


class _OneDevice:
    """The run on one device; everything else is compared with its results."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._job: Job | None = None

    @property
    def job(self) -> Job:
        if self._job is None:
            raise SceneFailed("skipped: one device did not train")
        return self._job

    @property
    def why_equal(self) -> str | None:
        """Return why a comparison of losses proves nothing; None if it is meaningful."""
        trained = losses(self.job)
        return f"every loss is {trained[0]:g}" if len(set(trained)) == 1 else None

    def _values(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return the values for one rank with the global batch of all ranks."""
        stage = self._stage
        accumulated = {"train_batch_size": 1, "global_batch_size": stage.ranks}
        return stage.values(name, 1, **accumulated, **changes)

    def train(self) -> Iterator[Finding]:
        """Train, save, sample and export on one device."""
        prompts = ["a red circle on a blue background"]
        values = self._values(
            "one",
            checkpointing_async=False,
            validation_prompts=prompts,
            validation_steps=STEPS,
            validation_num_inference_steps=8,
        )
        job = self._stage.run(values)
        saved = list_checkpoints(job.run_dir)
        trained, damage = losses(job), [find_damage(checkpoint.path) for checkpoint in saved]
        missing = [
            name
            for name, there in (
                (f"{STEPS} losses", len(trained) == STEPS),
                (
                    "two checkpoints",
                    [checkpoint.step for checkpoint in saved] == [STEPS // 2, STEPS],
                ),
                ("a sample", bool(list_samples(job.run_dir))),
                ("an export", any(job.run_dir.export.glob("*.safetensors"))),
            )
            if not there
        ]
        if missing or any(damage):
            what = ", ".join(missing) or next(str(problem) for problem in damage if problem)
            raise SceneFailed(f"it completed, but this is missing or damaged: {what}", job)
        self._job = job
        if self.why_equal:
            raise SceneFailed(
                f"{STEPS} steps, 2 checkpoints, a sample and an export, but {self.why_equal}: "
                "the device does not compute correctly",
                job,
            )
        yield ok("train", f"{STEPS} steps, 2 checkpoints, a sample and an export", losses=trained)

    def stop_and_resume(self) -> Iterator[Finding]:
        """Stop the same job after a step, resume it, and compare the results bit by bit."""
        stage, straight = self._stage, self.job
        # Save at every step: a GPU would complete the few steps before the job can be stopped.
        values = self._values("resumed", checkpointing_async=True, checkpointing_steps=1)
        job = stage.submit(values)
        stage.until(job, lambda job: job.state.ended or steps_done(job) > 0)
        if not stage.store.get(job.id).state.ended:
            service.stop(stage.store, job.id)
        job = stage.ended(job)
        after = steps_done(job)
        if job.state is State.STOPPED:
            service.resume(stage.store, job.id)
            job = stage.ended(job)
        stage.expect(job, State.COMPLETED)
        difference = largest_difference(losses(job), losses(straight))
        if difference > PARITY:
            raise SceneFailed(f"resumed after step {after}, losses differ by {difference:.1e}", job)
        how = "all losses are bit-identical to an uninterrupted job"
        if difference:
            how = f"losses differ by {difference:.1e} from an uninterrupted job"
        if after >= STEPS:
            yield warn("stop, resume", "the job ended before it could be stopped", "run it again")
        elif self.why_equal:
            yield warn(
                "stop, resume",
                f"stopped after step {after} and resumed, but this proves little: {self.why_equal}",
                "see above: the device does not compute correctly",
                step=after,
            )
        elif difference:
            yield warn("stop, resume", how, "unexpected: the job asks for deterministic kernels")
        else:
            yield ok("stop, resume", f"stopped after step {after}; {how}", step=after)
        stage.say("comparing checkpoints")
        answer = stage.engine(
            "engine.doctor.selftest",
            "same",
            str(straight.run_dir.checkpoint(STEPS)),
            str(job.run_dir.checkpoint(STEPS)),
        )
        if answer["different"] and not difference:
            names = ", ".join(answer["different"][:3])
            raise SceneFailed(f"saved in the background, these differ: {names}", job)
        tensors = answer["tensors"]
        if difference:
            off = len(answer["different"])
            yield warn(
                "saves",
                f"{off} of {tensors} tensors saved in the background differ from those saved "
                "synchronously, as the losses do",
                "unexpected: the job asks for deterministic kernels",
            )
        else:
            yield ok(
                "saves",
                f"{tensors} tensors saved in the background equal those saved synchronously",
            )

    def load_export(self) -> Iterator[Finding]:
        """Check that the stock diffusers pipeline with the exported LoRA reproduces the last
        sample.
        """
        job = self.job
        sample = max(list_samples(job.run_dir), key=lambda sample: sample.step)
        answer = self._stage.engine(
            "engine.doctor.selftest",
            "sample",
            str(self._stage.root / "toy" / "model"),
            str(job.run_dir.export),
            str(sample.picture),
        )
        off = answer["largest_difference"]
        if off > _PIXEL:
            raise SceneFailed(f"diffusers samples a different image: up to {off} of 255 off", job)
        if not answer["contrast"]:
            yield warn(
                "export",
                "diffusers loads it, but this proves little: the run's sample is one flat color",
                "see above: the device does not compute correctly",
            )
            return
        yield ok(
            "export",
            f"diffusers loads it and reproduces the run's last sample (within {off} of 255)",
        )

    def compare(self, name: str, keys: dict[str, Any]) -> Iterator[Finding]:
        """Check that training on all devices gives the results of one device."""
        stage, expected = self._stage, losses(self.job)
        job = stage.run(stage.values(name, stage.ranks, train_batch_size=1, **keys))
        difference = largest_difference(losses(job), expected)
        if difference > PARITY:
            raise SceneFailed(
                f"{stage.ranks} ranks do not match one: losses differ by {difference:.1e}", job
            )
        if self.why_equal:
            yield warn(
                name,
                f"{stage.ranks} ranks train, but this proves little: {self.why_equal}",
                "see above: the device does not compute correctly",
                difference=difference,
            )
            return
        yield ok(
            name,
            f"{stage.ranks} ranks match one: losses within {difference:.0e}",
            difference=difference,
        )


def largest_difference(measured: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses; infinite if one has fewer.

    Pure.
    """
    if len(measured) != len(expected) or not expected:
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(measured, expected, strict=True))


def _bandwidth(stage: Stage) -> Iterator[Finding]:
    """Measure all-reduce and all-gather between all devices."""
    if stage.ranks < 2:
        return
    outcome = all_reduce(
        [gpu.uuid for gpu in stage.gpus],
        stage.ranks,
        run_id=f"selftest-{os.getpid()}",
        seconds=_MEASURE,
        limit=LIMIT,
        still=STILL,
    )
    record_link(outcome, stage.gpus)
    nvlink = bool(stage.gpus) and connected_by_nvlink(stage.gpus, read_driver().paths)
    yield from judge(outcome, stage.gpus, nvlink=nvlink, ranks=stage.ranks)


def _killed_rank(stage: Stage) -> Iterator[Finding]:
    """Check that the reason names a killed rank, and that the other ranks have ended."""
    rank = stage.ranks - 1
    values = stage.values(
        "killed", stage.ranks, max_train_steps=_LONG, checkpointing_steps=0, train_batch_size=1
    )
    job = stage.submit(values)
    job = stage.until(job, lambda job: job.state.ended or steps_done(job) > 0)
    if not job.state.ended:
        stage.kill_rank(job, rank)
    job = stage.ended(job)
    stage.expect(job, State.FAILED)
    failure = read_failure(job.run_dir)
    if failure is None or (failure.cause, failure.rank) != (Cause.KILLED, rank):
        raise SceneFailed(f"it reports the wrong reason: {job.reason}", job)
    yield ok("killed rank", f"“{job.reason}”; no processes left")


def _out_of_memory(stage: Stage) -> Iterator[Finding]:
    """Check that a batch too large for any GPU fails with one sentence and frees the GPUs."""
    values = wide_values(
        stage,
        "memory",
        stage.ranks,
        too_large=True,
        max_train_steps=1,
        strategy="ddp" if stage.ranks > 1 else "single",
    )
    job = stage.ended(stage.submit(values))
    stage.expect(job, State.FAILED)
    failure = read_failure(job.run_dir)
    if failure is None or failure.cause is not Cause.GPU_MEMORY:
        raise SceneFailed(f"it reports the wrong reason: {job.reason}", job)
    if with_run_id(job.run_id):
        raise SceneFailed("it left processes behind", job)
    yield ok("out of memory", f"“{job.reason}”")


# -- session --------------------------------------------------------------------------------
# A complete self-test: select GPUs, run the scenes, write the report, and clean up.


REPORT: Final = "selftest.json"
"""File name of the newest self-test's report, in the state directory."""

COUNT: Final = 12
"""Approximate number of results, for a progress bar."""


def choose_gpus(store: Store, names: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to test: the named ones, or else all idle ones.

    Returns:
        The GPUs; empty if this machine has none.

    Raises:
        UserError: A name matches no GPU, or all GPUs are in use.
    """
    present = devices.gpus()
    claims = claimed()
    if names:
        matches = [devices.find(name, present) for name in names]
        if None in matches:
            raise UserError(f"no GPU {names[matches.index(None)]!r}", "see `fsdp-tui gpus`")
        return [gpu for match in matches if match is not None for gpu in match[:1]]
    others = devices.foreign_users(present, (), claims)
    free = [
        gpu
        for gpu in present
        if gpu.uuid not in claims and gpu.uuid not in others and not gpu.unusable
    ]
    if present and not free:
        raise UserError(
            "every GPU is in use", "wait, name GPUs with --gpus, or test CPU ranks with --cpu"
        )
    return free


def run(
    store: Store, gpus: Sequence[Gpu], ranks: int, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Run every scene, write the report, and remove all jobs except failed ones.

    Args:
        store: The jobs; the self-test uses the same queue.
        gpus: The GPUs to test; empty for CPU ranks.
        ranks: Number of ranks that use all of them.
        say: Called with a description of the current action.

    Raises:
        UserError: The queue is paused.
    """
    if store.paused:
        raise UserError("the queue is paused", "`fsdp-tui pause --off` lets jobs start")
    root = store.home / "selftest"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    stage = Stage(store, root, gpus, ranks, say)
    findings: list[Finding] = []
    try:
        for finding in run_scenes(stage):
            findings.append(finding)
            yield finding
    finally:
        stage.clear()
        if not stage.failed:
            shutil.rmtree(root, ignore_errors=True)
    report = {
        "t": round(time.time(), 3),
        "gpus": [{"uuid": gpu.uuid, "name": gpu.name} for gpu in gpus],
        "ranks": ranks,
        "findings": [finding.to_dict() for finding in findings],
    }
    write_atomic(store.home / REPORT, json.dumps(report, indent=1) + "\n")
