"""Define the training objective: draws, noisy samples, targets and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from torch.nn import functional

from engine.diffusion.huber import scheduled
from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from engine.families import Family
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.noise import NoiseKeys


# Values of `timestep_sampling` for which the model's scheduler determines sigma.
_SCHEDULED: Final = ("shift", "uniform_shift")


class NoiseDraw(NamedTuple):
    """The random draws of a micro-batch.

    Attributes:
        level: Noise level of each sample, `(B,)`: sigma in (0, 1), or the timestep.
        noise: `(B, C, h, w)`, fp32.
    """

    level: torch.Tensor
    noise: torch.Tensor


@dataclass(frozen=True)
class NoisySample:
    """Noisy samples and training targets of a micro-batch.

    Attributes:
        noisy: The model's input, `(B, C, h, w)`.
        level: Its noise level, `(B,)`: sigma in (0, 1), or the timestep.
        target: The value that the model should predict, `(B, C, h, w)`.
        weight: Weight of each sample's loss, `(B,)`; None weights all equally.
        threshold: `huber_c` of each sample, `(B,)`; None if it does not depend on the noise.
    """

    noisy: torch.Tensor
    level: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None = None
    threshold: torch.Tensor | None = None


class Objective(Protocol):
    """Draws random values for a micro-batch, and computes noisy samples and targets from them.

    These are separate steps, since the loader's threads draw in host memory, ahead of time, while
    the noisy samples are computed on the device.
    """

    def draw(self, latents: torch.Tensor, generators: Sequence[torch.Generator]) -> NoiseDraw:
        """Draw for clean latents `(B, C, h, w)`, each sample with its own generator on the CPU."""
        ...

    def add_noise(self, latents: torch.Tensor, drawn: NoiseDraw) -> NoisySample:
        """Add noise to clean latents `(B, C, h, w)`, on their device.

        It does not synchronize the device.
        """
        ...

    def level_at(self, quantile: float, latents: torch.Tensor) -> float:
        """Return the level at this quantile of the draws for latents of this size."""
        ...


def build_objective(spec: JobSpec, family: Family, model_root: Path) -> Objective:
    """Return the objective of the job's family."""
    if family.facts.objective == "flow":
        from engine.diffusion.rectified_flow import Flow

        low, high = family.sigma_range()
        low, high = max(low, spec.sigma_min), min(high, spec.sigma_max)
        if low >= high:
            raise UserError(
                f"sigma_min {spec.sigma_min:g} and sigma_max {spec.sigma_max:g} exclude this "
                f"model's whole range, {family.sigma_range()}",
                "remove them",
            )
        samples_alike = spec.flow_shift == "sampler"
        shift_of = family.sampler_shift_of if samples_alike else family.shift_of
        by_scheduler = spec.flow_shift is None and spec.timestep_sampling in _SCHEDULED
        terminal = family.terminal() if by_scheduler else 0.0
        return Flow(spec, shift_of, (low, high), terminal, family.facts.uniform_draws)
    from diffusers import DDPMScheduler

    from engine.diffusion.denoising import Denoising

    settings = read_json(model_root / "scheduler" / "scheduler_config.json") or {}
    if "beta_schedule" not in settings:  # otherwise DDPM's default would be used silently
        raise UserError(
            f"the model's scheduler ({settings.get('_class_name', 'none')}) has a noise schedule "
            "other than betas, which epsilon and v-prediction need here",
            "use a model trained with a beta schedule",
        )
    # All scheduler classes store the noise schedule in the same settings, so the class does not
    # matter.
    scheduler = DDPMScheduler.from_pretrained(model_root, subfolder="scheduler")
    return Denoising(scheduler, spec.snr_gamma, scheduled(spec))


def loss_of(
    prediction: torch.Tensor,
    problem: NoisySample,
    spec: NoiseKeys,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss of a micro-batch in fp32: the mean over samples of each sample's mean.

    Args:
        prediction: `(B, C, h, w)`, in any precision.
        problem: The noisy samples and their targets.
        spec: The job; `loss_type` and `huber_c`.
        weight: Per sample `(B,)`, or per cell `(B, 1, h, w)`. Not normalized by their sum, so that
            a sample's share of a step does not depend on the others in its batch.
    """
    prediction = prediction.float()
    if spec.loss_type == "mse":
        each = functional.mse_loss(prediction, problem.target, reduction="none")
    else:
        each = _pseudo_huber(prediction, problem, spec)
    if weight is not None and weight.dim() > 1:
        each = each * weight
    losses = each.flatten(start_dim=1).mean(dim=1)  # (B,)
    if weight is not None and weight.dim() == 1:
        losses = losses * weight
    if problem.weight is not None:
        losses = losses * problem.weight
    return losses.mean()


def _pseudo_huber(prediction: torch.Tensor, problem: NoisySample, spec: NoiseKeys) -> torch.Tensor:
    """Return huber or smooth_l1 of each element, as in sd-scripts (`conditional_loss`).

    For an error d, huber is 2c(√(d² + c²) - c): d² for small d, like mse, and 2c|d| for large d.
    smooth_l1 is huber / c.
    """
    c: torch.Tensor | float = spec.huber_c
    if problem.threshold is not None:
        c = problem.threshold.view(-1, *[1] * (prediction.dim() - 1))
    squared = (prediction - problem.target).square()
    # Compute √(d² + c²) - c without subtracting two large numbers.
    beyond = squared / ((squared + c**2).sqrt() + c)
    return beyond * (2 * c if spec.loss_type == "huber" else 2)
