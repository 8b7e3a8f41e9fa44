"""What is trained and everything that changes with it: the contents of a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.train.ema import averaged_in_place, averages_of, is_schedule_free

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch.optim.lr_scheduler import LambdaLR

    from engine.train.ema import Ema


@dataclass
class TrainState:
    """The model with its trained parameters, and the state of its training.

    Attributes:
        model: The transformer, sharded or not.
        optimizer: Over the trained parameters.
        scheduler: Advances once per optimizer step.
        ema: The moving average, if the job wants one.
        scaler: The loss scale of fp16.
        step: Optimizer steps done.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    ema: Ema | None = None
    scaler: torch.amp.GradScaler | None = None
    step: int = 0

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return name → trained parameter."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    @property
    def has_average(self) -> bool:
        """Whether there are averaged weights, of the job's wish or the optimizer's own."""
        return self.ema is not None or is_schedule_free(self.optimizer)

    def averaged(self) -> AbstractContextManager[None]:
        """Within this context the model has its averaged weights, if there are any."""
        if self.ema is not None:
            return self.ema.in_place()
        if is_schedule_free(self.optimizer):
            return averaged_in_place(self.optimizer)
        return nullcontext()

    def averages(self) -> dict[str, torch.Tensor]:
        """Name → averaged weight: the moving average itself, or a copy of the optimizer's."""
        if self.ema is not None:
            return self.ema.shadow
        return averages_of(self.optimizer, self.trained())
