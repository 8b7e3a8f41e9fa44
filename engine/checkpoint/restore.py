"""Load a checkpoint into a training, on any number of ranks and with any strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.state_dict import set_state_dict

from engine.checkpoint import full, sharded
from engine.checkpoint.contents import options_for, tensors_of
from engine.train.ema import is_schedule_free, set_betas
from jobs.errors import UserError
from jobs.run.checkpoint_files import read_checkpoint, read_state

if TYPE_CHECKING:
    from pathlib import Path

    from engine.ranks.world import World
    from engine.train.train_state import TrainState

# What the job says of a parameter group; everything else in it is state, such as Prodigy's `d`.
_SAID_BY_THE_JOB: Final = ("betas", "eps", "weight_decay")


def load(training: TrainState, path: Path, world: World) -> None:
    """Restore model, optimizer, schedule, average and step; a collective.

    Rates and other settings are the job's, not those that the checkpoint was trained with.

    Args:
        training: What to restore; built for a job that may resume from there, see
            `jobs.resume`.
        path: A sound checkpoint, see `engine.checkpoint.choose`.
        world: The ranks.

    Raises:
        UserError: It does not fit what is trained.
    """
    # Read once: a network file system may show it to one rank before another.
    facts = (read_checkpoint(path), read_state(path)) if world.main else (None, {})
    checkpoint, state = world.from_main(facts)
    if checkpoint is None or "step" not in state:
        raise UserError(f"{path} is not a complete checkpoint")
    layout, has_ema = checkpoint.layout, bool(state.get("ema"))
    settings = _settings(training)
    tensors = tensors_of(training, layout, ema=has_ema and training.ema is not None)
    if layout == "full":
        full.read_tensors(tensors, path)
    else:
        trained = {name for group in _groups(tensors) for name in group["params"]}
        sharded.read_tensors(tensors, path, world.size)
        _leave_out_others(_groups(tensors), trained)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=tensors["model"],
        optim_state_dict=tensors["optimizer"],
        options=options_for(layout),
    )
    training.scheduler.load_state_dict(state["scheduler"])
    _apply(settings, training)
    training.step = int(state["step"])
    if training.scaler is not None and state.get("scaler"):
        training.scaler.load_state_dict(state["scaler"])
    if training.ema is not None and not has_ema:
        training.ema.restart()  # the checkpoint is of a time before there was an average


def _groups(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = tensors["optimizer"]["param_groups"]
    return groups


def _leave_out_others(groups: list[dict[str, Any]], trained: set[str]) -> None:
    """Leave out what a checkpoint has of parameters that are no longer trained.

    Torch (2.13) does so too, but not for an optimizer without state, such as SGD.
    """
    for group in groups:
        group["params"] = [name for name in group["params"] if name in trained]
    groups[:] = [group for group in groups if group["params"]]


@dataclass(frozen=True)
class _Settings:
    """What a freshly built training has of its job: rates and settings of each group."""

    rates: list[float]
    groups: list[dict[str, Any]]


def _settings(training: TrainState) -> _Settings:
    groups = training.optimizer.param_groups
    job_values: list[dict[str, Any]] = [
        {key: group[key] for key in _SAID_BY_THE_JOB if key in group} for group in groups
    ]
    return _Settings([float(rate) for rate in training.scheduler.base_lrs], job_values)


def _apply(settings: _Settings, training: TrainState) -> None:
    """Set them again: a checkpoint restores its own, and a changed job would train as before."""
    scheduler = training.scheduler
    scheduler.base_lrs = list(settings.rates)
    rates = [
        rate * factor(scheduler.last_epoch)
        for rate, factor in zip(settings.rates, scheduler.lr_lambdas, strict=True)
    ]
    scheduler._last_lr = list(rates)
    for group, job_values, base, rate in zip(
        training.optimizer.param_groups, settings.groups, settings.rates, rates, strict=True
    ):
        if is_schedule_free(training.optimizer):
            set_betas(training.optimizer, job_values["betas"])
        group.update(job_values, initial_lr=base, lr=rate)
