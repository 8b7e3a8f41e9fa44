"""How it is trained: batch, optimizer, schedule, precision, loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.resolutions import Resolutions
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

    resolution: Resolutions = field(
        1024,
        "training",
        "Images are resized to about this many pixels squared, in buckets of similar aspect ratio. "
        "A list such as 512,768,1024 trains at several resolutions.",
    )
    train_batch_size: int = field(1, "training", "Samples per rank in one forward.", ge=1)
    gradient_accumulation_steps: int = field(1, "training", "Forwards per optimizer step.", ge=1)
    max_train_steps: int = field(
        1000, "training", "Number of optimizer steps.", ge=1, le=1_000_000_000
    )
    learning_rate: float = field(1e-4, "training", "Peak learning rate.", gt=0, le=10)
    optimizer: Annotated[Optimizer, choice(Optimizer)] = field(
        "adamw",
        "training",
        "Optimizer; adamw_8bit, prodigy and lion need the extra `fsdp-tui[optimizers]`.",
    )
    adam_beta1: float = field(0.9, "training", "Beta 1 of adamw, adamw_8bit, prodigy.", ge=0, lt=1)
    adam_beta2: float = field(
        0.999, "training", "Beta 2 of adamw, adamw_8bit, prodigy.", ge=0, lt=1
    )
    adam_epsilon: float = field(1e-8, "training", "Epsilon of adamw, adamw_8bit, prodigy.", gt=0)
    weight_decay: float = field(0.0, "training", "Weight decay of the optimizer.", ge=0)
    lr_scheduler: Annotated[LRScheduler, choice(LRScheduler)] = field(
        "constant", "training", "Learning-rate schedule."
    )
    lr_warmup_steps: int = field(0, "training", "Steps of linear warm-up.", ge=0)
    lr_end: float = field(
        0.0, "training", "Final learning rate; not for constant schedules.", ge=0, le=10
    )
    lr_num_cycles: int = field(
        1, "training", "Cycles of cosine_with_restarts; each starts at the peak.", ge=1, le=1000
    )
    lr_power: float = field(
        1.0, "training", "Power of polynomial: 1 is linear; 2 decays faster at first.", gt=0, le=100
    )
    max_grad_norm: float = field(
        1.0, "training", "Clip the global gradient norm to this; 0 turns clipping off.", ge=0
    )
    mixed_precision: Annotated[Precision, choice(Precision)] = field(
        "bf16", "training", "Compute precision; trained weights always stay in fp32."
    )
    gradient_checkpointing: Bool = field(
        False, "training", "Recompute activations in backward: less memory, about 30% slower."
    )
    gradient_checkpointing_policy: Annotated[CheckpointPolicy, choice(CheckpointPolicy)] = field(
        "full",
        "training",
        "full: recompute whole blocks; selective: keep results of matrix products and attention, "
        "recompute the rest.",
    )
    gradient_checkpointing_interval: int = field(
        1,
        "training",
        "Recompute only every n-th block; 1: all blocks. Larger: faster, more memory.",
        ge=1,
    )
    torch_compile: Bool = field(
        False, "training", "Compile each repeated block: slow first steps, then faster ones."
    )
    torch_compile_backend: str = field(
        "inductor", "training", "Backend of torch.compile.", min_length=1
    )
    attention_backend: Annotated[AttentionBackend, BeforeValidator(read_attention)] = field(
        "auto",
        "training",
        "Attention kernel; auto lets torch choose. flash3: FlashAttention 3 for Hopper GPUs, if "
        "its package is installed.",
    )
    allow_tf32: Bool = field(
        True, "training", "Use TF32 for fp32 matrix products on GPUs (mixed_precision: no)."
    )
    deterministic: Bool = field(
        False, "training", "Use only deterministic kernels; slower on GPUs."
    )
    on_nonfinite: Annotated[NonFinite, choice(NonFinite)] = field(
        "fail",
        "training",
        "What to do if a loss or gradient is not finite on any rank. fail: end the job; skip: skip "
        "the step on all ranks (20 in a row end the job).",
    )
    seed: int = field(42, "training", "Random seed.", ge=0, le=2**31 - 1)
    timestep_sampling: Annotated[TimestepSampling, choice(TimestepSampling)] = field(
        "logit_normal",
        "training",
        "How sigma is drawn: uniform, logit_normal, either of them shifted (uniform_shift, shift), "
        "or mode, which favors mid-range values. Families whose sampler shifts sigma default to "
        "shift.",
    )
    logit_mean: float = field(0.0, "training", "Mean of the logit-normal sigma.")
    logit_std: float = field(1.0, "training", "Standard deviation of the logit-normal sigma.", gt=0)
    mode_scale: float = field(
        1.29,
        "training",
        "Strength of mode: above 0 favors mid-range sigmas, below 0 avoids them.",
        ge=-1,
        le=1.75,
    )
    flow_shift: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "training", "Shift of sigma (default: the family's, by resolution).", gt=0
    )
    sigma_min: float = field(
        0.0, "training", "Lowest sigma to train on; 0 is clean data.", ge=0, lt=1
    )
    sigma_max: float = field(
        1.0, "training", "Highest sigma to train on; 1 is pure noise.", gt=0, le=1
    )
    loss_weighting: Annotated[LossWeighting, choice(LossWeighting)] = field(
        "none",
        "training",
        "Weight of the loss by sigma: weighted is ai-toolkit's curve, which is highest near 0.9; "
        "sigma_sqrt and cosmap are diffusers'.",
    )
    loss_type: Annotated[Loss, BeforeValidator(read_loss)] = field(
        "mse", "training", "Loss function."
    )
    huber_c: float = field(
        0.1,
        "training",
        "Threshold at which huber and smooth_l1 switch from square to linear.",
        gt=0,
    )
    snr_gamma: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "training", "Min-SNR gamma for epsilon and v-prediction models; usually 5.", gt=0
    )
    size_conditioning: Annotated[SizeConditioning, choice(SizeConditioning)] = field(
        "original",
        "training",
        "Size conditioning of SDXL. original: each image's own size and crop, as SDXL was "
        "trained; target: the bucket's size, no crop.",
    )
    caption_dropout_probability: float = field(
        0.0, "training", "Fraction of samples trained with an empty caption.", ge=0, le=1
    )
    use_ema: Bool = field(
        False,
        "training",
        "Keep a moving average (EMA) of the trained weights; samples and exports use it.",
    )
    ema_decay: float = field(0.999, "training", "Decay of the moving average per step.", ge=0, lt=1)
    ema_device: Annotated[EmaDevice, choice(EmaDevice)] = field(
        "accelerator", "training", "Device that holds the moving average."
    )
    train_guidance: float = field(
        1.0, "training", "Guidance input of guidance-distilled models while training.", ge=0
    )
