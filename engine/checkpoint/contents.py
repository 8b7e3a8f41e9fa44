"""What a checkpoint holds: everything that training changes, and what it was made by.

Draws are keyed by seed, step and sample (`engine.diffusion.random_numbers`), so there is no
generator state to keep, and the place in the data is the step: the plan is a function of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.utils._pytree import tree_leaves

from engine.model.files.weights import local_part
from engine.train.optimizer import fill_state
from jobs.memory.host_memory import STATE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.train.train_state import TrainState
    from jobs.run.checkpoint_files import Layout
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.training import TrainingKeys

SCHEMA: Final = 1


@dataclass(frozen=True)
class Contents:
    """A checkpoint's contents on this rank.

    Attributes:
        step: Optimizer steps done.
        layout: How they are to lie on disk.
        tensors: `model`, `optimizer` and, if there are averages, `ema`: state dicts with this
            rank's parts, of the very tensors that are trained or of a copy. The optimizer's is
            flat in the full layout.
        state: What is no tensor; JSON values.
        world_size: Ranks that hold the parts.
    """

    step: int
    layout: Layout
    tensors: dict[str, Any]
    state: dict[str, Any]
    world_size: int

    @property
    def own_bytes(self) -> int:
        """What this rank holds of the tensors."""
        return sum(_held(local_part(tensor)) for tensor in self._all())

    @property
    def total_bytes(self) -> int:
        """What all ranks hold together, each number counted once."""
        total = 0
        for tensor in self._all():
            here = local_part(tensor)
            width = _held(here) / here.numel() if here.numel() else tensor.element_size()
            total += round(width * tensor.numel())
        return total

    @property
    def can_be_copied(self) -> bool:
        """Whether torch's stager knows all the tensors: (2.13) not those made of others."""
        return not any(hasattr(local_part(t), "__tensor_flatten__") for t in self._all())

    def _all(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self.tensors) if isinstance(leaf, torch.Tensor)]


def expected_bytes(training: TrainState, spec: TrainingKeys) -> int:
    """Bytes that a checkpoint takes at least, once the optimizer has made a step.

    The state that the first step makes is counted, not made: on shards that takes torch a second
    for each hundred tensors.
    """
    state = STATE_BYTES[spec.optimizer]
    copies = 2 if training.has_average else 1
    return sum(p.numel() * (copies * p.element_size() + state) for p in training.trained().values())


def collect(
    training: TrainState,
    spec: JobSpec,
    world_size: int,
    data: Mapping[str, Any] | None = None,
) -> Contents:
    """Collect the contents of a checkpoint of the current step.

    Only an optimizer's averages are copied.

    Args:
        training: What is trained.
        spec: The job.
        world_size: How many ranks train it.
        data: What the data is, for whoever resumes; JSON values.
    """
    layout: Layout = "full" if spec.fsdp_state_dict_type == "FULL_STATE_DICT" else "sharded"
    state = {
        "schema": SCHEMA,
        "step": training.step,
        "scheduler": training.scheduler.state_dict(),
        "scaler": training.scaler.state_dict() if training.scaler is not None else None,
        "ema": training.has_average,
        "world_size": world_size,
        "spec": spec.to_dict(),
        "digest": spec.digest(),
        "data": dict(data or {}),
        "time": time.time(),
    }
    return Contents(training.step, layout, tensors_of(training, layout), state, world_size)


def tensors_of(training: TrainState, layout: Layout, *, ema: bool = True) -> dict[str, Any]:
    """State dicts of what is trained; loading fills these very tensors.

    Except for the averages of an optimizer, which are copies and follow from the others.

    Args:
        training: What is trained.
        layout: Of the checkpoint.
        ema: Whether to include the averages.
    """
    fill_state(training.optimizer)
    model, optimizer = get_state_dict(
        training.model, training.optimizer, options=options_for(layout)
    )
    tensors: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if training.has_average and ema:
        tensors["ema"] = training.averages()
    return tensors


def options_for(layout: Layout) -> StateDictOptions:
    """Return torch's options for the state dicts, which omit a LoRA's frozen base."""
    return StateDictOptions(
        ignore_frozen_params=True, flatten_optimizer_state_dict=layout == "full", strict=False
    )


def _held(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor.

    A tensor subclass, such as 8-bit state, counts the tensors that it is made of.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return sum(_held(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
