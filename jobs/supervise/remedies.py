"""What a person can do about a job that failed, by the reason that was found."""

from __future__ import annotations

import re
from typing import Final

from jobs.queue.states import State

# The first that fits is told.
_ADVICE: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        (
            r"out of GPU memory while encoding captions",
            "encode captions on more GPUs with shard_text_encoders: true, or lower "
            "max_sequence_length; what is cached by now stays",
        ),
        (
            r"out of GPU memory while caching latents",
            "lower resolution or, of videos, num_frames; what is cached by now stays",
        ),
        (
            r"out of GPU memory while (starting|importing|loading|reading)",
            "see with `fsdp-tui gpus` whether others use the GPU; else spread the weights with "
            "strategy: fsdp2 over more GPUs, or set fsdp_cpu_offload",
        ),
        (
            r"out of GPU memory in the optimizer",
            "set optimizer: adamw_8bit or, with use_ema, ema_device: cpu; or spread the weights "
            "with strategy: fsdp2 over more GPUs; or set fsdp_cpu_offload",
        ),
        (
            r"out of GPU memory while sampling",
            "sample smaller images or fewer frames (validation_resolution, validation_prompts); "
            "training itself fits",
        ),
        (
            r"out of GPU memory|CUDA out of memory",
            "turn on gradient_checkpointing; or lower train_batch_size or resolution; or spread "
            "the weights with strategy: fsdp2 over more GPUs; or set fsdp_cpu_offload",
        ),
        (
            r"machine ran out of memory|killed by the kernel",
            "the machine's memory is too small for what runs on it: end other programs, run fewer "
            "ranks, or leave fsdp_cpu_offload off",
        ),
        (
            r"no space left|disk is full|no room for|quota",
            "make room on the disk: `fsdp-tui prune`, `fsdp-tui cache`, or delete checkpoints; "
            "then start it again",
        ),
        (
            r"\bnan\b|not finite|non-?finite|\binf\b",
            "lower learning_rate, raise lr_warmup_steps, or train in bf16; on_nonfinite: skip "
            "passes over single bad steps",
        ),
        (
            r"^hang:|stood still",
            "read the stacks at the end of each rank's log; `fsdp-tui doctor` checks that the "
            "GPUs can talk to each other",
        ),
        (
            r"nccl|connection (reset|closed|refused)|\bgloo\b",
            "`fsdp-tui doctor` checks that the ranks can talk to each other; the log of the rank "
            "that ended first says more",
        ),
        (
            r"killed by SIGKILL|vanished",
            "someone or something killed the rank from outside; nothing is wrong with the job as "
            "far as can be told",
        ),
        (
            r"No module named|ImportError|ModuleNotFoundError",
            "a package is missing in the environment that the ranks run in: `fsdp-tui doctor`",
        ),
    )
)
_OTHERWISE: Final = "the log of the rank that failed has the traceback"


def advice(state: State, reason: str) -> str:
    """What to do now, in one sentence; "" where nothing has to be done.

    Args:
        state: Of the job.
        reason: Why it is in that state, as `jobs.run.diagnosis.why_failed` found.
    """
    if state is State.LOST:
        return "nothing is wrong with the job itself; start it again to go on"
    if state is not State.FAILED:
        return ""
    return next((words for pattern, words in _ADVICE if pattern.search(reason)), _OTHERWISE)
