"""Define the types of a job's fields: the valid values, and lenient parsing."""

from __future__ import annotations

import json
import math
import re
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jobs.run.judging import Score
from jobs.spec.values import spellings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ModelType = Literal["lora", "full"]
Strategy = Literal["auto", "single", "ddp", "fsdp2", "hsdp"]
Precision = Literal["no", "bf16", "fp16"]
Optimizer = Literal[
    "adamw",
    "sgd",
    "adafactor",
    "adamw_8bit",
    "adamw_schedule_free",
    "prodigy",
    "lion",
    "came",
    "muon",
]
LRScheduler = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
]
LoraInit = Literal["kaiming", "gaussian"]
LoraVariant = Literal["lora", "rslora", "dora", "lokr"]
TimestepSampling = Literal["uniform", "logit_normal", "shift", "uniform_shift", "stretched", "mode"]
LossWeighting = Literal["none", "weighted", "sigma_sqrt", "sigma_squared", "cosmap"]
BasePrecision = Literal["none", "fp8", "fp8_scaled", "int8", "nf4"]
ModulationPrecision = Literal["auto", "none", "int8", "nf4"]
BaseMatmul = Literal["auto", "dequantize", "scaled"]
Placement = Literal["replicated", "sharded"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
Device = Literal["auto", "cuda", "cpu"]
Loss = Literal["mse", "huber", "smooth_l1"]
HuberSchedule = Literal["snr", "exponential", "constant"]
SamplersShift = Literal["sampler"]
_LARGEST_SHIFT: Final = 1_000_000  # larger ones overflow fp32 at 1e38
Shift = Annotated[float, Field(gt=0, le=_LARGEST_SHIFT)]
CheckpointPolicy = Literal["full", "selective"]
AttentionBackend = Literal["auto", "flash", "flash3", "efficient", "cudnn", "math"]
EmaDevice = Literal["accelerator", "cpu"]
NonFinite = Literal["fail", "skip"]
SaveFailure = Literal["stop", "warn"]
ContextParallelStrategy = Literal["allgather", "alltoall"]
SizeConditioning = Literal["original", "target"]
Crop = Literal["center", "random", "square"]
ResolutionMode = Literal["each", "largest"]
MaskedLoss = Literal["none", "alpha", "file"]
RegularizationTarget = Literal["images", "base"]
Preservation = Literal["none", "class", "blank"]
CaptionLines = Literal["variants", "joined"]
MissingCaptions = Literal["skip", "empty"]
Launcher = Literal["local", "slurm"]

FULL_SENTENCE: Final = "said"
"""Error type for messages that are complete sentences and name the value."""

_YES_NO: Final = ("true", "false", "yes", "no", "off")  # suggestions; "on" is too close to none
_V1_PREFETCH: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_FLASH_3: Final = ("flash_3", "flash_attn_3", "flash_attention_3", "fa3")
_GPU: Final = re.compile(r"(?:GPU|MIG)-\S*")
_CUDA: Final = re.compile(r"cuda:(\d+)", re.IGNORECASE)
_CARD: Final = re.compile(r"0*([1-9]\d{0,3})\s*(?:gi?b?)?", re.IGNORECASE)
_COUNT: Final = re.compile(r"\d{1,3}")
ROUTE: Final = re.compile(r"(-?\d{1,4}) *\.\. *(-?\d{1,4})")
"""First and last block of a route."""

_SLURM_TIME: Final = re.compile(r"\d+(?::[0-5]?\d(?::[0-5]?\d)?)?|\d+-\d+(?::[0-5]?\d){0,2}")
_DOTTED: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*[.:][^\W\d]\w*")


def refuse(value: Any, allowed: Sequence[str], instead: str = "") -> PydanticCustomError:
    """Build the error for a value that is not an allowed word; suggests the closest one."""
    words = {
        "value": str(value).lower() if isinstance(value, bool) else str(value),
        "allowed": instead or f"one of {', '.join(allowed)}",
        "meant": spellings.did_you_mean(spellings.unquoted(str(value)), allowed),
    }
    return PydanticCustomError(FULL_SENTENCE, '"{value}" is not {allowed}{meant}', words)


def choice(literal: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: spellings.as_choice(value, get_args(literal)))


def read_bool(value: Any) -> Any:
    """Read yes or no in the usual words, or as 1 and 0."""
    value = spellings.as_bool(value)
    if value is None or value in (True, False):
        return value
    raise refuse(value, _YES_NO, "true or false")


def read_share(value: Any) -> Any:
    """Read yes, no, or a number from 0 to 1; 1 and 0 mean yes and no."""
    value = spellings.as_bool(value)
    with suppress(TypeError, ValueError):
        number = float(value)
        if 0 <= number <= 1:
            return bool(number) if number in (0, 1) else number
    raise refuse(value, _YES_NO, "true, false or a share between 0 and 1")


def read_family(value: Any) -> Any:
    """Normalize a family name: `Qwen-Image` → `qwen_image`."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else value


def read_state_dict_type(value: Any) -> Any:
    """Read a state-dict type; `full`, `shard` and `sharded` are accepted."""
    return _by_stem(value, get_args(StateDictType), "_state_dict", "ed_state_dict")


def read_wrap_policy(value: Any) -> Any:
    """Read a wrap policy: `transformer_based`, `size`, `no`, or the dotted path of a callable."""
    policies = get_args(WrapPolicy)
    policy = _by_stem(spellings.as_choice(value, ("no",)), policies, "_wrap", "_based_wrap")
    if policy in policies:
        return policy
    if isinstance(value, str) and _DOTTED.fullmatch(path := spellings.unquoted(value)):
        return path.replace(":", ".")
    raise refuse(
        value, policies, f"one of {', '.join(policies)}, or the path of a callable, pkg.mod.name"
    )


def read_loss(value: Any) -> Any:
    """Read a loss; `l2`, its name in other trainers, is `mse`."""
    if isinstance(value, str) and value.strip().lower() == "l2":
        return "mse"
    return spellings.as_choice(value, get_args(Loss))


def read_shift(value: Any) -> Any:
    """Read a shift of sigma: a number within limits, the word sampler, or nothing.

    Checked here, because pydantic would report one problem for each type that does not match.
    """
    value = spellings.as_choice(spellings.as_none(value), get_args(SamplersShift))
    if value is None or value in get_args(SamplersShift):
        return value
    try:
        number = float(spellings.unquoted(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number <= _LARGEST_SHIFT:
        raise refuse(
            value,
            get_args(SamplersShift),
            f"a number above 0 and up to {_LARGEST_SHIFT:,}, or sampler",
        )
    return number


def read_attention(value: Any) -> Any:
    """Read an attention backend; spellings of flash3 are accepted.

    SageAttention is rejected because it cannot train.
    """
    word = spellings.normal_key(str(value)).strip("_")
    if word in _FLASH_3:
        return "flash3"
    if word.startswith("sage"):
        raise refuse(value, (), "for training: SageAttention has no backward")
    return spellings.as_choice(value, get_args(AttentionBackend))


def read_version(value: Any) -> Any:
    """Read an FSDP version; `v2` and `fsdp2` are 2."""
    if isinstance(value, str):
        return spellings.unquoted(value).lower().removeprefix("fsdp").removeprefix("v")
    return value


def read_reshard(value: Any) -> Any:
    """Read yes, no, or a number of shards; 1 and 0 mean yes and no."""
    if isinstance(value, str):
        word = spellings.unquoted(value)
        value = int(word) if word.isdecimal() else spellings.as_bool(word)
    if isinstance(value, int):
        return bool(value) if value in (0, 1) else value
    raise refuse(value, _YES_NO, "true, false or a number of shards")


def read_interval(value: Any, least: int = 0) -> Any:
    """Read a number of steps (`500`), or of epochs (`2 epochs`, `0.5 epochs`, `epoch`).

    The words for no are 0 steps.
    """
    value = 0 if spellings.as_bool(value) is False else value
    word = spellings.unquoted(str(value))
    if match := _EPOCHS.fullmatch(word):
        number = float(match[1] or 1)
        if not 0.001 <= number <= _MOST_EPOCHS:
            raise refuse(value, (), f"between 0.001 and {_MOST_EPOCHS} epochs")
        return f"{number:.3f}".rstrip("0").rstrip(".") + f" epoch{'s' * (number != 1)}"
    try:
        steps = int(value) if isinstance(value, float) and value.is_integer() else int(word)
    except ValueError:
        steps = -1
    if steps < least:
        raise refuse(value, (), f"a number of steps, {least} or more, or of epochs: 2 epochs")
    return steps


_EPOCHS: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)? *epochs?", re.IGNORECASE)
_MOST_EPOCHS: Final = 100_000
Interval = Annotated[Annotated[int, Field(ge=0)] | str, BeforeValidator(read_interval)]
"""How often something is done: steps or epochs between two times, `500` or `2 epochs`."""
OptionalInterval = Annotated[
    Annotated[int, Field(ge=1)] | str | None,
    BeforeValidator(lambda value: value if value is None else read_interval(value, least=1)),
    BeforeValidator(spellings.as_none),
]


def read_prefetch(value: Any) -> Any:
    """Read a number of units; yes and no mean 1 and 0, and FSDP v1's words mean 0.

    FSDP2 does what those words describe by itself: it gathers the next unit during compute.
    """
    if isinstance(value, str):
        if spellings.as_choice(value, _V1_PREFETCH) in _V1_PREFETCH:
            return 0
        word = spellings.unquoted(value)
        value = int(word) if word.isdecimal() else spellings.as_bool(word)
    if isinstance(value, int):
        return int(value)
    raise refuse(value, (*_YES_NO, *_V1_PREFETCH), "a number of units, true or false")


def read_gpus(value: Any) -> Any:
    """Read a count (`4`), a list (`[0, 1]`, `0,1`, UUIDs), or nothing."""
    value = spellings.as_none(value)
    if isinstance(value, str):
        word = spellings.unquoted(value)
        value = int(word) if word.isdecimal() else spellings.as_list(word)
    if isinstance(value, (list, tuple)):
        return [_gpu(gpu) for gpu in value]
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise refuse(value, (), "a number of GPUs or a list of them")


def _gpu(name: Any) -> int | str:
    """Read an index, also written `cuda:0`, or a UUID or its prefix."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    word = str(name).strip()
    if match := _CUDA.fullmatch(word):
        return int(match[1])
    if word.isdecimal():
        return int(word)
    if _GPU.fullmatch(word):
        return word
    raise refuse(name, (), "a GPU; use indices such as 0,1, UUIDs such as GPU-5f2c, or a count")


def read_names(value: Any) -> Any:
    """Read a list given as one string."""
    if not isinstance(value, str):
        return value
    text = spellings.unquoted(value)
    if text.startswith("[") and not text.endswith("]"):
        raise refuse(value, (), "a list; its bracket is not closed")
    return spellings.as_list(text)


def read_scores(value: Any) -> Any:
    """Read a list of scores, also in capitals and with hyphens: `CLIP-T, DINO-I`."""
    value = read_names(spellings.as_off(value))
    if not isinstance(value, (list, tuple)):
        return value if value is not None else []
    words = [spellings.as_choice(str(word), get_args(Score)) for word in value]
    for word in words:
        if word not in get_args(Score):
            raise refuse(word, get_args(Score))
    return list(dict.fromkeys(words))


def read_words(value: Any) -> Any:
    """Split words like a shell; lists of words are accepted, too."""
    if not isinstance(value, str) or value.strip().startswith("["):
        return spellings.as_list(value)
    try:
        return shlex.split(value)
    except ValueError as error:
        raise refuse(value, (), f"a list of words ({str(error).lower()})") from None


def read_slurm_time(value: Any) -> Any:
    """Read a time limit in Slurm's format; a bare number is minutes."""
    value = spellings.as_none(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is None or (
        isinstance(value, str) and _SLURM_TIME.fullmatch(spellings.unquoted(value))
    ):
        return value and spellings.unquoted(value)
    raise refuse(value, (), "a time; write minutes, 12:00:00 or 2-00:00:00")


def read_settings(value: Any) -> Any:
    """Read a mapping, also as JSON in one string; any other string is the path of a file."""
    settings = spellings.as_none(value)
    if settings is None:
        return None
    if isinstance(settings, str):
        if not settings.strip().startswith("{"):
            return spellings.unquoted(settings)
        settings = spellings.as_mapping(settings)
    if not isinstance(settings, dict):
        raise refuse(value, (), "a mapping, such as JSON's, or the path of a file")
    try:
        return json.loads(json.dumps(settings, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise refuse(value, (), "a mapping of plain values, as JSON has them") from None


def read_numbers(value: Any) -> Any:
    """Read a mapping of strings to numbers, also given as one string."""
    numbers = spellings.as_none(value)
    if isinstance(numbers, str):
        numbers = spellings.as_mapping(numbers)
        if numbers is None:
            raise refuse(value, (), "a mapping, such as {to_q: 32, to_k: 16}")
    return numbers


def read_routes(value: Any) -> Any:
    """Read the share of tokens that skips each range of blocks: `{2..-2: 0.5}`, `2..-2:0.5`.

    A share of 0 says nothing and is dropped.
    """
    routes = spellings.as_off(value)
    if isinstance(routes, str):
        text = spellings.unquoted(routes).strip()
        if ":" in text and not text.startswith("{"):
            text = f"{{{text.replace(':', ': ')}}}"
        routes = spellings.as_mapping(text) if text.startswith("{") else text
    if routes is None:
        return None
    wrong = refuse(
        value,
        (),
        "a range of blocks with a share of tokens from 0 to below 1, such as {2..-2: 0.5}",
    )
    if not isinstance(routes, dict):
        raise wrong
    read = {}
    for blocks, share in routes.items():
        ends = ROUTE.fullmatch(str(blocks).strip())
        try:
            number = float(share)
        except (TypeError, ValueError):
            raise wrong from None
        if ends is None or isinstance(share, bool) or not 0 <= number < 1:
            raise wrong
        if number:
            read[f"{int(ends[1])}..{int(ends[2])}"] = number
    return read or None


def read_by_card(value: Any) -> Any:
    """Read a number for every GPU, or one for each size of GPU: `{16GB: 24}`, `16GB:24,24GB:8`.

    The smallest size comes first. Zeros of the largest sizes say nothing and are dropped.
    """
    numbers = 0 if spellings.as_off(value) is None else value
    if isinstance(numbers, str):
        text = spellings.unquoted(numbers).strip()
        if ":" in text and not text.startswith("{"):
            text = f"{{{text.replace(':', ': ')}}}"
        numbers = spellings.as_mapping(text) if text.startswith("{") else text
    parts = numbers.items() if isinstance(numbers, dict) else [(1, numbers)]
    pairs = [(_CARD.fullmatch(str(size)), _COUNT.fullmatch(str(count))) for size, count in parts]
    if not all(size and count for size, count in pairs):
        raise refuse(
            value, (), "a number up to 999, or one for each size of GPU, such as {16GB: 24}"
        )
    read = sorted((int(size[1]), int(count[0])) for size, count in pairs if size and count)
    if len(dict(read)) < len(read):
        raise refuse(value, (), "one number for each size of GPU: a size is there twice")
    if not isinstance(numbers, dict):
        return read[0][1]
    while read and not read[-1][1]:
        read.pop()
    return {f"{size}GB": count for size, count in read} or 0


def on_card(value: int | Mapping[str, int], memory: int | None) -> int:
    """Return what `read_by_card` read for one GPU.

    Args:
        value: The number for all GPUs, or those for GPUs of up to each size; 0 for larger ones.
        memory: Bytes of its memory; None for a rank on the CPU, which counts as larger than all.
    """
    if isinstance(value, int):
        return value
    fits = (count for size, count in value.items() if memory and memory <= int(size[:-2]) << 30)
    return next(fits, 0)


def most_on_card(value: int | Mapping[str, int]) -> int:
    """Return the largest number of what `read_by_card` read."""
    return value if isinstance(value, int) else max(value.values())


def _by_stem(value: Any, choices: tuple[str, ...], *endings: str) -> Any:
    """Return the choice that a word names, with or without one of the endings."""
    if isinstance(value, str):
        word = spellings.unquoted(value).strip()
        for text in (word, *(f"{word}{ending}" for ending in endings)):
            if (choice := spellings.as_choice(text, choices)) in choices:
                return choice
    return value


Bool = Annotated[bool, BeforeValidator(read_bool)]
Share = Annotated[bool | float, BeforeValidator(read_share)]
OptionalBool = Annotated[
    bool | None, BeforeValidator(read_bool), BeforeValidator(spellings.as_none)
]
OptionalText = Annotated[str | None, BeforeValidator(spellings.as_none)]
OptionalTextList = Annotated[
    list[str] | None, BeforeValidator(read_names), BeforeValidator(spellings.as_none)
]
OptionalSettings = Annotated[str | dict[str, Any] | None, BeforeValidator(read_settings)]
OptionalNumbers = Annotated[
    dict[str, Annotated[float, Field(gt=0)]] | None, BeforeValidator(read_numbers)
]
SlurmTime = Annotated[str | None, BeforeValidator(read_slurm_time)]
NumberByCard = Annotated[int | dict[str, int], BeforeValidator(read_by_card)]
TokenRoutes = Annotated[dict[str, float] | None, BeforeValidator(read_routes)]
OptionalWords = Annotated[
    list[str] | None, BeforeValidator(read_words), BeforeValidator(spellings.as_none)
]
