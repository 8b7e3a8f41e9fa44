"""Schedule-free AdamW: the weights that it trains, and their average.

The model has the weights at which gradients are taken. Their average, which is what has been
learned, follows from them and from the optimizer's `z` (Defazio et al. 2024). Its authors' `eval`
and `train` (schedulefree 1.4) turn one into the other in place and round each time. Here the
trained weights come back from a copy, so that training does not depend on how often a job samples,
validates or saves.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from engine.model.files.weights import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps an average of the weights in this way."""
    return "train_mode" in optimizer.defaults


@contextmanager
def averaged_in_place(optimizer: Any) -> Iterator[None]:
    """Run with the average in the model.

    The copy takes as much memory as the gradients, which do not exist at that time.
    """
    (group,) = optimizer.param_groups
    parameters = [local_part(parameter.detach()) for parameter in group["params"]]
    trained = [parameter.clone() for parameter in parameters]
    try:
        optimizer.eval()
        yield
    finally:
        torch._foreach_copy_(parameters, trained)
        group["train_mode"] = True


@torch.no_grad()
def averages_of(
    optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return a copy of the average, sharded like the parameters.

    Args:
        optimizer: One that `is_schedule_free`.
        parameters: Name → parameter, all of them the optimizer's.

    Returns:
        Name → average, bit for bit what `averaged_in_place` puts into the model.
    """
    (group,) = optimizer.param_groups
    weight = 1 - 1 / group["betas"][0]
    averages = {}
    for name, parameter in parameters.items():
        z = optimizer.state.get(parameter, {}).get("z")
        value = parameter.detach()
        averages[name] = value.clone() if z is None else torch.lerp(value, z, weight)
    return averages


def set_betas(optimizer: Any, betas: tuple[float, float]) -> None:
    """Take other betas and keep the average: its weights at the new ones are other weights."""
    (group,) = optimizer.param_groups
    if tuple(group["betas"]) == tuple(betas):
        return
    optimizer.eval()
    group["betas"] = betas
    optimizer.train()
