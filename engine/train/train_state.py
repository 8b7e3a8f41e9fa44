"""What is trained and everything that changes with it: the contents of a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        """Name → parameter of what is trained."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def averaged(self) -> AbstractContextManager[None]:
        """Within this context the model has its averaged weights, if there are any."""
        return self.ema.in_place() if self.ema is not None else nullcontext()
