"""Host memory and disk of a job, from the sizes of what it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.memory.predicting.optimizers import state_bytes
from engine.memory.predicting.predict import trained_of
from engine.memory.predicting.sharding import Layout, cost_of, swapped_of
from jobs.memory.host_memory import host_bytes
from jobs.spec.rules.averages import SCHEDULE_FREE, has_average
from jobs.spec.rules.steps import periodic_saves

if TYPE_CHECKING:
    from engine.memory.tracing.trace import Trace
    from jobs.spec.job_spec import JobSpec, RecipeKeys

# Of a rank on a GPU: Python, torch, diffusers, transformers and CUDA's own host side.
PROCESS: Final = 2_500_000_000
# The same on CPU ranks, without CUDA.
PROCESS_ON_CPU: Final = 700_000_000
_READERS: Final = 4 * 16 * 2**20  # buffers of `engine.model.files.weight_reader`
_EXPORTED: Final = {"fp32": 4, "float32": 4, "bf16": 2, "fp16": 2}


def host_of(
    spec: JobSpec, trace: Trace, layout: Layout, ranks: int, *, device: int, autoencoder: int = 0
) -> dict[str, int]:
    """Bytes in host memory.

    Args:
        spec: The job.
        trace: Of its step.
        layout: How weights lie on the ranks.
        ranks: World size; all of them are on this machine.
        device: The most that a rank has on its device; on CPU ranks that is host memory too.
        autoencoder: Bytes of the autoencoder, which waits there while samples are denoised.
    """
    trained = trained_of(trace, layout)
    on_cpu = spec.device == "cpu"
    copy = _saved(spec, trace, layout)
    parts = {"process": PROCESS_ON_CPU if on_cpu else PROCESS, "loading": _READERS}
    if on_cpu:
        parts["tensors"] = device
    if layout.offload:
        shards = sum(cost_of(unit, layout).host for unit in trace.units)
        parts["offloaded_weights"] = shards
        # FSDP copies them into memory that torch pins, in powers of two; the shards lie in our own
        # (`engine.model.pinned_memory`).
        parts["offloaded_gradients"] = sum(
            _power_of_two(4 * parameter.numel) for parameter in trained
        )
        parts["offloaded_optimizer"] = state_bytes(spec, trained)
        if spec.optimizer == SCHEDULE_FREE:  # the weights besides the trained ones, as in `predict`
            parts["offloaded_optimizer"] += sum(parameter.size for parameter in trained)
    if swapped := swapped_of(trace.units, 0 if layout.shards else spec.swap_blocks)[0]:
        several = trace.second_denoiser and spec.validation_prompts
        parts["swapped_blocks"] = 2 * swapped if several else swapped
    if spec.use_ema and spec.ema_device == "cpu" and not on_cpu:
        parts["ema"] = sum(parameter.size for parameter in trained)
    if spec.checkpointing_async is not False and spec.fsdp_state_dict_type != "FULL_STATE_DICT":
        parts["checkpoint_copy"] = copy
    if spec.validation_prompts:
        parts["autoencoder"] = autoencoder
    rank = sum(parts.values())
    needed = rank - (0 if spec.checkpointing_async else parts.get("checkpoint_copy", 0))
    # A copy is made only where there is room, unless the job insists.
    return parts | {
        "rank": rank,
        "least": needed,
        "machine": rank * ranks,
        "machine_least": needed * ranks,
        "present": host_bytes(),
    }


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def disk_of(spec: JobSpec, trace: Trace, file_bytes: int) -> dict[str, int]:
    """Return bytes on disk, whatever the number of ranks.

    Args:
        spec: The job.
        trace: Of its step.
        file_bytes: Of a parameter in the model's files, in which a full export is written.
    """
    whole = Layout(0)
    checkpoint = _saved(spec, trace, whole)
    saves, limit = periodic_saves(spec), spec.checkpoints_total_limit
    kept = min(saves or limit or 1, limit or saves or 1)  # one at least, if the length is unknown
    numbers = trace.trained
    auto = 4 if spec.model_type == "lora" else file_bytes
    width = _EXPORTED.get(str(spec.export_dtype), auto)
    formats = 1 if spec.model_type == "full" else max(1, len(spec.export_formats or [1, 1]))
    return {
        "checkpoint": checkpoint,
        "checkpoints": kept * checkpoint,
        # One more is complete before the oldest is deleted.
        "at_most": (kept + 1) * checkpoint,
        "export": numbers * width * formats,
    }


def _saved(spec: RecipeKeys, trace: Trace, layout: Layout) -> int:
    """Weights, optimizer state and average of what is trained, as a checkpoint has them."""
    trained = trained_of(trace, layout)
    numbers = sum(4 * parameter.numel for parameter in trained)
    return numbers * (2 if has_average(spec) else 1) + state_bytes(spec, trained)
