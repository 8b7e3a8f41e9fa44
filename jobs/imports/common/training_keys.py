"""What the tools have in common: optimizers, schedules, precisions, and how a job is called."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, get_args

from jobs.errors import UserError
from jobs.imports.common.draft import as_number, chosen, is_off, named, read, when, without
from jobs.imports.common.import_report import Kind
from jobs.imports.common.models import family_of
from jobs.imports.common.places import read_beside
from jobs.spec.families.base import FLUX_LINE, ShiftLine
from jobs.spec.rules.averages import SCHEDULE_FREE
from jobs.spec.rules.lora_conflicts import ONE_RATE
from jobs.spec.values.spellings import as_bool, as_list
from jobs.spec.values.value_types import LRScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.imports.common.draft import Draft, Rule

FLUX_TOKEN: Final = 16
"""Pixels of a side of a token, of most families here."""

QWEN_LINE: Final = ShiftLine(few=256, low=0.5, many=8192, high=0.9)
"""Of Qwen-Image's scheduler, from its `scheduler_config.json`."""

LARGEST_RANK: Final = 4096
"""Of `lora_rank`; LyCORIS takes larger ones as a way to say that no matrix is parted."""

Words = dict[str, tuple[Any, str]]

_LEAST_C: Final = 1e-3  # smooth_l1 is linear for all but the smallest errors
_EIGHT_BIT: Final = "8-bit AdamW of torchao, with blocks of 256 values"
_NEAREST: Final = "the closest equivalent"

OPTIMIZERS: Final[Words] = {
    **dict.fromkeys(
        ("adamw", "adamw_torch", "torch_adamw", "bnb_adamw", "optimi_adamw"), ("adamw", "")
    ),
    "adamw_bf16": ("adamw", "trained weights stay in fp32, which needs no stochastic rounding"),
    "bnb_adamw_paged": ("adamw", "state is not paged to host memory"),
    **dict.fromkeys(
        ("adam", "torch_adam", "bnb_adam", "optimi_adam"),
        ("adamw", "with decoupled weight decay"),
    ),
    **dict.fromkeys(
        (
            *("adamw8bit", "adamw_8bit", "adamw8", "bnb_adamw8bit", "bnb_adamw8bit_paged"),
            *("ao_adamw8bit", "adam8bit", "adam_8bit", "adam8", "bnb_adam8bit"),
        ),
        ("adamw_8bit", _EIGHT_BIT),
    ),
    **dict.fromkeys(
        ("optimi_stableadamw", "ao_adamw4bit", "ao_adamfp8", "ao_adamwfp8"), ("adamw", _NEAREST)
    ),
    **dict.fromkeys(
        ("adamw_schedulefree", "adamw_schedulefree+aggressive", "adamw_schedulefree+no_kahan"),
        ("adamw_schedule_free", "that of the schedulefree package, whose numbers are others"),
    ),
    **dict.fromkeys(("lion", "bnb_lion", "bnb_lion_paged", "optimi_lion"), ("lion", "")),
    **dict.fromkeys(
        ("lion8bit", "bnb_lion8bit", "bnb_lion8bit_paged"), ("lion", "its state stays in fp32")
    ),
    **dict.fromkeys(("prodigy", "prodigyopt"), ("prodigy", "")),
    **dict.fromkeys(("prodigy8bit", "prodigy_8bit"), ("prodigy", "its state stays in fp32")),
    **dict.fromkeys(("adafactor", "torch_adafactor"), ("adafactor", "")),
    **dict.fromkeys(("sgd", "torch_sgd", "optimi_sgd"), ("sgd", "without momentum")),
}

_NO_RESTARTS: Final = "half a cosine period, without restarts"
SCHEDULES: Final[Words] = {
    **{name: (name, "") for name in get_args(LRScheduler)},
    "sine": ("cosine", _NO_RESTARTS),
}

PRECISIONS: Final[Words] = {
    **dict.fromkeys(("bf16", "bfloat16"), ("bf16", "")),
    **dict.fromkeys(("fp16", "float16"), ("fp16", "")),
    **dict.fromkeys(("no", "false", "fp32", "float32"), ("no", "")),
}

optimizer: Final = chosen(
    "optimizer",
    OPTIMIZERS,
    "not supported; adamw is used. Others: adamw_8bit, adamw_schedule_free, adafactor, prodigy, "
    "lion, sgd",
)
schedule: Final = chosen(
    "lr_scheduler", SCHEDULES, "not supported; the rate stays constant. Others: linear, cosine"
)
precision: Final = chosen(
    "mixed_precision", PRECISIONS, "not supported; bf16 is used. Others: fp16, no"
)

_WHOLE: Final = ("no_change", "none", "bf16", "bfloat16", "fp16", "fp32")
# How other tools' words for the precision of a frozen base begin, and what is nearest here.
_BASES: Final = (
    (("fp8", "qfloat8", "float8"), "fp8_scaled", ""),
    (("int8", "qint8", "uint8", "convrot8"), "int8", ""),
    (("nf4",), "nf4", ""),
    (("int4", "qint4", "uint4", "fp4", "orbit4"), "nf4", "the 4-bit format here"),
)
_FEWEST: Final = "4 bits are the fewest here"
TEXT_ENCODERS_FREED: Final = (
    "captions are encoded and cached first; then the text encoders are freed"
)
ONE_DIRECTORY: Final = "the model is one directory; build one that contains this"
NOISE: Final = "noise is drawn as when the model was trained"
NO_METHOD: Final = "not supported"
OTHER_CHECKPOINTS: Final = (
    "cannot resume from other tools' checkpoints; `fsdp-tui resume ID` resumes the job's own"
)
NO_EFFECT: Final = "has no effect on training"
BUCKETS: Final = "images are resized and cropped to buckets of similar shape"
OWN_DIRECTORIES: Final = "every job has its own run directory; `fsdp-tui show ID` prints it"
OWN_CACHES: Final = "caches are keyed by content and shared by all jobs (cache_dir)"
NO_TEXT_ENCODERS: Final = "only the denoiser is trained, not text encoders"


def text_encoders(ranks: str) -> Rule:
    """Make a rule for a switch that trains text encoders too.

    They get a LoRA of the denoiser's rank, if the denoiser has one.

    Args:
        ranks: Their keys that may say the rank of a LoRA.
    """
    refuse = without(NO_TEXT_ENCODERS)

    def rule(draft: Draft, key: str, value: Any) -> None:
        if _is_on(value):
            text_encoder_lora(draft, key, next(filter(None, map(draft.number, ranks.split())), 16))
        else:
            refuse(draft, key, value)

    return rule


def text_encoder_lora(draft: Draft, key: str, rank: float) -> None:
    """Train a LoRA of a rank on the text encoders, if they and the denoiser can have one."""
    is_lora = draft.job.get("model_type", "lora") == "lora"
    plain = draft.job.get("lora_variant", "lora") == "lora" and not draft.on("use_dora")
    if is_lora and plain and family_of(draft).text_lora:
        why = "a LoRA on the attention of the text encoders, of the same rank"
        draft.take(key, "text_encoder_lora_rank", int(rank), why)
    else:
        draft.unsupported(key, NO_TEXT_ENCODERS)


def text_encoder_rate(switch: str) -> Rule:
    """Make a rule for the text encoders' rate; the switch of that name trains them."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        trains = draft.on(switch) and family_of(draft).text_lora
        optimizer = f"{draft.get('optimizer')} {draft.get('train.optimizer')}".lower()
        if "prodigy" in optimizer:
            draft.unneeded(key, ONE_RATE["prodigy"])
        elif "schedulefree" in optimizer:
            draft.unneeded(key, ONE_RATE[SCHEDULE_FREE])
        elif trains and draft.job.get("model_type", "lora") == "lora":
            draft.take(key, "text_encoder_learning_rate", value)
        else:
            draft.unneeded(key, NO_TEXT_ENCODERS)

    return rule


def _is_on(value: Any) -> bool:
    return not is_off(value) and as_bool(value) is not False


def betas(draft: Draft, key: str, value: Any) -> None:
    """Take the betas of an optimizer; there may be a third, which has no equivalent."""
    given = as_list(value.strip("()[] ")) if isinstance(value, str) else value
    names = ("adam_beta1", "adam_beta2")
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        draft.unreadable(key, "not two numbers")
    elif draft.values.get("optimizer") in ("lion", "came", "sgd", "adafactor"):
        draft.unsupported(key, "this optimizer has its own")
    else:
        try:
            ours = {name: read(name, beta) for name, beta in zip(names, given, strict=False)}
        except UserError as error:
            draft.unreadable(key, str(error))
            return
        draft.values |= ours
        draft.record(Kind.TRANSLATED, key, **ours)


def base_precision(draft: Draft, key: str, value: Any) -> None:
    """Convert the precision of the frozen base, whichever library quantizes it in that tool."""
    word = str(value).strip().lower().partition("|")[0]
    if word in _WHOLE:
        draft.unneeded(key, "nothing is quantized by default")
        return
    for starts, ours, why in _BASES:
        if word.startswith(starts):
            draft.take(key, "base_precision", ours, why)
            return
    draft.take(key, "base_precision", "nf4", _FEWEST)


def bitsandbytes(draft: Draft, key: str, value: Any) -> None:
    """Read a file with the arguments of a `BitsAndBytesConfig`."""
    file = read_beside(draft, key, value, dict, "set base_precision: int8 or nf4")
    if file is None:
        return
    path, settings = file
    if not is_off(settings.get("load_in_8bit")):
        draft.take(key, "base_precision", "int8", f"load_in_8bit of {path.name}")
    elif not is_off(settings.get("load_in_4bit")):
        draft.take(key, "base_precision", "nf4", f"load_in_4bit of {path.name}")
    else:
        draft.unneeded(key, f"{path.name} turns on neither load_in_8bit nor load_in_4bit")


def warm_up(draft: Draft, key: str, value: Any) -> None:
    """Take the steps of warm-up; a constant rate has none, neither in that tool nor here."""
    word = str(draft.get("lr_scheduler") or "constant").strip().lower()
    if not is_off(value) and SCHEDULES.get(word, ("constant", ""))[0] == "constant":
        draft.unneeded(key, "lr_scheduler: constant has no warm-up in that tool either")
    else:
        draft.take(key, "lr_warmup_steps", value)


def curves(prefix: str = "") -> dict[str, Rule]:
    """Details of schedules, each of which matters with one of them."""
    return {
        f"{prefix}{key}": curve(of, key)
        for key, of in (
            ("lr_num_cycles", "cosine_with_restarts"),
            ("lr_power", "polynomial"),
            ("lr_end", "polynomial"),
        )
    }


def curve(of: str, ours: str) -> Rule:
    """Make a rule for a detail of one schedule."""
    return when(
        lambda draft: str(draft.get("lr_scheduler")).strip().lower() == of,
        named(ours),
        f"only for the schedule {of}",
    )


def _takes_guidance(draft: Draft) -> bool:
    return family_of(draft).guidance_of(draft.job.get("model_flavour")) == "embedded"


guidance: Final = when(
    _takes_guidance, named("train_guidance"), "only for guidance-distilled models"
)


def is_lokr(draft: Draft) -> bool:
    """Whether the adapter is a LoKr."""
    return draft.values.get("lora_variant") == "lokr"


def of_lokr(ours: str) -> Rule:
    """Make a rule for a key that only LoKr has."""
    return when(is_lokr, named(ours, "the equivalent key"), "only for LoKr")


def lora_rank(draft: Draft, key: str, value: Any) -> None:
    """Take the rank; of LoKr, one that is too large for its matrices parts none of them."""
    number = as_number(value) or 0
    if is_lokr(draft) and (number > LARGEST_RANK or draft.values.get("lokr_full_matrix")):
        draft.take(key, "lokr_full_matrix", True, "a rank that parts no matrix")
    else:
        draft.take(key, "lora_rank", value, "the equivalent key")


def rate(draft: Draft, key: str, value: Any, *, scaled: bool = False, root: bool = False) -> None:
    """Take the learning rate, multiplied by the global batch (or its root) if that is requested."""
    number = as_number(value)
    if number is None or not scaled:
        draft.take(key, "learning_rate", value)
        return
    batch = global_batch(draft)
    factor = math.sqrt(batch) if root else batch
    how = f"times {'the square root of ' if root else ''}the global batch of {batch:g}"
    draft.take(key, "learning_rate", number * factor, f"{how}, as that tool's scaling option does")


def snr(draft: Draft, key: str, value: Any) -> None:
    """Min-SNR, which weights only what predicts noise or v."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
    elif family_of(draft).objective == "flow":
        draft.unneeded(key, "only for epsilon and v-prediction models")
    else:
        draft.take(key, "snr_gamma", value)


def prediction(draft: Draft, key: str, value: Any) -> None:
    """Say what the model predicts, which overrides its own file in other tools."""
    if family_of(draft).objective == "flow":
        draft.unneeded(key, "only for epsilon and v-prediction models")
    else:
        draft.unsupported(key, f"set prediction_type: {value} in the model's scheduler_config.json")


def v_prediction(draft: Draft, key: str, value: Any) -> None:
    """Say where a switch for v-prediction is set here."""
    draft.unneeded(key, "set by the model's scheduler_config.json")
    if not is_off(value):
        draft.report.to_fill_in.append(
            f"{key}: check that scheduler_config.json has prediction_type: v_prediction"
        )


_AS_THE_LINE: Final = ("flux", "flux2", "lumina2", "z_image")
_ITS_END: Final = 1024  # pixels


def take_shift_by_size(
    draft: Draft, key: str, sides: Sequence[int], *, token: int = 16, line: ShiftLine = FLUX_LINE
) -> None:
    """Take the shift of sigma by the number of tokens, of which other tools' lines have no end.

    Args:
        draft: The job.
        key: What asks for it.
        sides: Resolutions of the job; the shift of the smallest is used.
        token: Side of what that tool counts as a token, in pixels.
        line: That tool's.
    """
    here = line is FLUX_LINE and family_of(draft).name in _AS_THE_LINE
    if here and token == FLUX_TOKEN and sides[-1] <= _ITS_END:
        draft.record(Kind.TRANSLATED, key, why="by resolution, as here", flow_shift=None)
        return
    shifts = [round(line.at((side // token) ** 2, extrapolate=True), 3) for side in sides]
    draft.take(key, "flow_shift", shifts[0], f"its shift at {sides[0]} pixels")
    if len(shifts) > 1:
        each = ", ".join(f"{s:.3g} at {side}" for s, side in zip(shifts, sides, strict=True))
        draft.unsupported(key, f"there, the shift is {each}; a job has one")


def mean_absolute(draft: Draft, key: str) -> None:
    """Take a loss that is linear for all but the smallest errors."""
    draft.take(key, "loss_type", "smooth_l1", "the nearest, twice as large")
    draft.values |= {"huber_c": _LEAST_C, "huber_schedule": "constant"}


def clean_name(text: Any) -> str | None:
    """Turn a text into a valid job name; None if no character is left."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(text).strip()).strip("-._")[:64]
    return name or None


def job_name(draft: Draft, key: str, value: Any) -> None:
    """Name the job, and so its run directory, after a name or the last part of a path."""
    name = clean_name(re.split(r"[/\\]", str(value).strip().rstrip("/\\"))[-1])
    if name is None:
        draft.unneeded(key, OWN_DIRECTORIES)
    else:
        draft.take(key, "name", name, "" if name == value else OWN_DIRECTORIES)


def inverted(ours: str) -> Rule:
    """Make a rule for a switch with the opposite meaning."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        off = as_bool(value)
        draft.take(key, ours, not off if isinstance(off, bool) else value, "the opposite switch")

    return rule


def limit(ours: str) -> Rule:
    """Make a rule for a number where 0 means no limit."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        draft.take(key, ours, None if is_off(value) else value)

    return rule


def size(draft: Draft, key: str, value: Any) -> None:
    """Take the size of samples; of several, the first."""
    sizes = [part.strip() for part in str(value).split(",") if part.strip()]
    if not sizes:
        draft.unneeded(key, "not set")
        return
    ours, text, number = "validation_resolution", sizes[0], as_number(sizes[0])
    more = f"the first of {len(sizes)} sizes" if len(sizes) > 1 else ""
    if number is not None and 0 < number < 16:  # megapixels
        draft.take(key, ours, side_of(number), more or "megapixels → the side in pixels")
    else:
        draft.take(key, ours, text, more)


def bucket_step(draft: Draft, key: str, value: Any) -> None:
    """How many pixels the sides of buckets lie apart; a model may take fewer steps than a tool."""
    number, ours = as_number(value), "bucket_step"
    least = family_of(draft).latent_step_of(draft.job.get("model_flavour"))
    if number is None or number <= 0:
        draft.unreadable(key, "not a number of pixels")
    elif number < 16:
        draft.take(key, ours, 0, f"the smallest step that the model takes, {least} pixels")
    else:
        fits = min(128, math.ceil(number / least) * least)
        why = "" if fits == number else f"a multiple of the model's {least} pixels"
        draft.take(key, ours, fits, why)


def side_of(megapixels: float) -> int:
    """Return the side of a square image, a multiple of 64 as for published models."""
    return max(64, round(math.sqrt(megapixels) * 1e3 / 64) * 64)


def epochs(draft: Draft, key: str, value: Any) -> None:
    """Take a length in epochs, unless one in steps is set."""
    if is_off(value) or not is_off(draft.get("max_train_steps")):
        draft.unneeded(key, "max_train_steps is used")
    else:
        draft.take(key, "num_train_epochs", value)


def global_batch(draft: Draft) -> float:
    """Return the samples per optimizer step, as far as the configuration says."""
    gpus = draft.values.get("gpus")
    ranks = len(gpus) if isinstance(gpus, list) else draft.values.get("num_processes") or 1
    sizes = [draft.number(key) or 1 for key in ("train_batch_size", "gradient_accumulation_steps")]
    return math.prod(size if size >= 1 else 1 for size in sizes) * ranks
