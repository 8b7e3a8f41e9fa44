"""Keys for training: batch, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import OPTIMIZER, SPEED, TRAINING
from jobs.spec.rules.no_effect import (
    no_decay,
    no_recomputation,
    no_restarts,
    no_warmup,
    not_adam,
    not_compiled,
    not_polynomial,
    one_rank,
    sharded,
    with_context_parallel,
    with_epochs,
    with_global_batch,
)
from jobs.spec.values.field import Keys, field
from jobs.spec.values.resolutions import Resolutions
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    AttentionBackend,
    Bool,
    CheckpointPolicy,
    LRScheduler,
    NonFinite,
    NumberByCard,
    Optimizer,
    Precision,
    TokenRoutes,
    choice,
    read_attention,
)


class TrainingKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    resolution: Resolutions = field(
        1024,
        TRAINING,
        "Images are resized to about this many pixels squared, in buckets of similar aspect "
        "ratio; several: 512,768,1024.",
        resume="changes",
    )
    train_batch_size: int = field(
        1,
        TRAINING,
        "Samples per rank in one forward.",
        resume="ruled",
        label="batch per rank",
        ge=1,
    )
    global_batch_size: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        TRAINING,
        "Samples per optimizer step, on any number of ranks; gradient_accumulation_steps follows "
        "(default: train_batch_size x ranks x gradient_accumulation_steps).",
        resume="ruled",
        label="global batch",
        blank="batch per rank x ranks x accumulation",
        ge=1,
    )
    gradient_accumulation_steps: Annotated[int | None, BeforeValidator(as_none)] = field(
        1,
        TRAINING,
        "Forwards per optimizer step; follows from global_batch_size where that is set.",
        resume="ruled",
        no_effect=with_global_batch,
        label="accumulation",
        ge=1,
    )
    batch_shares: NumberByCard = field(
        1,
        TRAINING,
        "How the forwards of a step are shared out over GPUs of several sizes, with strategy: ddp: "
        "{16GB: 1, 24GB: 3} gives GPUs of up to 24 GB, and larger ones, three times as many as "
        "those of up to 16. Each has one at least.",
        resume="same",
        no_effect=(one_rank, sharded),
        memory=False,
        public=True,
    )
    max_train_steps: Annotated[int | None, BeforeValidator(as_none)] = field(
        1000,
        TRAINING,
        "Number of optimizer steps; follows from num_train_epochs where that is set.",
        resume="ruled",
        no_effect=with_epochs,
        memory=False,
        label="steps",
        ge=1,
        le=1_000_000_000,
    )
    num_train_epochs: Annotated[float | None, BeforeValidator(as_none)] = field(
        None,
        TRAINING,
        "Number of epochs, instead of max_train_steps; an epoch draws each sample as often as its "
        "dataset says.",
        resume="ruled",
        memory=False,
        label="epochs",
        blank="see steps",
        gt=0,
        le=1_000_000,
    )
    learning_rate: float = field(
        1e-4, TRAINING, "Peak learning rate.", resume="changes", memory=False, gt=0, le=10
    )
    optimizer: Annotated[Optimizer, choice(Optimizer)] = field(
        "adamw",
        OPTIMIZER,
        "Optimizer; all but adamw, sgd, muon and adafactor need the extra `fsdp-tui[optimizers]`.",
        resume="impossible",
        mismatch="the optimizer state differs",
    )
    adam_beta1: float = field(
        0.9,
        OPTIMIZER,
        "Beta 1 of adamw, adamw_8bit, adamw_schedule_free, prodigy, and of muon's AdamW.",
        resume="changes",
        no_effect=not_adam,
        memory=False,
        ge=0,
        lt=1,
    )
    adam_beta2: float = field(
        0.999,
        OPTIMIZER,
        "Beta 2 of adamw, adamw_8bit, adamw_schedule_free, prodigy, and of muon's AdamW.",
        resume="changes",
        no_effect=not_adam,
        memory=False,
        ge=0,
        lt=1,
    )
    adam_epsilon: float = field(
        1e-8,
        OPTIMIZER,
        "Epsilon of adamw, adamw_8bit, adamw_schedule_free, prodigy, and of muon's AdamW.",
        resume="changes",
        no_effect=not_adam,
        memory=False,
        gt=0,
    )
    weight_decay: float = field(
        0.0, OPTIMIZER, "Weight decay of the optimizer.", resume="changes", memory=False, ge=0
    )
    lr_scheduler: Annotated[LRScheduler, choice(LRScheduler)] = field(
        "constant", OPTIMIZER, "Learning-rate schedule.", resume="ruled", memory=False
    )
    lr_warmup_steps: int = field(
        0,
        OPTIMIZER,
        "Steps of linear warm-up.",
        resume="ruled",
        no_effect=no_warmup,
        memory=False,
        ge=0,
    )
    lr_end: float = field(
        0.0,
        OPTIMIZER,
        "Final learning rate; not for constant schedules.",
        resume="ruled",
        no_effect=no_decay,
        memory=False,
        ge=0,
        le=10,
    )
    lr_num_cycles: int = field(
        1,
        OPTIMIZER,
        "Cycles of cosine_with_restarts; each starts at the peak.",
        resume="ruled",
        no_effect=no_restarts,
        memory=False,
        ge=1,
        le=1000,
    )
    lr_power: float = field(
        1.0,
        OPTIMIZER,
        "Power of polynomial: 1 is linear; 2 decays faster at first.",
        resume="ruled",
        no_effect=not_polynomial,
        memory=False,
        gt=0,
        le=100,
    )
    max_grad_norm: float = field(
        1.0,
        OPTIMIZER,
        "Clip the global gradient norm to this; 0 turns clipping off.",
        resume="changes",
        ge=0,
    )
    mixed_precision: Annotated[Precision, choice(Precision)] = field(
        "bf16",
        TRAINING,
        "Compute precision; trained weights always stay in fp32.",
        resume="changes",
        label="precision",
    )
    gradient_checkpointing: Bool = field(
        False,
        SPEED,
        "Recompute activations in backward: less memory, about 30% slower.",
        resume="same",
    )
    gradient_checkpointing_policy: Annotated[CheckpointPolicy, choice(CheckpointPolicy)] = field(
        "full",
        SPEED,
        "full: recompute whole blocks; selective: keep results of matrix products and attention, "
        "recompute the rest.",
        resume="same",
        no_effect=no_recomputation,
    )
    gradient_checkpointing_interval: int = field(
        1,
        SPEED,
        "Recompute only every n-th block; 1: all blocks. Larger: faster, more memory.",
        resume="same",
        no_effect=no_recomputation,
        ge=1,
    )
    torch_compile: Bool = field(
        False,
        SPEED,
        "Compile each repeated block: slow first steps, then faster ones.",
        resume="same",
    )
    torch_compile_backend: str = field(
        "inductor",
        SPEED,
        "Backend of torch.compile.",
        resume="same",
        no_effect=not_compiled,
        min_length=1,
    )
    tread: TokenRoutes = field(
        None,
        SPEED,
        "Share of an image's tokens that skips a range of blocks while training (TREAD): {2..-2: "
        "0.5} routes half of them around all blocks but the first two and the last one. Blocks "
        "count from 0; negative numbers count from the end, where -1 is the last one.",
        resume="changes",
        public=True,
    )
    attention_backend: Annotated[AttentionBackend, BeforeValidator(read_attention)] = field(
        "auto",
        SPEED,
        "Attention kernel; auto lets torch choose. flash3: FlashAttention 3 for Hopper GPUs, if "
        "its package is installed.",
        resume="same",
        no_effect=with_context_parallel,
    )
    allow_tf32: Bool = field(
        True,
        SPEED,
        "Use TF32 for fp32 matrix products on GPUs (mixed_precision: no).",
        resume="changes",
    )
    deterministic: Bool = field(
        False, SPEED, "Use only deterministic kernels; slower on GPUs.", resume="same"
    )
    on_nonfinite: Annotated[NonFinite, choice(NonFinite)] = field(
        "fail",
        TRAINING,
        "What to do if a loss or gradient is not finite on any rank. fail: end the job; skip: skip "
        "the step on all ranks (20 in a row end the job).",
        resume="same",
        memory=False,
    )
    seed: int = field(
        42, TRAINING, "Random seed.", resume="changes", memory=False, ge=0, le=2**31 - 1
    )
