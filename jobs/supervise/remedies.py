"""Advice for a failed job, by the cause of the failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.queue.states import State
from jobs.run.failure import Cause

if TYPE_CHECKING:
    from jobs.run.failure import Failure

RESUME: Final = "the job itself looks fine: resume it"

_SHARD: Final = "shard the weights over more GPUs with strategy: fsdp2"
_OFFLOAD: Final = "set fsdp_cpu_offload"
_KEPT: Final = "cached files are kept"
_LOAD: Final = (
    "check `fsdp-tui gpus` for other users of the GPU",
    f"else {_SHARD}, or {_OFFLOAD}",
)
# By the phase in which a rank ran out of GPU memory.
_GPU_MEMORY: Final = {
    "encode": (
        "encode captions on more GPUs with shard_text_encoders: true, or lower max_sequence_length",
        _KEPT,
    ),
    "latents": ("lower resolution or, for videos, num_frames", _KEPT),
    **dict.fromkeys(("start", "import", "load", "resume"), _LOAD),
    "step": ("set optimizer: adamw_8bit or, with use_ema, ema_device: cpu", _SHARD, _OFFLOAD),
    "sample": (
        "sample smaller images or fewer frames (validation_resolution, validation_prompts)",
        "training itself fits",
    ),
}
# By the phase of the non-finite value. Before the first step, nothing has been trained.
_NOT_FINITE: Final = {
    "encode": ("set mixed_precision: bf16 if it is fp16", "else download the model again", _KEPT),
    "latents": ("download the model again, or leave the file out", _KEPT),
    "sample": ("set mixed_precision: bf16 if it is fp16", "else download the model again"),
}
_BY_PHASE: Final = {Cause.GPU_MEMORY: _GPU_MEMORY, Cause.NOT_FINITE: _NOT_FINITE}
_ADVICE: Final = {
    Cause.GPU_MEMORY: (
        "turn on gradient_checkpointing",
        "lower train_batch_size or resolution",
        _SHARD,
        _OFFLOAD,
    ),
    Cause.HOST_MEMORY: (
        "the machine has too little memory: stop other programs, run fewer ranks, or turn "
        "fsdp_cpu_offload off",
    ),
    Cause.DISK_FULL: (
        "free disk space with `fsdp-tui prune`, `fsdp-tui cache clear`, or by deleting checkpoints",
        "then resume",
    ),
    Cause.NOT_FINITE: (
        "lower learning_rate, raise lr_warmup_steps, or train in bf16",
        "on_nonfinite: skip skips single bad steps",
    ),
    Cause.HANG: (
        "check the stacks at the end of each rank's log",
        "`fsdp-tui doctor` tests communication between GPUs",
    ),
    Cause.COMMUNICATION: (
        "run `fsdp-tui doctor` to test communication between ranks",
        "see the log of the rank that ended first",
    ),
    Cause.KILLED: (
        "find out what killed the rank: `dmesg` shows whether the kernel did, for lack of memory",
        RESUME,
    ),
    Cause.MISSING_PACKAGE: (
        "a package is missing in the ranks' environment",
        "run `fsdp-tui doctor`",
    ),
    Cause.OTHER: ("see the traceback in the failed rank's log",),
}


def advice(state: State, failure: Failure | None) -> tuple[str, ...]:
    """Return the next steps, each in a few words; empty for a job that has not failed.

    Args:
        state: The job's state.
        failure: Why it failed, if known.
    """
    if state is State.LOST:
        return (RESUME,)
    if state is not State.FAILED:
        return ()
    cause = failure.cause if failure is not None else Cause.OTHER
    of_phase = _BY_PHASE.get(cause, {}).get(failure.phase) if failure is not None else None
    return of_phase or _ADVICE[cause]
