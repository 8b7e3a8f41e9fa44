"""Advice for a failed job, by the cause of the failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.queue.states import State
from jobs.run.failure import Cause

if TYPE_CHECKING:
    from jobs.run.failure import Failure

_LOAD: Final = (
    "check `fsdp-tui gpus` for other users of the GPU; else shard the weights over more GPUs "
    "with strategy: fsdp2, or set fsdp_cpu_offload"
)
# By the phase in which a rank ran out of GPU memory.
_GPU_MEMORY: Final = {
    "encode": (
        "encode captions on more GPUs with shard_text_encoders: true, or lower "
        "max_sequence_length; cached files are kept"
    ),
    "latents": ("lower resolution or, for videos, num_frames; cached files are kept"),
    **dict.fromkeys(("start", "import", "load", "resume"), _LOAD),
    "step": (
        "set optimizer: adamw_8bit or, with use_ema, ema_device: cpu; or shard the weights over "
        "more GPUs with strategy: fsdp2; or set fsdp_cpu_offload"
    ),
    "sample": (
        "sample smaller images or fewer frames (validation_resolution, validation_prompts); "
        "training itself fits"
    ),
}
_ADVICE: Final = {
    Cause.GPU_MEMORY: (
        "turn on gradient_checkpointing; or lower train_batch_size or resolution; or shard the "
        "weights over more GPUs with strategy: fsdp2; or set fsdp_cpu_offload"
    ),
    Cause.HOST_MEMORY: (
        "the machine has too little memory: stop other programs, run fewer ranks, or turn "
        "fsdp_cpu_offload off"
    ),
    Cause.DISK_FULL: (
        "free disk space with `fsdp-tui prune`, `fsdp-tui cache clear`, or by deleting "
        "checkpoints; then resume"
    ),
    Cause.NOT_FINITE: (
        "lower learning_rate, raise lr_warmup_steps, or train in bf16; on_nonfinite: skip skips "
        "single bad steps"
    ),
    Cause.HANG: (
        "check the stacks at the end of each rank's log; `fsdp-tui doctor` tests communication "
        "between GPUs"
    ),
    Cause.COMMUNICATION: (
        "run `fsdp-tui doctor` to test communication between ranks; see the log of the rank that "
        "ended first"
    ),
    Cause.KILLED: ("the rank was killed from outside; the job itself looks fine: resume it"),
    Cause.MISSING_PACKAGE: (
        "a package is missing in the ranks' environment; run `fsdp-tui doctor`"
    ),
    Cause.OTHER: "see the traceback in the failed rank's log",
}


def advice(state: State, failure: Failure | None) -> str:
    """Return what to do now, in one sentence; "" if nothing.

    Args:
        state: Of the job.
        failure: Why it failed, if it did and that is known.
    """
    if state is State.LOST:
        return "the job itself looks fine: resume it"
    if state is not State.FAILED:
        return ""
    cause = failure.cause if failure is not None else Cause.OTHER
    of_phase = _GPU_MEMORY.get(failure.phase) if failure and cause is Cause.GPU_MEMORY else None
    return of_phase or _ADVICE[cause]
