"""Samples and forward passes of a step, the number of steps, and what follows one. Pure.

All code gets these numbers from here, since some keys follow from others.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Protocol

from jobs.errors import SpecError
from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.strategy import data_parallel_size, shards, world_size
from jobs.spec.values.datasets import regularizes
from jobs.spec.values.value_types import most_on_card, on_card

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys
    from jobs.spec.keys.training import TrainingKeys

_MOST: Final = 2  # suggest at most this many times the job's ranks


def accumulation_steps(spec: RecipeKeys, ranks: int | None = None) -> int:
    """Return the forward passes of each rank in one optimizer step.

    Args:
        spec: The job. A `global_batch_size` that does not divide, which `find_conflicts` rejects,
            is rounded up.
        ranks: World size; default: the job's.
    """
    if spec.global_batch_size is None:
        return spec.gradient_accumulation_steps or 1
    return -(-spec.global_batch_size // _one_forward(spec, ranks))


def global_batch_size(spec: RecipeKeys) -> int:
    """Return the samples of one optimizer step, over all ranks."""
    return spec.global_batch_size or _one_forward(spec) * accumulation_steps(spec)


def is_whole_batch(spec: RecipeKeys) -> bool:
    """Return whether a whole number of forward passes gives the global batch exactly."""
    return global_batch_size(spec) % _one_forward(spec) == 0


def _one_forward(spec: RecipeKeys, ranks: int | None = None) -> int:
    """Return the samples that all ranks together compute in one forward pass."""
    return data_parallel_size(spec, ranks) * spec.train_batch_size


# -- forwards of each rank ------------------------------------------------------------------------


def share_on_card(spec: TrainingKeys, memory: int | None) -> int:
    """Return the share of a step's forwards of a rank on a GPU with this many bytes of memory.

    A GPU that is larger than all sizes has the largest share; so has a rank on the CPU (None).
    """
    return on_card(spec.batch_shares, memory) or most_on_card(spec.batch_shares)


def forwards_of_ranks(shares: Sequence[int], forwards: int) -> list[int]:
    """Share out the forwards of a step, so that all ranks are done as early as possible.

    Args:
        shares: Of each rank: how many it computes while another one of share 1 computes one.
        forwards: Of all ranks together, at least one for each.
    """
    counts = [1] * len(shares)
    ends = [(Fraction(2, share), rank) for rank, share in enumerate(shares)]
    heapq.heapify(ends)
    for _ in range(forwards - len(shares)):
        _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, (Fraction(counts[rank] + 1, shares[rank]), rank))
    return counts


def micro_batches_of(counts: Sequence[int], rank: int) -> list[int]:
    """Return which micro-batches of a step a rank computes, dealt out in rounds.

    Args:
        counts: How many each rank computes.
        rank: Whose.
    """
    rounds = [r for turn in range(max(counts)) for r, most in enumerate(counts) if turn < most]
    return [number for number, whose in enumerate(rounds) if whose == rank]


# -- the base's own prediction ------------------------------------------------------------------


def trains_to_base(spec: JobSpec) -> bool:
    """Return whether a LoRA's regularization samples have the base's prediction as their target."""
    asked = spec.model_type == "lora" and spec.regularization_target == "base"
    return asked and regularizes(spec)


def preserves(spec: JobSpec) -> bool:
    """Return whether each sample is also trained towards the base's prediction."""
    return spec.model_type == "lora" and spec.preservation != "none"


def passes(spec: JobSpec) -> int:
    """Return how often each micro-batch runs forward and backward."""
    return 2 if preserves(spec) else 1


def base_forwards(spec: JobSpec, ranks: int | None = None) -> int:
    """Return the forwards without the adapter in an optimizer step, at most on average.

    Micro-batches of regularization samples share forwards as far as they can
    (`engine.data.index.batch_plan`), and are half of all, or as many as weights say.
    """
    forwards, count = accumulation_steps(spec, ranks), 0
    if trains_to_base(spec):
        weights = [(d.regularization, d.weight) for d in spec.datasets or []]
        total = sum(weight or 0.0 for _, weight in weights)
        mine = sum(weight or 0.0 for of_base, weight in weights if of_base)
        count = math.ceil(forwards * (mine / total if total else 0.5))
    return count + forwards * preserves(spec)


# -- number of steps ----------------------------------------------------------------------------


def total_steps(spec: RecipeKeys, draws_per_epoch: float | None = None) -> int | None:
    """Return the optimizer steps of a job; None if they depend on data that is not counted yet.

    Args:
        spec: The job.
        draws_per_epoch: Samples drawn per epoch of its data, if known.
    """
    if spec.max_train_steps is not None:
        return spec.max_train_steps
    if spec.num_train_epochs is None or draws_per_epoch is None:
        return None
    # Use exact fractions: 0.1 epochs are a tenth, not slightly more.
    draws = Fraction(str(spec.num_train_epochs)) * Fraction(str(round(draws_per_epoch, 3)))
    return max(1, math.ceil(draws / global_batch_size(spec)))


def with_total_steps(spec: JobSpec, draws_per_epoch: float) -> JobSpec:
    """Return the job with its length in steps, even if it is given in epochs.

    Raises:
        SpecError: It has fewer steps than its warm-up.
    """
    spec = spec.model_copy(update={"max_train_steps": total_steps(spec, draws_per_epoch)})
    if conflict := _warmup(spec):
        raise SpecError(conflict.message)
    return spec


def steps_of(spec: TrainingKeys) -> int:
    """Return the optimizer steps of a job whose length is resolved.

    Raises:
        ValueError: The length is not resolved; see `with_total_steps`.
    """
    if spec.max_train_steps is None:
        raise ValueError("the job's length is given in epochs, and its data is not counted yet")
    return spec.max_train_steps


def length_in_words(spec: TrainingKeys) -> str:
    """Return the key that sets a job's length: `max_train_steps: 200`, `num_train_epochs: 3`."""
    if spec.num_train_epochs is not None:
        return f"num_train_epochs: {spec.num_train_epochs:g}"
    return f"max_train_steps: {spec.max_train_steps}"


def periodic_saves(spec: JobSpec) -> int | None:
    """Return how many checkpoints a job writes at intervals; None if its length is unknown."""
    every, steps = spec.checkpointing_steps, total_steps(spec)
    if not every:
        return 1  # the last one
    if isinstance(every, int):
        return None if steps is None else math.ceil(steps / every)
    epochs = spec.num_train_epochs
    return None if epochs is None else math.ceil(Fraction(str(epochs)) / _epochs(every))


# -- what follows a step -------------------------------------------------------------------------


AFTER: Final = ("save", "validate", "sample", "score", "export")
"""What may follow a step, as `jobs.run.rundir.PHASES` calls it, in the order of a job."""


class RhythmKeys(Protocol):
    """The keys that decide what follows a step."""

    checkpointing_steps: int | str
    validation_steps: int | str
    validation_loss_steps: int | str | None
    validation_on_startup: bool
    validation_fraction: float
    validation_prompts: list[Any]
    validation_scores: list[Any]


@dataclass(frozen=True)
class Rhythm:
    """After which steps a job saves, validates, samples, scores samples and exports.

    Attributes:
        every: Steps between two of a kind; 0: only at the end. What a job never does is missing.
        on_startup: Whether it validates and samples before the first step.
        epochs: Epochs between two of a kind whose `every` is 0 until the data is counted.
    """

    every: Mapping[str, Fraction | int]
    on_startup: bool = False
    epochs: Mapping[str, Fraction] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RhythmKeys) -> Rhythm:
        """Return the rhythm of a job whose data is not counted."""
        every: dict[str, int | str] = {"save": spec.checkpointing_steps, "export": 0}
        if spec.validation_fraction:
            every["validate"] = spec.validation_loss_steps or spec.validation_steps
        if spec.validation_prompts:
            every["sample"] = spec.validation_steps
            if spec.validation_scores:
                every["score"] = spec.validation_steps
        every = {what: every[what] for what in AFTER if what in every}
        return cls(
            {what: number if isinstance(number, int) else 0 for what, number in every.items()},
            spec.validation_on_startup,
            {what: _epochs(text) for what, text in every.items() if isinstance(text, str)},
        )

    def counted(self, steps_per_epoch: float | None) -> Rhythm:
        """Return the rhythm in steps, given the optimizer steps per epoch; None: not counted yet.

        The steps of an epoch are a fraction, so that what is due after each follows the step that
        completes it, however many epochs there are.
        """
        if not self.epochs or steps_per_epoch is None:
            return self
        # A third as a float is less than a third, and would miss the step that completes an epoch.
        epoch = Fraction(steps_per_epoch).limit_denominator(_FINEST)
        every = {what: max(Fraction(1), number * epoch) for what, number in self.epochs.items()}
        return Rhythm({**self.every, **every}, self.on_startup)

    def after(self, step: int, steps: int) -> tuple[str, ...]:
        """Return what follows a step, in order; step 0 is before the first.

        Args:
            step: Which.
            steps: How many the job trains.
        """
        if step >= steps:
            return tuple(self.every)
        if step == 0:
            return tuple(w for w in self.every if w in _BY_LOOKING) if self.on_startup else ()
        return tuple(
            what
            for what, every in self.every.items()
            if every and step // every > (step - 1) // every
        )

    def count(self, done: int, steps: int) -> dict[str, int]:
        """Return how often each follows the steps after `done`, up to the last one."""
        if done >= steps:
            return {}
        return {
            what: 1 + ((steps - 1) // every - done // every if every else 0)
            for what, every in self.every.items()
        }


_BY_LOOKING: Final = ("validate", "sample", "score")

_FINEST: Final = 1_000_000  # of the parts of a step


def _epochs(every: str) -> Fraction:
    return Fraction(every.split()[0])


# -- combinations that cannot run ----------------------------------------------------------------


def _global_batch(spec: RecipeKeys) -> Conflict | None:
    size, key = spec.global_batch_size, "global_batch_size"
    if size is None or world_size(spec) % spec.context_parallel_size:
        return None  # or another rule reports it
    at_once, forwards = _one_forward(spec), spec.gradient_accumulation_steps
    product = f"{_ranks(spec)} x train_batch_size {spec.train_batch_size}"
    if not is_whole_batch(spec):
        return Conflict(
            key,
            f"{key} {size} is not a multiple of {at_once} ({product}); use {_fitting(spec, size)}",
        )
    if forwards is not None and forwards * at_once != size:
        return Conflict(
            "gradient_accumulation_steps",
            f"gradient_accumulation_steps {forwards} contradicts {key} {size} ({product} x "
            f"{forwards} = {forwards * at_once}); remove gradient_accumulation_steps",
        )
    return None


def _ranks(spec: DeviceKeys) -> str:
    ranks, size = world_size(spec), spec.context_parallel_size
    named = f"{ranks} rank{'s' * (ranks != 1)}"
    return f"{named} / context_parallel_size {size}" if size > 1 else named


def _fitting(spec: RecipeKeys, size: int) -> str:
    """Suggest the nearest global batches, batch per rank, or numbers of ranks that fit."""
    at_once, batch = _one_forward(spec), spec.train_batch_size
    groups, split = data_parallel_size(spec), spec.context_parallel_size
    below, above = size // at_once * at_once, (size // at_once + 1) * at_once
    choices = [f"global_batch_size: {_either([below, above] if below else [above])}"]
    if size % groups == 0:
        largest = max(n for n in range(1, batch) if size // groups % n == 0)
        choices.append(f"train_batch_size: {largest}")
    fits = [n for n in range(1, _MOST * groups + 1) if size % (n * batch) == 0]
    near = [*[n for n in fits if n < groups][-1:], *[n for n in fits if n > groups][:1]]
    if near:
        choices.append(f"{_either([n * split for n in near])} ranks")
    return ", or ".join(choices)


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _shares(spec: RecipeKeys) -> Conflict | None:
    shares, key = spec.batch_shares, "batch_shares"
    if not all([shares] if isinstance(shares, int) else shares.values()):
        return Conflict(key, "each share is 1 or more", named=True)
    if isinstance(shares, int):
        return None
    if shards(spec):
        return Conflict(
            key,
            "batch_shares needs strategy: ddp, since ranks of FSDP wait for each "
            "other in every forward",
        )
    if world_size(spec) > 1 and accumulation_steps(spec) < 2:
        return Conflict(
            key,
            f"batch_shares needs more than one forward for each rank; set global_batch_size: "
            f"{2 * _one_forward(spec)} or more",
        )
    return None


def _length(spec: TrainingKeys) -> Conflict | None:
    if spec.max_train_steps is None or spec.num_train_epochs is None:
        return None
    return Conflict(
        "max_train_steps",
        f"max_train_steps {spec.max_train_steps} and num_train_epochs {spec.num_train_epochs:g} "
        "are both set; keep one",
    )


def _warmup(spec: RecipeKeys) -> Conflict | None:
    steps, warmup = total_steps(spec), spec.lr_warmup_steps
    if steps is None or warmup <= steps:
        return None
    of = "max_train_steps"
    if spec.num_train_epochs is not None:
        of = f"the steps of num_train_epochs {spec.num_train_epochs:g}"
    return Conflict("lr_warmup_steps", f"lr_warmup_steps ({warmup}) is more than {of} ({steps})")


STEP_RULES: Final = (_global_batch, _shares, _length, _warmup)
