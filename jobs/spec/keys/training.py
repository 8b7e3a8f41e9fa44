"""How it is trained: batch, optimizer, schedule, precision, loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    AttentionBackend,
    Bool,
    CheckpointPolicy,
    EmaDevice,
    Loss,
    LossWeighting,
    LRScheduler,
    NonFinite,
    Optimizer,
    Precision,
    SizeConditioning,
    TimestepSampling,
    choice,
    field,
    read_attention,
    read_loss,
)


class TrainingKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    resolution: int = field(
        1024, "training", "Pictures are resized to about this many pixels squared, in buckets "
        "of similar aspect ratio.", ge=16, le=8192,
    )  # fmt: skip
    train_batch_size: int = field(1, "training", "Pictures per rank in one forward.", ge=1)
    gradient_accumulation_steps: int = field(
        1, "training", "Forwards per optimizer step; exact, not approximate.", ge=1
    )
    max_train_steps: int = field(
        1000, "training", "Optimizer steps of the whole job.", ge=1, le=1_000_000_000
    )
    learning_rate: float = field(1e-4, "training", "Peak learning rate.", gt=0, le=10)
    optimizer: Annotated[Optimizer, choice(Optimizer)] = field(
        "adamw", "training",
        "adamw runs fused on GPUs; adamw_8bit, prodigy and lion come with the extra "
        "`fsdp-tui[optimizers]`.",
    )  # fmt: skip
    adam_beta1: float = field(0.9, "training", "Beta 1 of adamw, adamw_8bit, prodigy.", ge=0, lt=1)
    adam_beta2: float = field(
        0.999, "training", "Beta 2 of adamw, adamw_8bit, prodigy.", ge=0, lt=1
    )
    adam_epsilon: float = field(1e-8, "training", "Epsilon of adamw, adamw_8bit, prodigy.", gt=0)
    weight_decay: float = field(0.0, "training", "Weight decay of the optimizer.", ge=0)
    lr_scheduler: Annotated[LRScheduler, choice(LRScheduler)] = field(
        "constant", "training", "Learning-rate schedule; advances once per optimizer step."
    )
    lr_warmup_steps: int = field(0, "training", "Steps of linear warm-up.", ge=0)
    lr_end: float = field(
        0.0, "training", "Learning rate that schedules other than constant end at.", ge=0, le=10
    )
    lr_num_cycles: int = field(
        1, "training", "Half waves of cosine_with_restarts, each from the peak.", ge=1, le=1000
    )
    lr_power: float = field(
        1.0, "training", "Power of polynomial: 1 is linear, 2 falls faster first.", gt=0, le=100
    )
    max_grad_norm: float = field(
        1.0, "training", "Clip the global gradient norm to this; 0 turns clipping off.", ge=0
    )
    mixed_precision: Annotated[Precision, choice(Precision)] = field(
        "bf16", "training", "Compute precision; trained weights stay in fp32 either way."
    )
    gradient_checkpointing: Bool = field(
        False, "training", "Recompute activations in backward: less memory, about 30 % slower."
    )
    gradient_checkpointing_policy: Annotated[CheckpointPolicy, choice(CheckpointPolicy)] = field(
        "full", "training",
        "full recomputes whole blocks; selective keeps the results of matrix products and "
        "attention, and recomputes the cheap rest.",
    )  # fmt: skip
    gradient_checkpointing_interval: int = field(
        1, "training", "Recompute every n-th block only: 1 is all of them; a larger number takes "
        "more memory and less time.", ge=1,
    )  # fmt: skip
    torch_compile: Bool = field(
        False, "training", "Compile each repeated block: slow first steps, faster ones after."
    )
    torch_compile_backend: str = field(
        "inductor", "training", "Backend of torch.compile.", min_length=1
    )
    attention_backend: Annotated[AttentionBackend, BeforeValidator(read_attention)] = field(
        "auto", "training",
        "Kernel of scaled-dot-product attention; auto lets torch choose. flash3 is FlashAttention "
        "3, for Hopper GPUs, where its package is installed.",
    )  # fmt: skip
    allow_tf32: Bool = field(
        True, "training", "Let GPUs round fp32 matrix products to TF32 (mixed_precision: no)."
    )
    deterministic: Bool = field(
        False, "training", "Only kernels that give the same bits every time; slower on GPUs."
    )
    on_nonfinite: Annotated[NonFinite, choice(NonFinite)] = field(
        "fail", "training",
        "When a loss or gradient is not finite, on any rank: fail ends the job, skip leaves the "
        "step out on all ranks and goes on (20 in a row end the job).",
    )  # fmt: skip
    seed: int = field(42, "training", "Seed of everything that is drawn.", ge=0, le=2**31 - 1)
    timestep_sampling: Annotated[TimestepSampling, choice(TimestepSampling)] = field(
        "logit_normal", "training",
        "How sigma is drawn: uniform, logit_normal, either of them shifted (uniform_shift, shift), "
        "or mode, which draws the middle more or less often. Families whose samplers shift have "
        "shift as default.",
    )  # fmt: skip
    logit_mean: float = field(0.0, "training", "Mean of the logit-normal sigma.")
    logit_std: float = field(1.0, "training", "Standard deviation of the logit-normal.", gt=0)
    mode_scale: float = field(
        1.29, "training", "How much more often mode draws the middle; below 0 less often.",
        ge=-1, le=1.75,
    )  # fmt: skip
    flow_shift: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "training", "Shift of sigma; the family's own, by resolution, when left out.", gt=0
    )
    sigma_min: float = field(
        0.0, "training", "Lowest sigma that is trained; 0 is data.", ge=0, lt=1
    )
    sigma_max: float = field(
        1.0, "training", "Highest sigma that is trained; 1 is noise.", gt=0, le=1
    )
    loss_weighting: Annotated[LossWeighting, choice(LossWeighting)] = field(
        "none", "training",
        "Weight of the loss by sigma: weighted is ai-toolkit's curve, which is highest near 0.9; "
        "sigma_sqrt and cosmap are diffusers'.",
    )  # fmt: skip
    loss_type: Annotated[Loss, BeforeValidator(read_loss)] = field(
        "mse", "training", "What is minimised: mse, huber or smooth_l1."
    )
    huber_c: float = field(
        0.1, "training", "Where huber and smooth_l1 turn from square to linear.", gt=0
    )
    snr_gamma: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "training", "Min-SNR weighting of epsilon and v-prediction models, 5 is usual.", gt=0
    )
    size_conditioning: Annotated[SizeConditioning, choice(SizeConditioning)] = field(
        "original", "training",
        "What SDXL is told of sizes: original is each picture's own size and where it was cut, as "
        "SDXL was trained; target is the size it was fitted to, cut nowhere.",
    )  # fmt: skip
    caption_dropout_probability: float = field(
        0.0, "training", "Share of samples trained with an empty caption.", ge=0, le=1
    )
    use_ema: Bool = field(
        False, "training", "Keep a moving average of what is trained; samples and export use it."
    )
    ema_decay: float = field(0.999, "training", "Decay of the moving average per step.", ge=0, lt=1)
    ema_device: Annotated[EmaDevice, choice(EmaDevice)] = field(
        "accelerator", "training", "Where the moving average is kept."
    )
    train_guidance: float = field(
        1.0, "training", "Guidance fed to guidance-distilled models while training.", ge=0
    )
