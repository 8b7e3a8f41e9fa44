"""Steps whose loss or gradient is not finite: end the job or skip them, and say where it began."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from engine.data.loader import Inputs
from jobs.errors import NotFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.data.loader import Loader
    from engine.ranks.world import World
    from engine.train.train_state import TrainState
    from jobs.spec.job_spec import JobSpec

_MOST_SKIPPED: Final = 20  # in a row; an fp16 loss scale starts at 2^16 and halves each time
_NAMED: Final = 4  # samples


class Judge:
    """Judges steps. All ranks call it together, with the same loss and norm.

    Args:
        spec: The job.
        training: What is trained.
        loader: This rank's micro-batches.
        world: The ranks.
    """

    def __init__(self, spec: JobSpec, training: TrainState, loader: Loader, world: World) -> None:
        self._spec = spec
        self._training = training
        self._loader = loader
        self._world = world
        self._skipped = 0

    def reason_to_skip(
        self, step: int, loss: float, norm: float, losses: Sequence[float]
    ) -> str | None:
        """Return None for a finite step, or which ranks and samples a non-finite one comes from.

        Args:
            step: Counted from 0.
            loss: Mean over the global batch.
            norm: Global gradient norm.
            losses: Of this rank's micro-batches.

        Returns:
            "" where the loss is finite on all ranks, and the gradient is not.

        Raises:
            NotFiniteError: The step may not be skipped.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._skipped = 0
            return None
        self._skipped += 1
        origin = "" if math.isfinite(loss) else self._origin(step, losses)
        what = (
            f"the loss or gradient is not finite at step {step + 1} "
            f"(loss {loss}, gradient norm {norm})"
        )
        # An fp16 gradient that overflows is the loss scale's doing, not the model's.
        overflow = self._training.scaler is not None and math.isfinite(loss)
        if self._spec.on_nonfinite == "fail" and not overflow:
            hint = "lower learning_rate, or resume from an earlier checkpoint"
            if self._training.scaler is not None:
                hint = "set mixed_precision: bf16 (or no), or lower learning_rate"
            elif self._spec.attention_backend == "cudnn" and math.isfinite(loss):
                hint = "set attention_backend: auto; cuDNN's may have gradients that are not finite"
            elif step == 0:  # nothing was learned yet
                hint = "leave these samples out, or download the model again"
            raise NotFiniteError(f"{what}{origin}", hint)
        if self._skipped >= _MOST_SKIPPED:
            raise NotFiniteError(
                f"{what}, for {self._skipped} steps in a row{origin}",
                "lower learning_rate, or use bf16",
            )
        return origin

    def _origin(self, step: int, losses: Sequence[float]) -> str:
        """Say which ranks' losses are not finite, on which samples, and whether these are.

        A collective. Every rank has read the same mean of the losses, and comes here.
        """
        bad = [micro for micro, loss in enumerate(losses) if not math.isfinite(loss)]
        try:
            mine = self._loader.inputs(step, bad)
        except Exception as error:  # the others wait for this rank's answer
            mine = [Inputs([], [f"unknown ({error})"])]
        return describe(self._world.gather(mine))


def describe(everyone: Sequence[Sequence[Inputs]]) -> str:
    """Say where a loss that is not finite comes from, as the rest of a sentence.

    Args:
        everyone: By rank, the micro-batches whose loss is not finite.
    """
    ranks = [str(rank) for rank, batches in enumerate(everyone) if batches]
    if not ranks:  # each is finite, their sum is not
        return ""
    where = f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(ranks)}"
    if len(ranks) == len(everyone):
        where = "every rank" if len(ranks) > 1 else ""
    batches = [batch for batches in everyone for batch in batches]
    samples = listed(name for batch in batches for name in batch.names)
    inputs = listed(name for batch in batches for name in batch.nonfinite)
    return (
        f"{f', on {where}' if where else ''}{f', with {samples}' if samples else ''}; "
        f"{f'not finite in the input: {inputs}' if inputs else 'the inputs were finite'}"
    )


def listed(names: Iterable[str]) -> str:
    """Return names, each once, the first of them by name."""
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return f"{', '.join(each[:_NAMED])}{more}"
