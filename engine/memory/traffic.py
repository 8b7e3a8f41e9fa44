"""Compute what each rank computes and moves in an optimizer step. Pure arithmetic.

`jobs.memory.seconds` turns the result into seconds, given a GPU's rates.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from engine.memory.tracing.timeline import work_of
from engine.memory.walk import REDUCED, cost_of, kept_unit, swapped_of, swaps_of
from jobs.memory.predicted import WORK_SCHEMA
from jobs.spec.rules.steps import accumulation_steps, base_forwards, passes

if TYPE_CHECKING:
    from engine.memory.predict import Trained
    from engine.memory.tracing.model import Unit
    from engine.memory.tracing.trace import Trace
    from engine.memory.walk import Layout
    from jobs.spec.job_spec import JobSpec

# Bytes that the optimizer's kernels move for each trained element besides its state: the weight is
# read and written, the gradient read. Clipping reads it for the norm, and reads and writes it.
_UPDATE: Final = 12
_CLIP: Final = 12
_AVERAGE: Final = 12  # the moving average is read and written, the weight read


def work_and_traffic(
    trace: Trace, spec: JobSpec, layout: Layout, trained: list[Trained], ranks: int, state: int
) -> dict[str, Any]:
    """Return the work of a micro-batch's forward and backward, and of the rest of a step.

    `linked` are bytes over a rank's link to the others, counted as nccl-tests counts its bus
    bandwidth: an all-gather of S bytes over n ranks counts S (n - 1) / n, and an all-reduce twice
    that. `copied` are bytes between host and device.

    Args:
        trace: Trace of the training step.
        spec: The job.
        layout: Distribution of weights over the ranks.
        trained: A rank's part of the trained parameters.
        ranks: World size.
        state: Bytes of the optimizer's state on a rank.
    """
    shards = max(1, layout.shards)
    received = {unit.name: _gathered(unit, layout) * _share(shards) for unit in trace.units}
    reduced = sum(_reduced(unit, layout) for unit in trace.units)
    costs = [cost_of(unit, layout) for unit in trace.units]
    # Without being freed after forward, weights are still there in backward, as the root's are.
    again = bool(spec.fsdp_reshard_after_forward)
    group = layout.smaller or shards
    share = (group - 1) / group / _share(shards) if again and shards > 1 else 0.0
    replicas = ranks // shards if layout.replicated else 1
    replicated = 2 * _share(replicas) * reduced / shards
    # The root's weights stay, and those of the unit that backward begins with.
    stay = {"", kept_unit(trace.units, layout, reshard=again)}
    of_blocks = sum(size for name, size in received.items() if name not in stay)
    of_backward = of_blocks * share + reduced * _share(shards)
    whole = sum(
        w.numel * w.stored
        for unit in trace.units
        for w in unit.weights
        if w.trained and not layout.is_sharded(w)
    )
    swapped = [*swapped_of(trace.units, swaps_of(spec, layout)).values()]
    offloaded = {unit.name: cost.host for unit, cost in zip(trace.units, costs, strict=True)}
    freed = sum(size for name, size in offloaded.items() if name not in stay)
    fetched = sum(swapped) + sum(offloaded.values())
    numel = sum(parameter.numel for parameter in trained)
    updated = numel * (_UPDATE + _CLIP * bool(spec.max_grad_norm)) + 2 * state
    if spec.use_ema:
        updated += numel * _AVERAGE
    each_time = layout.offload  # replicas then meet after each micro-batch
    return {
        "schema": WORK_SCHEMA,
        "micro_batches": accumulation_steps(spec, ranks) * passes(spec),
        "base_forwards": base_forwards(spec, ranks),
        "base": asdict(work_of(trace.timeline, "base"))
        # What it leaves gathered, the next forward finds.
        | {"linked": round(of_blocks), "copied": fetched},
        "forward": asdict(work_of(trace.timeline, "forward"))
        | {"linked": round(sum(received.values())), "copied": fetched},
        "backward": asdict(work_of(trace.timeline, "backward"))
        | {
            "linked": round(of_backward + replicated * each_time),
            "copied": sum(swapped[:-1])  # the last one stays
            # Resharded over fewer ranks, weights stay on the device.
            + (freed if again and not layout.smaller else 0)
            + (sum(cost.output for cost in costs) if layout.offload else 0),
        },
        "step": {
            "linked": round(2 * _share(ranks) * whole + replicated * (not each_time)),
            "bytes": 0 if layout.offload else updated,
            "host_bytes": updated if layout.offload else 0,
        },
    }


def _share(ranks: int) -> float:
    """Return the share of a tensor that a rank receives from the others."""
    return (ranks - 1) / ranks


def _gathered(unit: Unit, layout: Layout) -> int:
    """Return the bytes of a unit's gathered weights, with the padding of uneven shards."""
    sharded = (w for w in unit.weights if layout.is_sharded(w))
    return sum(layout.local(w) * layout.shards * w.gathered for w in sharded)


def _reduced(unit: Unit, layout: Layout) -> int:
    """Return the bytes of a unit's gradients that are reduced and scattered."""
    trained = (w for w in unit.weights if layout.is_sharded(w) and w.trained and not w.unused)
    return sum(layout.local(w) * layout.shards * REDUCED for w in trained)
