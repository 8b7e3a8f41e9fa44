"""What the tools have in common: optimizers, schedules, precisions, and how a job is called."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, get_args

from jobs.errors import UserError
from jobs.imports.common.draft import as_number, is_off, read
from jobs.imports.common.import_report import Kind
from jobs.imports.common.models import family_of
from jobs.imports.common.places import read_beside
from jobs.imports.common.table import sentence
from jobs.spec.families.base import FLUX_LINE, ShiftLine
from jobs.spec.keys.tracking import Tracker, read_trackers
from jobs.spec.rules.averages import SCHEDULE_FREE
from jobs.spec.rules.lora_conflicts import ONE_RATE
from jobs.spec.values.spellings import as_bool, as_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.imports.common.draft import Draft

FLUX_TOKEN: Final = 16
"""Pixels of a side of a token, of most families here."""

QWEN_LINE: Final = ShiftLine(few=256, low=0.5, many=8192, high=0.9)
KREA_LINE: Final = ShiftLine(few=256, low=0.5, many=6400, high=1.15)
"""Of Qwen-Image's scheduler, from its `scheduler_config.json`."""

NO_TEXT_ENCODERS: Final = "only the denoiser is trained, not text encoders"

LARGEST_RANK: Final = 4096
"""Of `lora_rank`; LyCORIS takes larger ones as a way to say that no matrix is parted."""

_WHOLE: Final = ("no_change", "none", "bf16", "bfloat16", "fp16", "fp32")
# How other tools' words for the precision of a frozen base begin, and what is nearest here.
_BASES: Final = (
    (("fp8", "qfloat8", "float8"), "fp8_scaled", ""),
    (("int8", "qint8", "uint8", "convrot8"), "int8", ""),
    (("nf4",), "nf4", ""),
    (("int4", "qint4", "uint4", "fp4", "orbit4"), "nf4", "the 4-bit format here"),
)


def text_encoders(draft: Draft, key: str, value: Any, *, ranks: str) -> None:
    """Train a LoRA of the denoiser's rank on the text encoders, if a switch is on.

    Args:
        draft: The job.
        key: The switch.
        value: Its value.
        ranks: Their keys that may say the rank.
    """
    if is_off(value) or as_bool(value) is False:
        draft.unneeded(key, "off is the default")
    else:
        text_encoder_lora(draft, key, next(filter(None, map(draft.number, ranks.split())), 16))


def text_encoder_lora(draft: Draft, key: str, rank: float) -> None:
    """Train a LoRA of a rank on the text encoders, if they and the denoiser can have one."""
    is_lora = draft.job.get("model_type", "lora") == "lora"
    plain = draft.job.get("lora_variant", "lora") == "lora" and not draft.on("use_dora")
    if is_lora and plain and family_of(draft).text_lora:
        why = "a LoRA on the attention of the text encoders, of the same rank"
        draft.take(key, "text_encoder_lora_rank", int(rank), why)
    else:
        draft.unsupported(key, NO_TEXT_ENCODERS)


def text_encoder_rate(draft: Draft, key: str, value: Any, *, switch: str) -> None:
    """Take the text encoders' rate; the switch of that name trains them."""
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
    draft.take(key, "base_precision", "nf4", "4 bits are the fewest here")


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


def lora_rank(draft: Draft, key: str, value: Any) -> None:
    """Take the rank; of LoKr, one that is too large for its matrices parts none of them."""
    number = as_number(value) or 0
    whole = number > LARGEST_RANK or draft.values.get("lokr_full_matrix")
    if draft.values.get("lora_variant") == "lokr" and whole:
        draft.take(key, "lokr_full_matrix", True, "a rank that parts no matrix")
    else:
        draft.take(key, "lora_rank", value, "the equivalent key")


def rate(draft: Draft, key: str, value: Any, *, scales: str, root: str = "") -> None:
    """Take the learning rate, multiplied by the global batch if one of these switches is on.

    Args:
        draft: The job.
        key: What it is called.
        value: The rate.
        scales: Switches that multiply it by the global batch.
        root: The one among them that multiplies it by the batch's square root.
    """
    number = as_number(value)
    if number is None or not any(map(draft.on, scales.split())):
        draft.take(key, "learning_rate", value)
        return
    batch = global_batch(draft)
    factor = math.sqrt(batch) if draft.on(root) else batch
    how = f"times {'the square root of ' if draft.on(root) else ''}the global batch of {batch:g}"
    draft.take(key, "learning_rate", number * factor, f"{how}, as that tool's scaling option does")


def deviation_of(draft: Draft) -> float:
    """Return the `logit_std` of a job of the draft's family that does not set it."""
    return float(family_of(draft).defaults.get("logit_std", 1.0))


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


def clean_name(text: Any) -> str | None:
    """Turn a text into a valid job name; None if no character is left."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(text).strip()).strip("-._")[:64]
    return name or None


def job_name(draft: Draft, key: str, value: Any) -> None:
    """Name the job, and so its run directory, after a name or the last part of a path."""
    name = clean_name(re.split(r"[/\\]", str(value).strip().rstrip("/\\"))[-1])
    why = sentence("own_directories")
    if name is None:
        draft.unneeded(key, why)
    else:
        draft.take(key, "name", name, "" if name == value else why)


def report_to(draft: Draft, key: str, value: Any) -> None:
    """Take one tracker or several, as accelerate's scripts name them."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
        return
    names = read_trackers(value if isinstance(value, list) else str(value))
    supported = [name for name in names if name in get_args(Tracker)]
    if supported:
        others = ", ".join(str(name) for name in names if name not in supported)
        draft.take(key, "report_to", supported, f"without {others}" if others else "")
    else:
        draft.unsupported(key, f"set report_to: {', '.join(get_args(Tracker))}, or several")


def logging_dir(draft: Draft, key: str, value: Any) -> None:
    """Take a separate log directory; one below the output is part of the run directory here."""
    if draft.values.get("report_to") and str(value).startswith(("/", "~")):
        draft.take(key, "logging_dir", value)
    else:
        draft.unneeded(key, sentence("own_directories"))


def opposite(draft: Draft, key: str, value: Any, *, ours: str) -> None:
    """Take a switch with the opposite meaning."""
    off = as_bool(value)
    draft.take(key, ours, not off if isinstance(off, bool) else value, "the opposite switch")


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


def global_batch(draft: Draft) -> float:
    """Return the samples per optimizer step, as far as the configuration says."""
    gpus = draft.values.get("gpus")
    ranks = len(gpus) if isinstance(gpus, list) else draft.values.get("num_processes") or 1
    sizes = [draft.number(key) or 1 for key in ("train_batch_size", "gradient_accumulation_steps")]
    return math.prod(size if size >= 1 else 1 for size in sizes) * ranks
