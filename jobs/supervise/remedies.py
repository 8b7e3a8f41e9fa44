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
            "max_sequence_length; cached files are kept",
        ),
        (
            r"out of GPU memory while caching latents",
            "lower resolution or, for videos, num_frames; cached files are kept",
        ),
        (
            r"out of GPU memory while (starting|importing|loading|reading)",
            "check `fsdp-tui gpus` for other users of the GPU; else shard the weights over "
            "more GPUs with strategy: fsdp2, or set fsdp_cpu_offload",
        ),
        (
            r"out of GPU memory in the optimizer",
            "set optimizer: adamw_8bit or, with use_ema, ema_device: cpu; or shard the weights "
            "over more GPUs with strategy: fsdp2; or set fsdp_cpu_offload",
        ),
        (
            r"out of GPU memory while sampling",
            "sample smaller images or fewer frames (validation_resolution, validation_prompts); "
            "training itself fits",
        ),
        (
            r"out of GPU memory|CUDA out of memory",
            "turn on gradient_checkpointing; or lower train_batch_size or resolution; or shard "
            "the weights over more GPUs with strategy: fsdp2; or set fsdp_cpu_offload",
        ),
        (
            r"machine ran out of memory|killed by the kernel",
            "the machine has too little memory: stop other programs, run fewer ranks, or turn "
            "fsdp_cpu_offload off",
        ),
        (
            r"no space left|disk is full|no room for|quota",
            "free disk space with `fsdp-tui prune`, `fsdp-tui cache clear`, or by deleting "
            "checkpoints; then resume",
        ),
        (
            r"\bnan\b|not finite|non-?finite|\binf\b",
            "lower learning_rate, raise lr_warmup_steps, or train in bf16; on_nonfinite: skip "
            "skips single bad steps",
        ),
        (
            r"^hang:|stood still",
            "check the stacks at the end of each rank's log; `fsdp-tui doctor` tests "
            "communication between GPUs",
        ),
        (
            r"nccl|connection (reset|closed|refused)|\bgloo\b",
            "run `fsdp-tui doctor` to test communication between ranks; see the log of the rank "
            "that ended first",
        ),
        (
            r"killed by SIGKILL|vanished",
            "the rank was killed from outside; the job itself looks fine: resume it",
        ),
        (
            r"No module named|ImportError|ModuleNotFoundError",
            "a package is missing in the ranks' environment; run `fsdp-tui doctor`",
        ),
    )
)
_OTHERWISE: Final = "see the traceback in the failed rank's log"


def advice(state: State, reason: str) -> str:
    """What to do now, in one sentence; "" where nothing has to be done.

    Args:
        state: Of the job.
        reason: Why it is in that state, as `jobs.run.diagnosis.why_failed` found.
    """
    if state is State.LOST:
        return "the job itself looks fine: resume it"
    if state is not State.FAILED:
        return ""
    return next((words for pattern, words in _ADVICE if pattern.search(reason)), _OTHERWISE)
