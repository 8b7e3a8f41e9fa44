"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec import JobSpec


def build_optimizer(
    spec: JobSpec, parameters: Sequence[torch.nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The job's optimizer over the trained parameters (plain or `DTensor`)."""
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=spec.learning_rate,
        betas=(spec.adam_beta1, spec.adam_beta2),
        eps=spec.adam_epsilon,
        weight_decay=spec.weight_decay,
        # foreach needs one more fp32 copy of the shard at its peak; fused does not
        fused=device.type == "cuda",
    )


def build_scheduler(spec: JobSpec, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Advances once per optimizer step, whatever the number of ranks or forwards."""
    return LambdaLR(optimizer, lambda step: _factor(spec, step))


def _factor(spec: JobSpec, step: int) -> float:
    """The multiple of the peak rate with which step `step`, counted from 0, is done."""
    warmup = spec.lr_warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if spec.lr_scheduler in ("constant", "constant_with_warmup"):
        return 1.0
    done = (step - warmup) / max(1, spec.max_train_steps - warmup)
    done = min(1.0, done)
    return 1.0 - done if spec.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done))
