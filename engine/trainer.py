"""The training loop: one optimizer step after another, requests honoured between them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from engine.checkpoint import Training, trained_digest
from engine.checkpoint import save as save_checkpoint
from engine.flow import draw, keyed_generator
from engine.gradients import average_gradients, clip
from engine.precision import autocast
from engine.sampling import sample
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from engine.control import Control
    from engine.data.loader import Loader, MicroBatch
    from engine.data.plan import BatchPlan
    from engine.data.prepare import Prepared
    from engine.families import Family
    from engine.telemetry import Telemetry
    from engine.world import World
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec


@dataclass
class Trainer:
    """Everything a step needs."""

    spec: JobSpec
    family: Family
    model_root: Path
    run_dir: RunDir
    world: World
    telemetry: Telemetry
    control: Control
    training: Training
    plan: BatchPlan
    loader: Loader
    data: Prepared

    def __post_init__(self) -> None:
        self.trained = [p for p in self.training.model.parameters() if p.requires_grad]

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
            self._step()
            self._after_step()

    def _step(self) -> None:
        """One optimizer step on the global batch."""
        begun = time.perf_counter()
        spec, training = self.spec, self.training
        step = training.step
        # Dropout inside the model draws from the global generator: keyed like everything else.
        torch.manual_seed(keyed_generator(spec.seed, step, -1 - self.world.rank).initial_seed())
        batches = self.loader.step(step)
        waited = time.perf_counter() - begun
        losses = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(batches, start=1):
            self._sync_gradients(number == len(batches))
            loss = self._loss(batch, step) / len(batches)
            loss.backward()
            losses += loss.detach()
        average_gradients(self.trained, self.world)
        norm = clip(self.trained, spec.max_grad_norm)
        loss_value = float(self.world.average(losses))
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            # Loss and norm are global, so all ranks come to this line together.
            raise UserError(
                f"the loss or gradient is not finite at step {step + 1} "
                f"(loss {loss_value}, gradient norm {norm})",
                "lower learning_rate, or resume from an earlier checkpoint",
            )
        rate = float(training.scheduler.get_last_lr()[0])
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        training.scheduler.step()
        training.step = step + 1
        self._report(loss_value, norm, rate, time.perf_counter() - begun, waited)

    def _loss(self, batch: MicroBatch, step: int) -> torch.Tensor:
        """Mean squared error of the velocity over this micro-batch, in fp32."""
        height, width = batch.latents.shape[-2:]
        targets = draw(
            batch.latents,
            batch.positions,
            seed=self.spec.seed,
            step=step,
            sampling=self.spec.timestep_sampling,
            shift=self.family.shift_of(height, width),
        )
        with autocast(self.spec, self.world.device):
            velocity = self.family.predict(
                self.training.model,
                targets.noisy,
                targets.sigma,
                batch.condition,
                self.spec.train_guidance,
            )
        return torch.nn.functional.mse_loss(velocity.float(), targets.velocity)

    def _sync_gradients(self, last: bool) -> None:
        """FSDP reduces gradients only after the last forward of a step."""
        if isinstance(self.training.model, FSDPModule):
            self.training.model.set_requires_gradient_sync(last)

    def _report(self, loss: float, norm: float, rate: float, seconds: float, waited: float) -> None:
        step = self.training.step
        pictures = self.plan.global_batch
        values: dict[str, Any] = {
            "step": step,
            "epoch": round(self.plan.epoch(step), 4),
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "seconds": round(seconds, 4),
            "data_seconds": round(waited, 4),
            "images_per_second": round(pictures / seconds, 3),
            "peak_bytes": self.world.memory().get("peak"),
        }
        self.telemetry.moved(step)
        self.telemetry.emit("step", **values)
        self.telemetry.say(
            f"step {step}/{self.spec.max_train_steps}  loss {loss:.5f}  lr {rate:.3g}  "
            f"grad norm {norm:.4f}  {seconds:.2f} s"
        )

    def _after_step(self) -> None:
        spec, step = self.spec, self.training.step
        if step >= spec.max_train_steps:
            return  # the end saves and samples by itself
        if spec.checkpointing_steps and step % spec.checkpointing_steps == 0:
            self.save()
        if spec.validation_steps and step % spec.validation_steps == 0:
            self.sample()

    def save(self) -> None:
        """Write a checkpoint; a collective. Replicas are compared first: a copy of a wrong one
        would be worse than none.
        """
        with self.telemetry.phase("save"):
            self._check_replicas()
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
        with self.telemetry.phase("sample", len(prompts)) as progress:
            files = sample(
                self.training.model, self.spec, self.family, self.model_root, self.data,
                self.world, target, progress,
            )  # fmt: skip
        self.telemetry.emit("sample", step=step, directory=str(target), files=files)

    def _check_replicas(self) -> None:
        """All ranks must hold the same values of what is whole on each of them."""
        if self.world.size == 1 or self._sharded():
            return
        mine = trained_digest(self.training.model)
        digests: list[str | None] = [None] * self.world.size
        torch.distributed.all_gather_object(digests, mine)
        if len(set(digests)) != 1:
            raise RuntimeError(f"the ranks' trained weights differ: {digests}")

    def _sharded(self) -> bool:
        return self.world.strategy == "fsdp2" and (
            self.spec.model_type == "full" or self.spec.lora_placement == "sharded"
        )
