"""The training loop: one optimizer step after another, requests honoured between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.checkpoint import save as save_checkpoint
from engine.replicas import check_replicas
from engine.sampling import sample

if TYPE_CHECKING:
    from pathlib import Path

    from engine.control import Control
    from engine.data.prepare import Prepared
    from engine.families import Family
    from engine.peaks import Peaks
    from engine.step import Stepper, StepResult
    from engine.telemetry import Telemetry
    from engine.training import Training
    from engine.world import World
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec

_REPLICAS_EVERY: Final = 200  # steps between comparisons of what is whole on several ranks


@dataclass
class Trainer:
    """Everything the loop needs."""

    spec: JobSpec
    family: Family
    model_root: Path
    run_dir: RunDir
    world: World
    telemetry: Telemetry
    control: Control
    training: Training
    stepper: Stepper
    data: Prepared
    peaks: Peaks

    def train(self) -> str:
        """Train until the last step or a stop request; the checkpoint is written either way.

        Returns:
            "completed" or "stopped".
        """
        self.training.model.train()
        while True:
            wishes = self.control.agree()
            if wishes.save_now:
                self.save()
                self.control.honoured("save_now")
            if wishes.sample_now:
                self.sample()
                self.control.honoured("sample_now")
            if wishes.stop:
                self.save()
                return "stopped"
            if self.training.step >= self.spec.max_train_steps:
                self.save()
                self.sample()
                return "completed"
            measured = self.stepper.measures()
            self._report(self.stepper.run())
            if measured:
                self.report_memory()
            self._after_step()

    def _report(self, result: StepResult) -> None:
        step = self.training.step
        values: dict[str, Any] = {
            "step": step,
            "epoch": round(self.data.plan.epoch(step), 4),
            "loss": result.loss,
            "lr": result.rate,
            "grad_norm": result.norm,
            "seconds": round(result.seconds, 4),
            "data_seconds": round(result.data_seconds, 4),
            "images_per_second": round(self.data.plan.global_batch / result.seconds, 3),
            "peak_bytes": self.peaks.memory().get("peak"),
        }
        self.telemetry.moved(step)
        self.telemetry.emit("step", **values)
        self.telemetry.say(
            f"step {step}/{self.spec.max_train_steps}  loss {result.loss:.5f}  "
            f"lr {result.rate:.3g}  grad norm {result.norm:.4f}  {result.seconds:.2f} s"
        )
        if result.skipped:
            scaler = self.training.scaler
            scale = f"; the loss scale is now {scaler.get_scale():g}" if scaler is not None else ""
            self.telemetry.warn(
                f"step {step} was left out: loss {result.loss}, gradient norm {result.norm}{scale}"
            )

    def _after_step(self) -> None:
        spec, step = self.spec, self.training.step
        if step >= spec.max_train_steps:
            return  # the end saves and samples by itself
        if step % _REPLICAS_EVERY == 0:
            check_replicas(self.training.trained(), self.world)
        if spec.checkpointing_steps and step % spec.checkpointing_steps == 0:
            self.save()
        if spec.validation_steps and step % spec.validation_steps == 0:
            self.sample()

    def save(self) -> None:
        """Write a checkpoint; a collective. Replicas are compared first: a copy of a wrong one
        would be worse than none.
        """
        with self.telemetry.phase("save"):
            check_replicas(self.training.trained(), self.world)
            path = save_checkpoint(self.training, self.spec, self.run_dir, self.world)
        self.telemetry.emit("checkpoint", step=self.training.step, path=str(path))
        self.telemetry.say(f"saved {path.name}")

    def sample(self) -> None:
        """Sample the validation prompts; a collective."""
        prompts = self.spec.validation_prompts
        if not prompts:
            return
        step = self.training.step
        target = self.run_dir.samples / f"step-{step}"
        with (
            self.telemetry.phase("sample", len(prompts)) as progress,
            self.training.averaged(),
        ):
            files = sample(
                self.training.model, self.spec, self.family, self.model_root, self.data,
                self.world, target, progress,
            )  # fmt: skip
        self.telemetry.emit("sample", step=step, directory=str(target), files=files)

    def report_memory(self) -> None:
        """Record every rank's peak of each phase; a collective."""
        mine = dict(self.peaks.phases)
        everyone: list[dict[str, int]] = [mine] * self.world.size
        if self.world.size > 1:
            torch.distributed.all_gather_object(everyone, mine)
        self.telemetry.emit(
            "memory",
            step=self.training.step,
            measure=self.peaks.measure,
            peaks={name: [rank.get(name) for rank in everyone] for name in mine},
        )
