"""Compute a prediction from a trace, a strategy, a number of ranks, and the job's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from engine.memory.tracing.live import BLOCK, rounded
from engine.memory.walk import Walk, cost_of, layout_of, swapped_of, work_and_traffic
from engine.model.precision import compute_dtype
from engine.train.gradients import BUCKET, UNDER_WAY
from engine.train.muon import flops_of, rounds_of
from jobs.errors import UserError
from jobs.memory.predicted import TITLES, Parts, Phase, Predicted
from jobs.spec.rules.averages import SCHEDULE_FREE
from jobs.spec.rules.steps import accumulation_steps, passes
from jobs.spec.rules.strategy import SHARDING, chosen_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.memory.tracing.trace import Trace
    from engine.memory.walk import Layout
    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys, FsdpKeys
    from jobs.spec.keys.training import TrainingKeys


# -- overheads ------------------------------------------------------------------------------
# Memory that the model does not explain: named constants, and bounds on the allocator's reserve.
#
# The values come from published measurements (a GPU's context, NCCL's buffers), from replaying
# traces through a model of the caching allocator, and from an H200 (docs/gpu.md), which reserved
# 1.005 to 1.08 of what was allocated. `Overheads` is an argument of `predict`, so that values
# measured on the user's machine can replace these.


_MIB = 1 << 20


@dataclass(frozen=True)
class Overheads:
    """Bytes on a GPU in addition to tensors, and how much torch reserves on top of them.

    Attributes:
        cuda_context: The driver's context and loaded kernels, per process.
        cublas: Workspaces of cuBLAS and cuBLASLt.
        nccl: Buffers of the communicator of all ranks.
        nccl_more: Buffers of each further communicator: HSDP's replicas, context-parallel groups.
        reserved_low: Lower bound of reserved bytes per allocated byte at the peak.
        reserved_high: Upper bound of the same ratio.
        segment: Granularity of reserved memory in bytes.
    """

    cuda_context: int = 400 * _MIB
    cublas: int = 40 * _MIB
    nccl: int = 800 * _MIB
    nccl_more: int = 400 * _MIB
    reserved_low: float = 1.005
    reserved_high: float = 1.25
    segment: int = 2 * _MIB

    def driver_bytes(self, communicators: int) -> dict[str, int]:
        """Return the bytes, by name, that the driver counts on top of torch's reserved memory."""
        parts = {"cuda_context": self.cuda_context, "cublas": self.cublas}
        if communicators:
            parts["nccl"] = self.nccl + (communicators - 1) * self.nccl_more
        return parts

    def reserved(self, allocated: int, kept: int = 0) -> tuple[int, int]:
        """Return lower and upper bounds of torch's reserved memory for a peak of allocations.

        Args:
            allocated: The peak.
            kept: Bytes that another stream has freed, which this one cannot use.
        """
        low, high = (
            -(-int(allocated * factor + kept) // self.segment) * self.segment
            for factor in (self.reserved_low, self.reserved_high)
        )
        return low, high


OVERHEADS = Overheads()
"""Valid with `expandable_segments:True`, which jobs are launched with."""


# -- optimizers -----------------------------------------------------------------------------
# State and temporary memory of each optimizer, from the shapes of a rank's trained parameters.
#
# These are formulas, since running an optimizer on the shards for every number of ranks would be
# too slow for interactive use. `tests/engine/memory/test_memory.py` compares them with the real
# ones.


_QUANTISED_FROM: Final = 4096  # elements; torchao keeps smaller tensors in fp32
_QUANTISED_BLOCK: Final = 256  # elements that share a scale
_CODES: Final = 1024  # bytes of an 8-bit state's lookup table


@dataclass(frozen=True)
class Trained:
    """A rank's part of a trained parameter, in fp32.

    Attributes:
        numel: Number of elements on this rank.
        shape: Shape of the full parameter.
        matrix: Whether muon orthogonalizes its momentum.
        sharded: Whether other ranks have other parts of it.
    """

    numel: int
    shape: tuple[int, ...]
    matrix: bool = False
    sharded: bool = False

    @property
    def size(self) -> int:
        """Return the bytes of a tensor of this size."""
        return rounded(4 * self.numel)


def state_bytes(spec: TrainingKeys, trained: Sequence[Trained]) -> int:
    """Return the bytes of the optimizer's state after its first step."""
    return sum(_STATES[spec.optimizer](parameter) for parameter in trained)


def temporary_bytes(
    spec: RecipeKeys,
    trained: Sequence[Trained],
    *,
    on_cuda: bool,
    shards: int = 1,
    replicas: int = 1,
) -> int:
    """Return the most that an optimizer step allocates temporarily.

    Args:
        spec: The job.
        trained: What a rank has of the trained parameters.
        on_cuda: Whether they are on a GPU.
        shards: Ranks that share a copy of the sharded ones.
        replicas: Copies of these.
    """
    sizes = [parameter.size for parameter in trained]
    if not sizes:
        return 0
    most = max(sizes)
    match spec.optimizer:
        case "lion":
            return min(sum(sizes), max(most, 4 * BUCKET))
        case "adamw_schedule_free":
            # A bucket's denominators live until those of the next one are computed.
            return min(sum(sizes), 2 * max(most, 4 * BUCKET))
        case "prodigy":
            return min(sum(sizes), max(most, 4 * BUCKET))
        case "adafactor" | "came":
            # Squares, or factors, of one tensor; of those that are not factored, squares stay.
            vectors = sum(p.size for p in trained if len(p.shape) < 2)
            return most + vectors + sum(map(_new_means, trained))
        case "muon":
            return max(
                _of_rounds(shapes, _muon_width(spec), *team)
                for team, shapes in _teams(trained, shards, replicas).items()
            )
        case "adamw_8bit":
            return 0 if on_cuda else 6 * most  # compiled into one kernel on CUDA, eager on the CPU
    return 0  # fused AdamW and SGD need no temporary memory


def _adamw(parameter: Trained) -> int:
    return 2 * parameter.size + BLOCK  # the fused version keeps the step count on the device


def _muon(parameter: Trained) -> int:
    return parameter.size if parameter.matrix else _adamw(parameter)


def _muon_width(spec: RecipeKeys) -> int:
    """Return the bytes of a number that matrices are sent and orthogonalized in."""
    return 4 if spec.mixed_precision == "no" else 2


def _teams(
    trained: Sequence[Trained], shards: int, replicas: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return (shards, replicas) → shapes of the matrices that these ranks orthogonalize."""
    teams: dict[tuple[int, int], list[tuple[int, int]]] = {(1, 1): []}
    for parameter in trained:
        if parameter.matrix:
            team = (shards, replicas) if parameter.sharded else (1, shards * replicas)
            rows, columns = parameter.shape
            teams.setdefault(team, []).append((rows, columns))
    return teams


def _most_owned(matrices: int, shards: int, replicas: int) -> tuple[int, int]:
    """Return how many matrices of a round the first rank owns, and how many its replica does."""
    ranks = shards * replicas
    return -(-matrices // ranks), matrices // ranks * shards + min(matrices % ranks, shards)


def _of_rounds(shapes: Sequence[tuple[int, int]], width: int, shards: int, replicas: int) -> int:
    """Return the peak memory of orthogonalizing matrices, on the rank that has the most of them.

    Follows `engine.train.muon`: while a round is computed, the next one comes in and the results of
    the one before go out. Those are turned into fp32 when they are applied.
    """
    ranks = shards * replicas
    sizes = []
    for chosen in rounds_of(shapes, ranks):
        (rows, columns), count = shapes[chosen[0]], len(chosen)
        mine, of_replica = _most_owned(count, shards, replicas)
        sent = rounded(width * of_replica * -(-rows // shards) * columns)
        gram = rounded(width * mine * min(rows, columns) ** 2)
        # Replicas that own fewer matrices fill up what they send.
        filled = rounded(width * (mine - 1) * rows * columns) if count % ranks else 0
        in_fp32 = rounded(4 * replicas * of_replica * -(-rows // shards) * columns) * (width < 4)
        sizes.append(
            (sent, rounded(width * mine * rows * columns), gram, mine > 1, filled, in_fp32)
        )
    most = behind = shared = applied = 0
    for place, (sent, whole, gram, several, filled, in_fp32) in enumerate(sizes):
        arrived = sent + whole * (shards > 1)
        coming = 0
        if ranks > 1 and place + 1 < len(sizes):
            coming = sizes[place + 1][0] + sizes[place + 1][1] * (shards > 1)
        joined = whole * (1 + several) * (shards > 1)
        shared_out = (replicas > 1) * (replicas * sent + filled)
        leaving = joined + sent if shards > 1 else whole + shared_out
        most = max(most, behind + coming + max(arrived, joined, 2 * (whole + gram), leaving))
        going = whole + (sent if shards > 1 else replicas * sent) if ranks > 1 else 0
        # HSDP's replicas get theirs when the shards are back.
        most = max(most, coming + going + max(shared, applied))
        behind, shared = going, (1 + replicas) * sent if shards > 1 and replicas > 1 else 0
        applied = replicas * sent + in_fp32
        if ranks == 1:  # at once
            most = max(most, applied)
    return max(most, shared, applied)


def _adafactor(parameter: Trained) -> int:
    return parameter.size if len(parameter.shape) < 2 else _rows_and_columns(parameter)


def _came(parameter: Trained) -> int:
    means = parameter.size if len(parameter.shape) < 2 else 2 * _rows_and_columns(parameter)
    return parameter.size + means


def _new_means(parameter: Trained) -> int:
    """Return the bytes of a step's means until they are added up over the ranks."""
    return 0 if len(parameter.shape) < 2 else _rows_and_columns(parameter)


def _rows_and_columns(parameter: Trained) -> int:
    """Return the bytes of one mean per row and one per column; a matrix's are for all ranks."""
    rows, columns = parameter.numel // parameter.shape[-1], parameter.shape[-1]
    if len(parameter.shape) > 2:
        columns = parameter.numel // parameter.shape[-2]
    return rounded(4 * rows) + rounded(4 * columns)


def _adamw_8bit(parameter: Trained) -> int:
    if parameter.numel < _QUANTISED_FROM or parameter.numel % _QUANTISED_BLOCK:
        return 2 * parameter.size
    scales = rounded(4 * (parameter.numel // _QUANTISED_BLOCK))
    return 2 * (rounded(parameter.numel) + scales + _CODES)


_STATES: Final[dict[str, Callable[[Trained], int]]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adamw_schedule_free": lambda parameter: 2 * parameter.size,
    "sgd": lambda parameter: 0,
    "lion": lambda parameter: parameter.size,
    "prodigy": lambda parameter: 4 * parameter.size,
    "adafactor": _adafactor,
    "came": _came,
    "muon": _muon,
}


# -- predict --------------------------------------------------------------------------------


# Job keys that are shown with a prediction.
_SETTINGS = (
    "model_family",
    "model_flavour",
    "pretrained_model_name_or_path",
    "model_type",
    "mixed_precision",
    "resolution",
    "num_frames",
    "train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "gradient_checkpointing_policy",
    "gradient_checkpointing_interval",
    "optimizer",
    "use_ema",
    "ema_device",
    "lora_rank",
    "base_precision",
    "swap_blocks",
    "lora_placement",
    "fsdp_reshard_after_forward",
    "fsdp_cpu_offload",
    "context_parallel_size",
    "max_sequence_length",
)


def predict(
    trace: Trace,
    spec: JobSpec,
    ranks: int,
    strategy: str,
    *,
    sample: Trace | None = None,
    decoding: int = 0,
    scoring: int = 0,
    resident: int = 0,
    caching: Sequence[Phase] = (),
    overheads: Overheads = OVERHEADS,
) -> Predicted:
    """Predict the memory of a job on the rank that needs the most.

    Args:
        trace: Trace of the job's training step, made for a strategy with the same sharding.
        spec: The job.
        ranks: World size.
        strategy: single, ddp, hsdp or fsdp2.
        sample: Trace of the forward for its samples, if it makes any.
        decoding: Bytes for decoding a sample, while no weights are gathered; 0 if unknown.
        scoring: Bytes of the models that score samples, while no weights are gathered.
        resident: Bytes of other models that stay on the device during training.
        caching: Phases before training, which need no trace.
        overheads: Memory on top of tensors.

    Returns:
        The prediction, without host memory, disk and notes.

    Raises:
        UserError: The job cannot run like that.
    """
    layout = layout_of(spec, ranks, strategy)
    _check(spec, trace, layout, strategy, ranks)
    on_cuda = spec.device != "cpu"
    trained = trained_of(trace, layout)
    blocks = swapped_of(trace.units, layout).values()
    swapped = sum(blocks)
    held = sum(cost_of(unit, layout).held for unit in trace.units) + trace.buffers - swapped
    own_state = state_bytes(spec, trained)
    state = 0 if layout.offload else own_state
    average = 0
    if spec.use_ema and spec.ema_device != "cpu" and not layout.offload:
        average = sum(parameter.size for parameter in trained)
    base = Parts(parameters=held + resident, optimizer=state + average)
    # Samples and checkpoints need a second copy of the trained weights. No gradients exist at that
    # time.
    averages = 0
    if spec.optimizer == SCHEDULE_FREE and not layout.offload:
        averages = sum(parameter.size for parameter in trained)
    walk = Walk(trace, layout, base)
    walk.step(accumulation_steps(spec, ranks) * passes(spec))
    workspace = _workspace(spec, trace, layout, trained, ranks, on_cuda=on_cuda)
    phases = {name: Phase(name, parts) for name, parts in walk.peaks.items()}
    phases["optimizer"] = Phase(
        "optimizer", replace(base, gradients=walk.gradients, workspace=workspace)
    )
    # Gradients are averaged in buckets during backward. The last bucket is sent when all gradients
    # exist.
    averaged = replace(
        base, gradients=walk.gradients, workspace=_averaging(trace, layout) if ranks > 1 else 0
    )
    if averaged.workspace and Phase("backward", averaged).peak > phases["backward"].peak:
        phases["backward"] = Phase("backward", averaged)
    phases["load"] = Phase("load", Parts(parameters=held))
    gathering = _gathering(spec, trace, layout)
    phases["save"] = Phase("save", replace(base, workspace=gathering + averages))
    if sample is not None:
        walk = Walk(sample, layout, base)
        walk.sample()
        parts = walk.peaks["sample"]
        if sample.second_denoiser:
            other = _second_denoiser(spec, trace, layout) - swapped
            parts = replace(parts, parameters=parts.parameters + other)
        parts = replace(parts, optimizer=parts.optimizer + averages)
        decoded = Parts(parts.parameters, optimizer=parts.optimizer, workspace=decoding)
        later = decoding and decoded.total > parts.total
        phases["sample"] = Phase(
            "sample", decoded if later else parts, "decoding" if later else "denoising"
        )
    if scoring:
        phases["score"] = Phase("score", replace(base, workspace=scoring))
    phases |= {phase.name: phase for phase in caching}
    peak = max(phase.peak for phase in phases.values())
    numbers = sum(parameter.numel for parameter in trained)
    work = work_and_traffic(trace, spec, layout, ranks, trained=numbers, state=own_state)
    work["step"] |= _exchange(spec, trained, max(1, layout.shards), ranks)
    return Predicted(
        model=trace.model,
        parameters=trace.parameters,
        trained=trace.trained,
        strategy=strategy,
        ranks=ranks,
        settings=_settings(spec, ranks),
        phases=tuple(phases[name] for name in TITLES if name in phases),
        # Copies have a stream of their own, which keeps room for two blocks.
        reserved=(
            overheads.reserved(peak, 2 * max(blocks, default=0)) if on_cuda else (peak, peak)
        ),
        overheads=overheads.driver_bytes(_communicators(spec, strategy, ranks)) if on_cuda else {},
        work=work,
    )


def strategy_of(spec: JobSpec, ranks: int) -> str:
    """Return the strategy of a job on `ranks` ranks, as far as it is known without GPUs."""
    if ranks == 1 and spec.strategy in ("auto", "ddp", "single"):
        return "single"
    return chosen_strategy(spec.model_copy(update={"num_processes": ranks}))[0]


def trained_of(trace: Trace, layout: Layout) -> list[Trained]:
    """Return a rank's part of each trained parameter.

    Parameters without a gradient have no optimizer state, except where gradients are averaged over
    replicas: there, a missing gradient counts as zero (`engine.train.gradients`).
    """
    return [
        Trained(layout.local(weight), weight.shape, weight.matrix, layout.is_sharded(weight))
        for unit in trace.units
        for weight in unit.weights
        if weight.trained and not (weight.unused and layout.is_sharded(weight))
    ]


def _exchange(
    spec: RecipeKeys, trained: Sequence[Trained], shards: int, ranks: int
) -> dict[str, int]:
    """Return the bytes that optimizers exchange in a step, and muon's products."""
    if spec.optimizer in ("adafactor", "came"):
        # Columns' means, once or twice, and lengths, in fp32.
        sharded = [p for p in trained if p.sharded]
        columns = sum(p.shape[-1] for p in sharded if len(p.shape) == 2)
        numbers = columns * (1 + (spec.optimizer == "came")) + len(sharded)
        return {"exchanged": round(2 * 4 * numbers * (shards - 1) / shards)}
    if spec.optimizer != "muon":
        return {}
    flops = exchanged = 0
    for (split, copies), shapes in _teams(trained, shards, ranks // shards).items():
        together = split * copies
        for chosen in rounds_of(shapes, together):
            (rows, columns), count = shapes[chosen[0]], len(chosen)
            mine, of_replica = _most_owned(count, split, copies)
            here = -(-rows // split)
            flops += mine * flops_of((rows, columns))
            sent = here * (of_replica - mine) + (rows - here) * mine  # to the owners, and back
            exchanged += (sent + (copies - 1) * here * of_replica) * columns
    kind = "single" if spec.mixed_precision == "no" else "half"
    return {kind: flops, "exchanged": _muon_width(spec) * exchanged}


def _second_denoiser(spec: RecipeKeys, trace: Trace, layout: Layout) -> int:
    """Return the bytes of the second denoiser: frozen, sharded, in a LoRA base's precision.

    If another job trains it, it has an adapter like this job's, a copy on each rank.
    """
    weights = [weight for unit in trace.units for weight in unit.weights]
    full = compute_dtype(spec).itemsize if spec.model_type == "full" else None
    pair = spec.both_experts or spec.other_expert is not None
    adapter = [w.numel * w.stored for w in weights if w.lora and pair]
    base = [layout.local(w) * (full or w.stored) for w in weights if not w.lora]
    return sum(map(rounded, [*base, *adapter]))


def _workspace(
    spec: RecipeKeys,
    trace: Trace,
    layout: Layout,
    trained: Sequence[Trained],
    ranks: int,
    *,
    on_cuda: bool,
) -> int:
    """Return the peak memory of an optimizer step, excluding gradients."""
    if layout.offload and spec.optimizer != "muon":  # whose matrices come to the device
        trained = [
            Trained(w.numel, w.shape)
            for unit in trace.units
            for w in unit.weights
            if w.trained and not layout.is_sharded(w)
        ]
    return max(
        temporary_bytes(
            spec,
            trained,
            on_cuda=on_cuda,
            shards=max(1, layout.shards),
            replicas=ranks // max(1, layout.shards),
        ),
        _averaging(trace, layout) if ranks > 1 else 0,
    )


def _averaging(trace: Trace, layout: Layout) -> int:
    """Return the bytes of flat gradient buckets: those in flight, plus the next one."""
    numbers = [
        w.numel
        for unit in trace.units
        for w in unit.weights
        if w.trained and not layout.is_sharded(w)
    ]
    buckets = [0]
    for number in reversed(numbers):
        if buckets[-1] and buckets[-1] + number > BUCKET:
            buckets.append(0)
        buckets[-1] += number
    sizes = [rounded(4 * number) for number in buckets]
    return max(sum(sizes[first : first + UNDER_WAY + 1]) for first in range(len(sizes)))


def _gathering(spec: FsdpKeys, trace: Trace, layout: Layout) -> int:
    """Return the largest tensor of a checkpoint, if full tensors are gathered one by one."""
    if spec.fsdp_state_dict_type != "FULL_STATE_DICT":
        return 0
    weights = [w for unit in trace.units for w in unit.weights if w.trained]
    return max((rounded(4 * w.numel) for w in weights if layout.is_sharded(w)), default=0)


def _communicators(spec: DeviceKeys, strategy: str, ranks: int) -> int:
    """Return the number of communicators that NCCL allocates buffers for."""
    if ranks == 1:
        return 0
    more = (strategy == "hsdp") * 2 + (spec.context_parallel_size > 1) * 2
    return 1 + (strategy in SHARDING) + more


def _check(spec: RecipeKeys, trace: Trace, layout: Layout, strategy: str, ranks: int) -> None:
    """Reject combinations that cannot run.

    Raises:
        UserError: Names the conflict.
    """
    if bool(layout.shards) != trace.shape.sharded:
        raise ValueError(f"{strategy} needs a trace of {'sharded' if layout.shards else 'whole'}")
    if strategy == "single" and ranks > 1:
        raise UserError(
            f"strategy: single runs one rank, not {ranks}", "set strategy: ddp or fsdp2"
        )
    replicas = spec.dp_replicate_size or 1
    if strategy == "hsdp" and (replicas < 2 or ranks % replicas):
        raise UserError(
            f"hsdp: dp_replicate_size {replicas} does not divide {ranks} ranks into replicas",
            "set dp_replicate_size to a divisor of the ranks, 2 or more",
        )


def _settings(spec: JobSpec, ranks: int) -> dict[str, Any]:
    values = spec.model_dump(mode="json", include=set(_SETTINGS))
    values["gradient_accumulation_steps"] = accumulation_steps(spec, ranks)
    return {name: values[name] for name in _SETTINGS}
