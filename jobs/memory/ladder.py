"""Find the changes that make a job fit, cheapest first. Pure.

Each rung is tried on top of those already taken. A rung that does not apply, cannot run or does not
help is skipped, and tried again after another one has helped. A rung that saves more than is needed
gives way to a milder variant.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.memory.fit import Verdict, size_sold_as
from jobs.spec.families import FAMILIES
from jobs.spec.keys.prompts import frames_of, requests_of
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.launch_conflicts import rings_masked
from jobs.spec.rules.lora_conflicts import modulation_of, trains_text
from jobs.spec.rules.no_effect import find_inapplicable
from jobs.spec.rules.strategy import SHARDING, checkpoints_activations, shards, world_size
from jobs.spec.values.resolutions import all_resolutions, resolutions_of
from jobs.spec.values.value_types import most_on_card
from jobs.units import ordinal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.memory.fit import Fit, Room
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec, RecipeKeys
    from jobs.spec.keys.training import TrainingKeys

    Changes = dict[str, Any]


# -- rungs ----------------------------------------------------------------------------------
# Changes to a job that reduce its memory, and what each one costs. Pure.


# Factors by which a step takes longer: estimates from the work each change adds, not measurements.
# For a packed base and swapped blocks: a weight takes 6 operations per token (forward,
# recomputation, backward), so 28,000 for the 4,608 tokens of FLUX.2 at 1024 pixels, which is 55 ps
# at 500 TFLOP/s. Larger batches hide more.
RECOMPUTE: Final = 1.30  # a second forward on top of one forward and a backward of twice its work
SMALLER_BATCH: Final = 1.10  # smaller matrices use a GPU less well; the arithmetic is the same
QUANTISED_STATE: Final = 1.00  # the optimizer step is short compared with forward and backward
EIGHT_BITS: Final = 1.13  # unpacked 3 times, 7 bytes each, at 3 TB/s: 7 ps
FOUR_BITS: Final = 1.20  # through a lookup table, 11 bytes each: 11 ps
# unpacking as above for a third of the weights; the other weights take no longer
MODULATION: Final = 1.05
REGATHER: Final = 1.10  # one more all-gather in backward, mostly overlapped with compute
# weights are gathered twice and gradients scattered, instead of one all-reduce
SHARD_ALL: Final = 1.20
SHARD_ADAPTER: Final = 1.05  # small all-gathers
SPLIT_TOKENS: Final = 1.20  # keys and values are exchanged, and weights are gathered twice as often
# all blocks cross PCIe twice, 1 byte at 25 GB/s: 80 ps against the 55 to 62 ps of compute
SWAP: Final = 1.30
HALF_PRECISION: Final = 0.50  # tensor cores: faster but less accurate
OFFLOAD: Final = 3.00  # weights, gradients and state cross PCIe, and the CPU runs the optimizer
ENCODERS: Final = 1.00  # only caption encoding is slower, once
AVERAGE_AWAY: Final = 1.05  # the average crosses PCIe after each step
FEWER_TOKENS: Final = 0.60  # lower resolution or fewer frames: faster

_RESOLUTIONS: Final = (1024, 768, 512, 384, 256)
BITS: Final = {"none": 16, "fp8": 8, "fp8_scaled": 8, "int8": 8, "nf4": 4}
_INTERVALS: Final = (4, 2)  # recompute every n-th block; the cheapest first
_SWAPPED: Final = (4, 8, 16, 24, 32, 48)  # blocks in host memory; models have 24 to 60
_MOST_BLOCKS: Final = 60
_FEWEST_MORE: Final = 4  # blocks; what each GPU keeps is not found out more closely
# Video lengths, rounded down to what a family takes. The first is the most that a job trains on if
# it sets no number.
_FRAMES: Final = (81, 49, 33, 17)


@dataclass(frozen=True)
class Rung:
    """One kind of change.

    Attributes:
        title: The name shown to users.
        slower: Factor on the step time.
        change: Returns the keys it changes in a job; None if there is nothing to change.
        costs: Other costs, in a few words.
        milder: Variants to take instead if they are enough; the cheapest first.
    """

    title: str
    slower: float
    change: Callable[[JobSpec], Changes | None]
    costs: str = ""
    milder: tuple[Rung, ...] = ()


def _checkpointing(spec: RecipeKeys, interval: int = 1) -> Changes | None:
    """Recompute every n-th block completely; None if the job already does."""
    whole = checkpoints_activations(spec) and spec.gradient_checkpointing_policy == "full"
    if whole and spec.gradient_checkpointing_interval <= interval:
        return None
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_policy": "full",
        "gradient_checkpointing_interval": interval,
    }


def _less_checkpointing(spec: TrainingKeys, interval: int) -> Changes | None:
    """Recompute fewer blocks than now, 0 for none; None if the job already does."""
    now = spec.gradient_checkpointing_interval
    if spec.gradient_checkpointing_policy != "full" or 0 < interval <= now:
        return None
    if interval:
        return {"gradient_checkpointing_interval": interval}
    return {
        "gradient_checkpointing": False,
        "fsdp_activation_checkpointing": False,
        "gradient_checkpointing_interval": 1,
    }


def _recompute(interval: int) -> float:
    """Return the step-time factor of recomputing every n-th block."""
    return 1 + (RECOMPUTE - 1) / interval


def _swapping(count: int) -> float:
    """Return the step-time factor of keeping `count` blocks in host memory."""
    return 1 + (SWAP - 1) * count / _SWAPPED[-1]


def _every(interval: int) -> str:
    return f"activation checkpointing of every {ordinal(interval)} block"


def _encoders(spec: JobSpec) -> Changes | None:
    several = world_size(spec) > 1 and spec.shard_text_encoders is False and not trains_text(spec)
    return {"shard_text_encoders": True} if several else None


def _packed_encoders(spec: JobSpec) -> Changes | None:
    whole = spec.text_encoder_precision == "none" and not trains_text(spec)
    return {"text_encoder_precision": "int8"} if whole else None


def _average(spec: RecipeKeys) -> Changes | None:
    here = spec.use_ema and spec.ema_device != "cpu" and spec.strategy not in SHARDING
    return {"ema_device": "cpu"} if here else None


def _batch(spec: TrainingKeys) -> Changes | None:
    """Return the next smaller batch that keeps the global batch."""
    batch = spec.train_batch_size
    smaller = next((n for n in range(batch // 2, 0, -1) if batch % n == 0), None)
    if smaller is None:
        return None
    if spec.gradient_accumulation_steps is None:  # derived from the global batch
        return {"train_batch_size": smaller}
    times = batch // smaller
    return {
        "train_batch_size": smaller,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps * times,
    }


def _optimizer(spec: RecipeKeys) -> Changes | None:
    fits = spec.optimizer == "adamw" and spec.device != "cpu"
    return {"optimizer": "adamw_8bit"} if fits else None


def fewer_bits(spec: RecipeKeys, precision: str) -> Changes | None:
    """Pack a LoRA's frozen base; None if it is already packed as small or smaller."""
    fewer = BITS[spec.base_precision] > BITS[precision]
    return {"base_precision": precision} if spec.model_type == "lora" and fewer else None


def _modulation(spec: RecipeKeys, precision: str) -> Changes | None:
    """Also pack the modulation of a packed base; None if it is already packed at least as small."""
    fewer = BITS[modulation_of(spec)] > BITS[precision]
    packed = spec.model_type == "lora" and spec.base_precision != "none"
    return {"modulation_precision": precision} if packed and fewer else None


def _swap(spec: RecipeKeys, count: int) -> Changes | None:
    """Keep blocks in host memory; None if as many already are, or FSDP shards them."""
    fits = spec.model_type == "lora" and not shards(spec) and spec.device != "cpu"
    now = spec.swap_blocks
    if not fits or most_on_card(now) >= count:
        return None
    if isinstance(now, dict):  # larger GPUs stay without
        return {"swap_blocks": {size: max(number, count) for size, number in now.items()}}
    return {"swap_blocks": count}


def least_swapping(
    spec: JobSpec, rooms: Sequence[Room], fit: Callable[[JobSpec, Room], Fit | None]
) -> JobSpec | None:
    """Keep as few blocks in host memory as are enough, on GPUs of each size.

    Args:
        spec: A job that does not fit, with its strategy and ranks resolved.
        rooms: Its GPUs.
        fit: Returns how a job fits on one of them; None if it cannot be predicted.

    Returns:
        The changed job; None if it cannot swap, or that is not enough.
    """
    whole = spec.model_copy(update={"swap_blocks": 0})
    if _swap(whole, _SWAPPED[0]) is None:
        return None
    counts = range(0, _MOST_BLOCKS + 1, _FEWEST_MORE)

    def fits(count: int, room: Room) -> bool:
        changed = with_changes(whole, {"swap_blocks": count})
        after = fit(changed, room) if changed is not None else None
        return after is not None and after.verdict is Verdict.FITS

    least: dict[str, int] = {}
    for room in sorted(rooms, key=lambda room: room.free):
        size = f"{size_sold_as(room.total)}GB"
        if size in least:  # by one with less that is free
            continue
        enough = bisect_left(counts, True, key=lambda count: fits(count, room))
        if enough == len(counts):
            return None
        least[size] = counts[enough]
    alike = len(set(least.values())) == 1
    return with_changes(whole, {"swap_blocks": next(iter(least.values())) if alike else least})


def _reshard(spec: RecipeKeys) -> Changes | None:
    keeps = spec.strategy in SHARDING and spec.fsdp_reshard_after_forward is not True
    return {"fsdp_reshard_after_forward": True} if keeps else None


def _fsdp2(spec: RecipeKeys) -> Changes | None:
    if world_size(spec) < 2 or spec.strategy not in ("ddp", "hsdp"):
        return None
    changes: dict[str, Any] = {"strategy": "fsdp2", "dp_replicate_size": None, "fsdp_enable": None}
    alike = {"batch_shares": 1} if isinstance(spec.batch_shares, dict) else {}
    return changes | alike | ({"swap_blocks": 0} if spec.swap_blocks else {})


def _placement(spec: RecipeKeys) -> Changes | None:
    whole = spec.model_type == "lora" and spec.lora_placement != "sharded"
    return {"lora_placement": "sharded"} if whole and spec.strategy in SHARDING else None


def _context(spec: RecipeKeys) -> Changes | None:
    """Split samples over the next larger group of ranks, keeping the global batch."""
    family, ranks = FAMILIES.get(spec.model_family), world_size(spec)
    now = spec.context_parallel_size
    able = family is not None and family.context_parallel and spec.device != "cpu"
    if family is None or not able or spec.strategy not in SHARDING:
        return None
    larger = (size for size in range(2 * now, ranks + 1, now) if ranks % size == 0)
    if (size := next(larger, None)) is None:
        return None
    # Ring attention needs flash attention, which supports neither masks nor fp32.
    ring = not rings_masked(family) and spec.mixed_precision != "no"
    changes: dict[str, Any] = {"context_parallel_size": size}
    if spec.gradient_accumulation_steps is not None:  # otherwise derived from the global batch
        forwards = spec.gradient_accumulation_steps * size // now
        changes["gradient_accumulation_steps"] = forwards
    return changes | ({} if ring else {"context_parallel_comm_strategy": "alltoall"})


def _precision(spec: TrainingKeys) -> Changes | None:
    return {"mixed_precision": "bf16"} if spec.mixed_precision == "no" else None


def _offload(spec: RecipeKeys) -> Changes | None:
    here = spec.strategy in SHARDING and not spec.fsdp_cpu_offload and spec.device != "cpu"
    if not here:
        return None
    number = spec.fsdp_reshard_after_forward
    more = {} if isinstance(number, bool) else {"fsdp_reshard_after_forward": True}
    return {"fsdp_cpu_offload": True, **more}


def _samples(spec: DataPlanKeys) -> Changes | None:
    """Limit samples to the resolution and length of the training data."""
    requests = requests_of(spec)
    largest = max((max(request.width, request.height) for request in requests), default=0)
    longest = max((request.frames for request in requests), default=0)
    trained, frames = all_resolutions(spec)[-1], _longest(spec)
    changes: Changes = {"validation_resolution": trained} if largest > trained else {}
    return changes | ({"validation_num_frames": frames} if longest > frames else {}) or None


def _frames(spec: InputKeys) -> Changes | None:
    family = FAMILIES.get(spec.model_family)
    if family is None or not family.frame_step:
        return None
    lengths = (family.frames_of(count) for count in _FRAMES)
    fewer = next((n for n in lengths if family.shortest <= n < _longest(spec)), None)
    return {"num_frames": fewer} if fewer else None


def _longest(spec: InputKeys) -> int:
    """Return the most frames of a video that a job trains on."""
    return spec.num_frames or frames_of(_FRAMES[0], spec.model_family)


def _resolution(spec: DataPlanKeys) -> Changes | None:
    if any(entry.resolution for entry in spec.datasets or []):
        return None  # the data sets' own resolutions override the job's key
    *others, largest = resolutions_of(spec)
    if others:
        return {"resolution": others if len(others) > 1 else others[0], "resolution_mode": "each"}
    smaller = next((side for side in _RESOLUTIONS if side < largest), None)
    return {"resolution": smaller} if smaller else None


LADDER: Final = (
    # Not fp8: its error is larger on the toy models of all 15 families (tests/bench/quantized.py).
    Rung("8-bit base", EIGHT_BITS, partial(fewer_bits, precision="int8"), "frozen weights rounded"),
    Rung(
        "8-bit modulation",
        MODULATION,
        partial(_modulation, precision="int8"),
        "up to a third more error of rounding",
    ),
    Rung("encode captions with sharded encoders", ENCODERS, _encoders),
    Rung("8-bit text encoders", ENCODERS, _packed_encoders, "captions encoded less exactly"),
    Rung("smaller samples", ENCODERS, _samples),
    Rung(
        "activation checkpointing",
        RECOMPUTE,
        _checkpointing,
        milder=tuple(
            Rung(_every(n), _recompute(n), partial(_checkpointing, interval=n)) for n in _INTERVALS
        ),
    ),
    Rung("moving average in host memory", AVERAGE_AWAY, _average),
    Rung("smaller batch, more accumulation", SMALLER_BATCH, _batch, "same global batch"),
    Rung(
        "8-bit AdamW", QUANTISED_STATE, _optimizer, "moments in 8 bits; needs fsdp-tui[optimizers]"
    ),
    Rung(
        "4-bit base", FOUR_BITS, partial(fewer_bits, precision="nf4"), "frozen weights rounded more"
    ),
    Rung(
        "4-bit modulation",
        MODULATION,
        partial(_modulation, precision="nf4"),
        "up to a half more error of rounding",
    ),
    Rung("free gathered weights after forward", REGATHER, _reshard),
    Rung("shard over all ranks", SHARD_ALL, _fsdp2),
    Rung("sharded LoRA", SHARD_ADAPTER, _placement),
    Rung("samples split over ranks", SPLIT_TOKENS, _context, "same global batch"),
    Rung(
        "most blocks in host memory",
        SWAP,
        partial(_swap, count=_SWAPPED[-1]),
        milder=tuple(
            Rung(f"{n} blocks in host memory", _swapping(n), partial(_swap, count=n))
            for n in _SWAPPED[:-1]
        ),
    ),
    Rung("compute in bf16", HALF_PRECISION, _precision, "less exact"),
    Rung("offload to host memory", OFFLOAD, _offload),
    Rung("shorter videos", FEWER_TOKENS, _frames, "learns less motion"),
    Rung("lower resolution", FEWER_TOKENS, _resolution, "learns less detail"),
)
"""From the cheapest to the dearest."""

LOOSER: Final = (
    Rung("no activation checkpointing", 1 / RECOMPUTE, partial(_less_checkpointing, interval=0)),
    *(
        Rung(_every(n), _recompute(n) / RECOMPUTE, partial(_less_checkpointing, interval=n))
        for n in _INTERVALS
    ),
)
"""From the fastest to what is left as it is."""


# -- ladder ---------------------------------------------------------------------------------


# share of the memory before; a change that saves less is not worth suggesting
_HELPS: Final = 0.995


@dataclass(frozen=True)
class Step:
    """A rung that was taken.

    Attributes:
        rung: The rung.
        changes: The keys it changed.
        before: The fit before it.
        after: The fit with it and all earlier steps.
        spec: The job with all changes so far.
    """

    rung: Rung
    changes: Changes
    before: Fit
    after: Fit
    spec: JobSpec

    @property
    def cost(self) -> str:
        """Return the estimated slowdown or speedup of a step, and the other costs."""
        slower = self.rung.slower
        pace = ""
        if slower > 1.75:
            pace = f"an estimated {slower:.0f} times slower"
        elif slower > 1.0:
            pace = f"an estimated {slower - 1:.0%} slower".replace("%", " %")
        elif slower < 1.0:
            pace = "faster"
        return "; ".join(filter(None, [pace, self.rung.costs]))


def whole_on_each(spec: JobSpec, swapping: JobSpec, before: Fit, after: Fit) -> Step:
    """Return the step to `least_swapping` of the job with a copy on each rank.

    Args:
        spec: The job as it is.
        swapping: What `least_swapping` returned.
        before: How `spec` fits.
        after: How `swapping` does.
    """
    changes: Changes = {"strategy": "ddp", "swap_blocks": swapping.swap_blocks}
    if spec.fsdp_enable is not None:
        changes["fsdp_enable"] = None  # it would decide
    slower = _swapping(most_on_card(swapping.swap_blocks))
    rung = Rung("a copy on each GPU, blocks in host memory by its size", slower, lambda _: changes)
    return Step(rung, changes, before, after, swapping)


def climb(
    spec: JobSpec,
    fit: Callable[[JobSpec], Fit | None],
    *,
    enough: Callable[[Fit], bool],
    first: Step | None = None,
) -> Iterator[Step]:
    """Yield the steps that make a job fit, or all that help if it never does.

    Args:
        spec: The job, with its strategy and ranks resolved.
        fit: Returns how a job fits; None if unknown.
        enough: Returns whether a fit is good enough.
        first: A step that is enough and comes before all others.
    """
    now = fit(spec)
    if first is not None and now is not None and not enough(now):
        yield first
        return
    while now is not None and not enough(now):
        step = _next_step(spec, now, fit)
        if step is None:
            return
        if step.rung.milder and enough(step.after):
            tried = (_step(rung, spec, now, fit) for rung in step.rung.milder)
            step = next((step for step in tried if step is not None and enough(step.after)), step)
        yield step
        spec, now = step.spec, step.after


def alternatives(
    spec: JobSpec, fit: Callable[[JobSpec], Fit | None], *, enough: Callable[[Fit, Fit], bool]
) -> Iterator[Step]:
    """Yield changes that are enough without any other, the cheapest first.

    Where none is, yield all that `climb` takes as one, if they are.

    Args:
        spec: As of `climb`.
        fit: As of `climb`.
        enough: Whether a job that needed the first now needs little enough, the second.
    """
    now, alone = fit(spec), False
    if now is None:
        return
    for rung in LADDER:
        tried = (_step(milder, spec, now, fit) for milder in (*rung.milder, rung))
        step = next((step for step in tried if step and enough(now, step.after)), None)
        if step is not None:
            alone = True
            yield step
    taken = [] if alone else list(climb(spec, fit, enough=lambda after: enough(now, after)))
    if taken and enough(now, taken[-1].after):
        title = ", ".join(step.rung.title for step in taken)
        slower = math.prod(step.rung.slower for step in taken)
        changes = {key: value for step in taken for key, value in step.changes.items()}
        costs = "; ".join(dict.fromkeys(step.rung.costs for step in taken if step.rung.costs))
        rung = Rung(title, slower, lambda _: changes, costs)
        yield Step(rung, changes, now, taken[-1].after, taken[-1].spec)


def loosen(
    spec: JobSpec, fit: Callable[[JobSpec], Fit | None], *, enough: Callable[[Fit], bool]
) -> Step | None:
    """Make a fitting job faster by recomputing fewer blocks or none, so that it still fits.

    Args:
        spec: See `climb`.
        fit: See `climb`.
        enough: See `climb`.

    Returns:
        The fastest step; None if the job does not fit, or recomputes no more than it must.
    """
    now = fit(spec) if checkpoints_activations(spec) else None
    if now is None or not enough(now):
        return None
    tried = (_step(rung, spec, now, fit) for rung in LOOSER)
    return next((step for step in tried if step is not None and enough(step.after)), None)


def _next_step(spec: JobSpec, now: Fit, fit: Callable[[JobSpec], Fit | None]) -> Step | None:
    tried = (_step(rung, spec, now, fit) for rung in LADDER)
    helps = (step for step in tried if step is not None and step.after.high < now.high * _HELPS)
    return next(helps, None)


def _step(rung: Rung, spec: JobSpec, now: Fit, fit: Callable[[JobSpec], Fit | None]) -> Step | None:
    """Apply a rung; return None if it has no effect or the job could not run."""
    changes = rung.change(spec)
    changed = changes and with_changes(spec, changes)
    if not changes or not changed:
        return None
    after = fit(changed)
    new = {key: value for key, value in changes.items() if value != getattr(spec, key)}
    return None if after is None else Step(rung, new, now, after, changed)


def with_changes(spec: JobSpec, changes: Changes) -> JobSpec | None:
    """Return the job with changes; None if one has no effect or the job could not run."""
    try:
        changed = type(spec).model_validate(spec.to_dict() | changes)
    except ValidationError:
        return None
    before = {(conflict.key, conflict.message) for conflict in find_conflicts(spec)}
    if any((conflict.key, conflict.message) not in before for conflict in find_conflicts(changed)):
        return None
    idle = find_inapplicable(changed)
    means = [key for key in changes if changes[key] is not None and key not in idle]
    return changed if means else None
