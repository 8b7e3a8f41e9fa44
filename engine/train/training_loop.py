"""The training loop: one optimizer step after another, requests honoured between them."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.model.adapters.training_adapter import without_training_adapter
from engine.parallel.replica_check import check_replicas
from engine.sample.sampler import Sampler
from engine.sample.scores import Scorer
from engine.train.nonfinite import listed
from engine.train.validation_loss import ValidationLoss
from jobs.run.events import Memory, Sample, Step, Validation
from jobs.run.judging import TITLES
from jobs.spec.rules.steps import Rhythm, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.checkpoint import Saver
    from engine.data.prepare import Prepared
    from engine.diffusion.objective import Objective
    from engine.ranks.team import Control
    from engine.ranks.telemetry import Peaks
    from engine.run_context import RunContext
    from engine.train.optimizer_step import Stepper, StepResult
    from engine.train.train_state import TrainState
    from jobs.run.events import Scores

_COLLECT_EVERY: Final = 50  # steps
_REPLICAS_EVERY: Final = 200  # steps between comparisons of replicated parameters


@dataclass
class Trainer:
    """Everything the loop needs."""

    run: RunContext
    control: Control
    objective: Objective
    training: TrainState
    stepper: Stepper
    data: Prepared
    peaks: Peaks
    saver: Saver
    _sampled: Sample | None = None
    _scorer: Scorer = field(init=False)
    _scorings: int = 0

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.run, self.data)

    def train(self) -> str:
        """Train until the last step or a stop request; the checkpoint is written either way.

        Returns:
            "completed" or "stopped".
        """
        with collected_together():
            return self._train()

    def _train(self) -> str:
        self.training.model.train()
        if self.training.step == 0:
            self._follow()
        while True:
            self.saver.tell()
            ending = self.training.step >= steps_of(self.run.spec)
            wishes = self.control.agree(save_failed=self.saver.failed(), now=ending)
            if any(astuple(wishes)):
                self.settle()
            if wishes.save_failed:
                self.saver.finish()
            if wishes.save_now:
                self.save()
                self.control.acknowledge("save_now")
            if wishes.sample_now:
                self.sample_now()
                self.control.acknowledge("sample_now")
            if wishes.stop:
                self.save(last=True)
                return "stopped"
            if ending:
                self._follow(last=True)
                return "completed"
            self.control.ask(save_failed=self.saver.failed())
            measured = self.stepper.measures()
            self.stepper.run(self._report)
            self.run.telemetry.moved(self.training.step)
            if measured:
                self.report_memory()
            self._after_step()

    def settle(self) -> None:
        """Wait for the step that is still computed, if one is, and report it.

        Before whatever is written or judged: a step that went wrong must not come to be part of
        it. All ranks find the same.

        Raises:
            UserError: It went wrong, and the job says to fail then.
        """
        self.stepper.settle(self._report)

    def _report(self, result: StepResult) -> None:
        step = result.step
        self.run.telemetry.emit(
            Step(
                step=step,
                epoch=round(self.data.plan.epoch(step), 4),
                loss=result.loss,
                base_loss=result.base_loss,
                lr=result.rate,
                grad_norm=result.norm,
                seconds=round(result.seconds, 4),
                data_seconds=round(result.data_seconds, 4),
                images_per_second=round(self.data.plan.global_batch / result.seconds, 3),
                peak_bytes=self.peaks.memory().get("peak"),
            )
        )
        self.run.telemetry.say(step_line(result, steps_of(self.run.spec)))
        if result.skipped:
            scale = f"; loss scale now {result.scale:g}" if result.scale is not None else ""
            self.run.telemetry.warn(
                f"step {step} was skipped: loss {result.loss}, gradient norm {result.norm}"
                f"{result.origin}{scale}"
            )

    def _after_step(self) -> None:
        spec, step = self.run.spec, self.training.step
        if step >= steps_of(spec):
            return  # the end saves and samples by itself
        if step % _COLLECT_EVERY == 0:
            gc.collect(1)
        if step % _REPLICAS_EVERY == 0:
            check_replicas(self.training.trained(), self.run.world)
        self._follow()

    def _follow(self, *, last: bool = False) -> None:
        """Do what follows the present step; the export is made when training has ended."""
        spec = self.run.spec
        rhythm = Rhythm.of(spec).counted(self.data.plan.steps_per_epoch)
        for what in rhythm.after(self.training.step, steps_of(spec)):
            if what == "save":
                self.save(last=last)
            elif what == "validate":
                self.validate()
            elif what == "sample":
                self.sample()
            elif what == "score":
                self.score()

    def save(self, *, last: bool = False) -> None:
        """Write a checkpoint; a collective.

        Replicas are compared first: a copy of a wrong one would be worse than none.
        """
        self.settle()
        check_replicas(self.training.trained(), self.run.world)
        self.saver.save(self.training, last=last)

    def sample(self) -> None:
        """Sample the validation prompts, if there are any; a collective."""
        if not self.run.spec.validation_prompts:
            return
        self.settle()
        step = self.training.step
        target = self.run.run_dir.samples / f"step-{step}"
        sampler = Sampler(self.run, self.data)
        with self.training.averaged(), without_training_adapter(self.training.model):
            files = sampler.sample(self.training.model, target, step)
        gc.collect(1)  # pipelines hold themselves, and the device's memory with them
        self._sampled = Sample(step, str(target), files)
        self.run.telemetry.emit(self._sampled)

    def sample_now(self) -> None:
        """Sample and score on request; warn if there are no prompts. A collective."""
        if not self.run.spec.validation_prompts:
            self.run.telemetry.warn("nothing to sample: the job has no validation_prompts")
        self.sample()
        self.score()

    def score(self) -> None:
        """Score the newest samples on rank 0, if the job asks for it.

        The others wait for it through files: loading a model may take longer than a collective
        waits.
        """
        spec, sampled, world = self.run.spec, self._sampled, self.run.world
        if not spec.validation_scores or sampled is None:
            return
        self._scorings += 1
        place = f"scored-{self._scorings}"
        with self.run.telemetry.phase("score"):
            if world.main:
                scores = self._scorer.score(sampled.step, Path(sampled.directory), sampled.files)
                if scores is not None:
                    self.run.telemetry.emit(scores)
                    self.run.telemetry.say(scores_line(scores))
            gc.collect(1)  # models may hold themselves, too
            self.run.barrier.arrive(place)
            self.run.barrier.wait(place, waiting=self.run.telemetry.moved)

    def validate(self) -> None:
        """Measure the validation loss, if there are held-out samples; a collective."""
        if not self.data.held:
            return
        self.settle()
        loss = ValidationLoss(self.run, self.objective, self.data)
        with self.training.averaged():
            measured = loss.measure(self.training.model)
        if measured is None:
            return
        if measured.nonfinite:
            self.run.telemetry.warn(
                f"the validation loss is not finite: that of {listed(measured.nonfinite)}"
            )
        self.run.telemetry.emit(
            Validation(
                step=self.training.step,
                loss=measured.loss,
                levels=measured.levels,
                samples=measured.samples,
                seconds=round(measured.seconds, 3),
            )
        )
        self.run.telemetry.say(
            f"step {self.training.step}  validation loss {measured.loss:.5f}  "
            f"{measured.samples} held out, {len(measured.levels)} levels  {measured.seconds:.2f} s"
        )

    def report_memory(self) -> None:
        """Record every rank's peak of each phase; a collective."""
        mine = dict(self.peaks.phases)
        everyone = self.run.world.gather(mine)
        self.run.telemetry.emit(
            Memory(
                step=self.training.step,
                measure=self.peaks.measure,
                peaks={name: [rank.get(name) for rank in everyone] for name in mine},
            )
        )


def scores_line(scores: Scores) -> str:
    """Format scores for the log."""
    each = "  ".join(f"{TITLES[name]} {value:.4f}" for name, value in scores.values().items())
    images = f"{scores.references} held-out images, " if scores.references else ""
    return f"step {scores.step}  {each}  {scores.samples} samples, {images}{scores.seconds:.2f} s"


def step_line(result: StepResult, steps: int) -> str:
    """Format a step for the log, in columns aligned with the steps before it.

    Args:
        result: The step.
        steps: How many there will be.
    """
    base = "" if result.base_loss is None else f"to the base {result.base_loss:8.5f}  "
    return (
        f"step {result.step:>{len(str(steps))}}/{steps}  loss {result.loss:8.5f}  {base}"
        f"lr {result.rate:.2e}  grad norm {result.norm:9.4f}  {result.seconds:6.2f} s"
    )


@contextmanager
def collected_together() -> Iterator[None]:
    """Within, Python collects garbage only on request: all ranks at the same step.

    By itself it would stop each rank at a different moment, and each time all others would wait.
    What exists by now is old: `gc.collect(1)` does not check it again.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
