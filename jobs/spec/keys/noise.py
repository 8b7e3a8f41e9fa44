"""Keys for noise, loss, caption dropout and the moving average."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import BeforeValidator

from jobs.spec.keys.groups import EMA, NOISE, TRAINING
from jobs.spec.rules.no_effect import (
    flow_matching,
    mse_loss,
    no_ema,
    no_embedded_guidance,
    no_sigmas,
    no_size_conditioning,
    not_logit_normal,
    not_mode,
    not_shifted,
    sharded_ema,
)
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    Bool,
    EmaDevice,
    HuberSchedule,
    Loss,
    LossWeighting,
    SamplersShift,
    Shift,
    SizeConditioning,
    TimestepSampling,
    choice,
    read_loss,
    read_shift,
)


class NoiseKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    timestep_sampling: Annotated[TimestepSampling, choice(TimestepSampling)] = field(
        "logit_normal",
        NOISE,
        "How sigma is drawn: uniform, logit_normal, either of them shifted (uniform_shift, shift), "
        "stretched (shift, with its ends pulled to 0 and 1), or mode, which favors mid-range "
        "values. Families that were trained on shifted sigmas default to shift, LTX-Video to "
        "stretched.",
        resume="changes",
        no_effect=no_sigmas,
        memory=False,
    )
    logit_mean: float = field(
        0.0,
        NOISE,
        "Mean of the logit-normal sigma.",
        resume="changes",
        no_effect=not_logit_normal,
        memory=False,
    )
    logit_std: float = field(
        1.0,
        NOISE,
        "Standard deviation of the logit-normal sigma.",
        resume="changes",
        no_effect=not_logit_normal,
        memory=False,
        gt=0,
    )
    mode_scale: float = field(
        1.29,
        NOISE,
        "Strength of mode: above 0 favors mid-range sigmas, below 0 avoids them.",
        resume="changes",
        no_effect=not_mode,
        memory=False,
        ge=-1,
        le=1.75,
    )
    flow_shift: Annotated[Shift | SamplersShift | None, BeforeValidator(read_shift)] = field(
        None,
        NOISE,
        "Shift of sigma (default: the family's, by resolution); sampler: the one that the model's "
        "pipeline samples with.",
        resume="changes",
        words=get_args(SamplersShift),
        blank="the family's",
        no_effect=not_shifted,
        memory=False,
    )
    sigma_min: float = field(
        0.0,
        NOISE,
        "Lowest sigma to train on; 0 is clean data.",
        resume="changes",
        no_effect=no_sigmas,
        memory=False,
        ge=0,
        lt=1,
    )
    sigma_max: float = field(
        1.0,
        NOISE,
        "Highest sigma to train on; 1 is pure noise.",
        resume="changes",
        no_effect=no_sigmas,
        memory=False,
        gt=0,
        le=1,
    )
    loss_weighting: Annotated[LossWeighting, choice(LossWeighting)] = field(
        "none",
        NOISE,
        "Weight of the loss by sigma: weighted is ai-toolkit's curve, which is highest near 0.9; "
        "sigma_sqrt and cosmap are diffusers'; sigma_squared is that of its SD3 script.",
        resume="changes",
        no_effect=no_sigmas,
    )
    loss_type: Annotated[Loss, BeforeValidator(read_loss)] = field(
        "mse", NOISE, "Loss function.", resume="changes"
    )
    huber_c: float = field(
        0.1,
        NOISE,
        "Error d at which huber and smooth_l1 turn from square to linear: huber is d² for small "
        "errors and 2·huber_c·|d| for large ones; smooth_l1 is that divided by huber_c.",
        resume="changes",
        no_effect=mse_loss,
        memory=False,
        ge=1e-6,
        le=1000,
    )
    huber_schedule: Annotated[HuberSchedule, choice(HuberSchedule)] = field(
        "snr",
        NOISE,
        "How huber_c follows the noise. snr, exponential: from 1 without noise to huber_c in pure "
        "noise, by the signal-to-noise ratio or by the timestep; constant: the same everywhere.",
        resume="changes",
        no_effect=mse_loss,
        memory=False,
    )
    snr_gamma: Annotated[float | None, BeforeValidator(as_none)] = field(
        None,
        NOISE,
        "Min-SNR gamma for epsilon and v-prediction models; usually 5.",
        resume="changes",
        no_effect=flow_matching,
        memory=False,
        gt=0,
    )
    size_conditioning: Annotated[SizeConditioning, choice(SizeConditioning)] = field(
        "original",
        NOISE,
        "Size conditioning of SDXL. original: each image's own size and crop, as SDXL was "
        "trained; target: the bucket's size, no crop.",
        resume="changes",
        no_effect=no_size_conditioning,
        memory=False,
    )
    caption_dropout_probability: float = field(
        0.0,
        TRAINING,
        "Fraction of samples trained with an empty caption.",
        resume="changes",
        memory=False,
        ge=0,
        le=1,
    )
    use_ema: Bool = field(
        False,
        EMA,
        "Keep a moving average (EMA) of the trained weights; samples and exports use it.",
        resume="ruled",
    )
    ema_decay: float = field(
        0.999,
        EMA,
        "Decay of the moving average per step.",
        resume="changes",
        no_effect=no_ema,
        memory=False,
        ge=0,
        lt=1,
    )
    ema_device: Annotated[EmaDevice, choice(EmaDevice)] = field(
        "accelerator",
        EMA,
        "Device that holds the moving average.",
        resume="same",
        no_effect=sharded_ema,
    )
    train_guidance: float = field(
        1.0,
        NOISE,
        "Guidance input of guidance-distilled models while training.",
        resume="changes",
        no_effect=no_embedded_guidance,
        memory=False,
        ge=0,
    )
