"""What a person can do about a job that failed, by the cause that was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.queue.states import State
from jobs.run.failure import Cause

if TYPE_CHECKING:
    from jobs.run.failure import Failure

_LOAD: Final = (
    "see with `fsdp-tui gpus` whether others use the GPU; else spread the weights with "
    "strategy: fsdp2 over more GPUs, or set fsdp_cpu_offload"
)
# By the phase in which a rank ran out of GPU memory.
_GPU_MEMORY: Final = {
    "encode": (
        "encode captions on more GPUs with shard_text_encoders: true, or lower "
        "max_sequence_length; what is cached by now stays"
    ),
    "latents": ("lower resolution or, of videos, num_frames; what is cached by now stays"),
    **dict.fromkeys(("start", "import", "load", "resume"), _LOAD),
    "step": (
        "set optimizer: adamw_8bit or, with use_ema, ema_device: cpu; or spread the weights "
        "with strategy: fsdp2 over more GPUs; or set fsdp_cpu_offload"
    ),
    "sample": (
        "sample smaller images or fewer frames (validation_resolution, validation_prompts); "
        "training itself fits"
    ),
}
_ADVICE: Final = {
    Cause.GPU_MEMORY: (
        "turn on gradient_checkpointing; or lower train_batch_size or resolution; or spread "
        "the weights with strategy: fsdp2 over more GPUs; or set fsdp_cpu_offload"
    ),
    Cause.HOST_MEMORY: (
        "the machine's memory is too small for what runs on it: end other programs, run fewer "
        "ranks, or leave fsdp_cpu_offload off"
    ),
    Cause.DISK_FULL: (
        "make room on the disk: `fsdp-tui prune`, `fsdp-tui cache`, or delete checkpoints; "
        "then start it again"
    ),
    Cause.NOT_FINITE: (
        "lower learning_rate, raise lr_warmup_steps, or train in bf16; on_nonfinite: skip "
        "passes over single bad steps"
    ),
    Cause.HANG: (
        "read the stacks at the end of each rank's log; `fsdp-tui doctor` checks that the "
        "GPUs can talk to each other"
    ),
    Cause.COMMUNICATION: (
        "`fsdp-tui doctor` checks that the ranks can talk to each other; the log of the rank "
        "that ended first says more"
    ),
    Cause.KILLED: (
        "someone or something killed the rank from outside; nothing is wrong with the job as "
        "far as can be told"
    ),
    Cause.MISSING_PACKAGE: (
        "a package is missing in the environment that the ranks run in: `fsdp-tui doctor`"
    ),
    Cause.OTHER: "the log of the rank that failed has the traceback",
}


def advice(state: State, failure: Failure | None) -> str:
    """What to do now, in one sentence; "" where nothing has to be done.

    Args:
        state: Of the job.
        failure: Why it failed, if it did and that is known.
    """
    if state is State.LOST:
        return "nothing is wrong with the job itself; start it again to go on"
    if state is not State.FAILED:
        return ""
    cause = failure.cause if failure is not None else Cause.OTHER
    of_phase = _GPU_MEMORY.get(failure.phase) if failure and cause is Cause.GPU_MEMORY else None
    return of_phase or _ADVICE[cause]
