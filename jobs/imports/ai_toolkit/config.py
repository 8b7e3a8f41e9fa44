"""ai-toolkit's `CONFIG.yaml`: the rules of its table that are more than a row."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, launch, models, training_keys
from jobs.imports.common.draft import Draft, as_number, flatten, is_off
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import parse
from jobs.imports.common.table import read_data, read_table, sentence, shared_table
from jobs.imports.common.whose import refuse_others
from jobs.spec.values.datasets import TRIGGER
from jobs.spec.values.resolutions import sides_of
from jobs.spec.values.spellings import as_bool

if TYPE_CHECKING:
    from pathlib import Path

TITLE: Final = "ai-toolkit"
DATA: Final = read_data(__file__)

_HIGH: Final = ("2.2-t2v-a14b-high", "2.2-i2v-a14b-high")
_RESOLUTION: Final = 512  # of a dataset that says none


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, or is no training of this tool.
    """
    values = parse(path, otherwise=".yaml")
    refuse_others(values, path, TITLE)
    process, around, others = _process(path, values)
    theirs = {str(k): v for k, v in flatten(process, keep=("datasets",)).items()}
    draft = Draft(around | theirs, path.absolute().parent)
    draft.values["model_type"] = "lora" if isinstance(process.get("network"), dict) else "full"
    draft.defaults = CONFIG.defaults_of(draft)
    for number in range(1, others + 1):
        draft.unsupported(f"process[{number}]", "a job is one training run; use a file for each")
    _use_default_architecture(draft)
    CONFIG.apply(draft)
    if "resolution" not in draft.values and process.get("datasets"):
        draft.values["resolution"] = _RESOLUTION
        draft.assume("datasets.resolution", "", resolution=_RESOLUTION)
    if draft.values["model_type"] == "full":
        draft.assume("network", "without one, the full model is trained", model_type="full")
    return draft


def _process(path: Path, values: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the training process, what stands around it, and how many other processes there are.

    Raises:
        UserError: There is none.
    """
    config = values.get("config") if isinstance(values, dict) else None
    processes = config.get("process") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(processes, list) or not processes:
        raise UserError(
            f"{path} is not an ai-toolkit config: config.process is missing",
            "it must be a list with the training",
        )
    kind = str(values.get("job", "extension")).strip().lower()
    if kind not in ("extension", "train") or not isinstance(processes[0], dict):
        raise UserError(
            f"{path} is not a training config: job is {kind}", "use a file with job: extension"
        )
    # The tool itself does so in the whole file.
    name = str(config.get("name", ""))
    try:
        text = json.dumps(processes[0], default=str)
    except TypeError as error:
        raise UserError(f"{path}: a key cannot be read ({error})") from None
    first = json.loads(text.replace("[name]", json.dumps(name)[1:-1]))
    around = {f"config.{key}": value for key, value in config.items() if key != "process"}
    around |= {key: value for key, value in values.items() if key != "config"}
    return first, around, len(processes) - 1


# -- model and adapter -----------------------------------------------------------------------


def quantize(draft: Draft, key: str, value: Any) -> None:
    """Whether the base is quantized; `model.qtype` says how."""
    if is_off(value) or as_bool(value) is False:
        draft.unneeded(key, "nothing is quantized by default")
        return
    training_keys.base_precision(draft, key, draft.theirs.get("model.qtype") or "qfloat8")


def quantized_type(draft: Draft, key: str, value: Any) -> None:
    """How the base is quantized, and the adapter that goes with it."""
    if "|" in str(value):
        draft.unsupported(key, "accuracy recovery adapters are not supported")
    else:
        draft.unneeded(key, "part of base_precision")


def architecture(draft: Draft, key: str, value: Any) -> None:
    word, _, tag = str(value).strip().lower().partition(":")
    if word == "qwen_image_edit_plus":
        tag = tag or str(draft.theirs.get("model.name_or_path"))
    family, flavour = models.named_in(DATA["architectures"], f"{word}:{tag}")
    if flavour in _HIGH and not trains_high(draft, key):
        flavour = flavour.replace("-high", "-low")
    models.set_family(draft, key, family, flavour)
    low = "model.model_kwargs.train_low_noise"
    if flavour in _HIGH and not is_off(draft.theirs.get(low, True)):
        draft.values["both_experts"] = True
        draft.report.warnings.append(
            "max_train_steps: each expert trains all of them here; there, the two share them"
        )
        if low not in draft.theirs:
            draft.assume(low, "on", both_experts=True)


def trains_high(draft: Draft, key: str) -> bool:
    """Whether it trains Wan 2.2's expert for high noise."""
    return not is_off(draft.theirs.get("model.model_kwargs.train_high_noise", True))


def switch(draft: Draft, key: str, value: Any) -> None:
    """Read `is_flux: true` and the like."""
    if is_off(value):
        draft.unneeded(key, "off")
    elif draft.get("model.arch"):
        draft.unneeded(key, "set by arch")
    else:
        models.set_family(draft, key, *DATA["switches"].get(key.rpartition(".")[2], [None]))


def _use_default_architecture(draft: Draft) -> None:
    """Set the family where neither `arch` nor a switch does.

    ai-toolkit assumes Stable Diffusion 1; a family in the model's name takes precedence.
    """
    switches = [draft.on(f"model.{switch}") for switch in DATA["switches"]]
    name = draft.get("model.name_or_path")
    if draft.get("model.arch") or any(switches) or name is None:
        return
    guess = models.guess_family(draft, str(name))
    family = guess or "stable_diffusion"
    draft.values["model_family"] = family
    why = "from the model's name" if guess else "ai-toolkit's default"
    draft.assume("model.arch", why, model_family=family)
    if guess is None:
        draft.report.to_fill_in.append(f"model_family: {family} is {why}; check it")


# -- training --------------------------------------------------------------------------------


def device(draft: Draft, key: str, value: Any) -> None:
    word, _, number = str(value).strip().lower().partition(":")
    if word == "cpu":
        draft.take(key, "device", "cpu")
    elif word == "cuda" and number not in ("", "0"):
        launch.gpus(draft, key, number)
    elif word == "cuda":
        draft.unneeded(key, "the queue chooses a free GPU; gpus: [0] asks for this one")
    else:
        draft.unsupported(key, sentence("nvidia_or_cpu"))


def fsdp(draft: Draft, key: str, value: Any) -> None:
    """Keys of its forks that shard, as far as they are called as here."""
    ours = {"fsdp_sharding": "fsdp_reshard_after_forward"}.get(key.rpartition(".")[2])
    if ours is not None:
        value = {"full": True, "shard_grad_op": False}.get(str(value).lower(), value)
        draft.take(key, ours, value, "the equivalent key")
        return
    rule = shared_table("launch").rules.get(key.rpartition(".")[2])
    if rule is None:
        draft.record(Kind.UNKNOWN, key, why="not a known key")
    else:
        rule(draft, key, value)


def accumulation(draft: Draft, key: str, value: Any) -> None:
    number = as_number(value)
    if number is not None and number < 1:
        draft.unsupported(key, "set gradient_accumulation_steps, a number of forwards")
    elif number == 1 and draft.values.get("gradient_accumulation_steps", 1) != 1:
        draft.unneeded(key, "overridden by its other key")
    else:
        draft.take(key, "gradient_accumulation_steps", value)


# The shift of its own schedulers, where training has another by default here.
_SHIFTS: Final = {"z_image": 3.0, "lumina2": 6.0, "auraflow": 3.0, "anima": 3.0, "minimax_h3": 12.0}
# Pixels of what it counts as tokens, where the shift follows them: single latents of two.
_TOKENS: Final = {"chroma": 8, "kontext": 8, "flux": 16, "flux2": 16}


def timesteps(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    ours = {
        "sigmoid": "logit_normal",
        "linear": "uniform",
        **dict.fromkeys(("shift", "flux_shift", "lumina2_shift"), "uniform_shift"),
    }
    if models.family_of(draft).objective != "flow":
        draft.unneeded(key, "only for flow-matching models")
    elif word in ours:
        family = models.family_of(draft).name
        kind = "kontext" if draft.values.get("model_flavour") == "kontext" else family
        if ours[word] == "uniform_shift" and kind in _TOKENS:
            draft.values["timestep_sampling"] = ours[word]
            sides = sides_of(draft.values.get("resolution") or 512)
            training_keys.take_shift_by_size(draft, key, sides, token=_TOKENS[kind])
            return
        draft.take(key, "timestep_sampling", ours[word], "the equivalent value")
        if ours[word] == "logit_normal" and training_keys.deviation_of(draft) != 1:
            draft.values["logit_std"] = 1.0
        if ours[word] == "uniform_shift" and family in _SHIFTS:
            draft.values["flow_shift"] = _SHIFTS[family]
    elif word == "weighted":
        draft.take(key, "timestep_sampling", "uniform", "with loss_weighting: weighted")
        draft.values["loss_weighting"] = "weighted"
    else:
        draft.unsupported(key, "set timestep_sampling: uniform, logit_normal, shift, or another")


def rate(draft: Draft, key: str, value: Any) -> None:
    """Take the learning rate; with prodigy, that tool replaces rates below 0.1 by 1."""
    number = as_number(value)
    prodigy = str(draft.get("train.optimizer")).strip().lower().startswith("prodigy")
    if prodigy and number is not None and number < 0.1:
        draft.take(key, "learning_rate", 1.0, "that tool gives prodigy a rate of 1 instead")
    else:
        draft.take(key, "learning_rate", value)


def has_epsilon(draft: Draft, key: str) -> bool:
    """Whether its optimizer has another epsilon than here."""
    name = str(draft.theirs.get("train.optimizer", "adamw")).lower()
    return name.startswith(("adam", "prodigy"))


# -- datasets and samples --------------------------------------------------------------------


def read_datasets(draft: Draft, key: str, value: Any) -> None:
    """All datasets, each reported under its number."""
    entries = value if isinstance(value, list) else [value]
    parts = []
    for number, entry in enumerate(entries):
        place = f"{key}[{number}]"
        if not isinstance(entry, dict):
            draft.unreadable(place, "not a dataset")
        else:
            theirs = flatten({str(k): v for k, v in entry.items()})
            parts.append(data.read_part(draft, place, theirs, DATASET))
    if any("resolution" in part.values for part in parts):
        for part in parts:
            part.values.setdefault("resolution", _RESOLUTION)
    data.settle(draft, parts)


def samples(draft: Draft, key: str) -> bool:
    """Whether there are prompts."""
    return bool(draft.theirs.get("sample.prompts") or draft.theirs.get("sample.samples"))


def has_videos(part: Draft, key: str) -> bool:
    """Whether the samples of a dataset are videos."""
    return (part.number("num_frames") or 1) > 1 or part.on("auto_frame_count")


def has_rate(part: Draft, key: str) -> bool:
    """Whether samples are cut from videos at a rate, and not spread over all of a video."""
    spread = not is_off(part.theirs.get("shrink_video_to_frames", True))
    return has_videos(part, key) and not part.on("auto_frame_count") and not spread


def is_spread(part: Draft, key: str) -> bool:
    """Whether a sample shows a video from start to end."""
    fixed = has_videos(part, key) and not part.on("auto_frame_count")
    return fixed and not has_rate(part, key)


def has_masks(part: Draft, key: str) -> bool:
    """Whether a dataset has masks."""
    return bool(part.get("mask_path")) or part.on("alpha_mask")


def has_regularization(draft: Draft, key: str) -> bool:
    """Whether there is a regularization dataset."""
    entries = draft.theirs.get("datasets")
    entries = entries if isinstance(entries, list) else [entries]
    return any(isinstance(entry, dict) and not is_off(entry.get("is_reg")) for entry in entries)


def resolution(part: Draft, key: str, value: Any) -> None:
    """One resolution or several; both train every image at each that it is large enough for."""
    sides = [as_number(side) for side in (value if isinstance(value, list) else [value])]
    resolutions = [int(side) for side in sides if side]
    if resolutions and len(resolutions) == len(sides):
        part.take(key, "resolution", resolutions)
    else:
        part.unreadable(key, "not a number, or a list of numbers")


def default_caption(part: Draft, key: str, value: Any) -> None:
    """Take the caption for images without one, with the trigger word inserted as the tool does."""
    word = part.job.get("trigger_word")
    text = str(value).replace(TRIGGER, word or "")
    data.only_caption(part, key, f"{word} {text}" if word and word not in text else text)


def control(part: Draft, key: str, value: Any) -> None:
    """Control images; the tool makes those of Kontext as large as the training image."""
    if is_off(value):
        part.unneeded(key, "off is the default")
        return
    data.conditioning_folder(part, key, value)
    if part.values.get("conditioning_path") and part.job.get("model_flavour") == "kontext":
        part.values["conditioning_resolution"] = part.values.get("resolution")


def prompts(draft: Draft, key: str, value: Any) -> None:
    """Prompts, each with the settings that stand in its text or beside it."""
    if draft.on("train.disable_sampling"):
        draft.unneeded(key, "train.disable_sampling is on")
        return
    entries = value if isinstance(value, list) else [value]
    given, lost = [], list[str]()
    for number, entry in enumerate(entries):
        settings, other = _of_mapping(entry) if isinstance(entry, dict) else _of_text(str(entry))
        if not models.takes_images(draft) and settings.pop("conditioning_image", None):
            other.append("ctrl_img")
        if draft.on("sample.walk_seed") and "seed" not in settings:
            settings["seed"] = int(draft.number("sample.seed") or 0) + number
        given.append((f"{key}[{number}]", settings))
        lost += other
    seeds = "with increasing seeds" if draft.on("sample.walk_seed") else "the equivalent key"
    draft.take(key, "validation_prompts", data.prompts(draft, given), seeds)
    for name in dict.fromkeys(lost):
        draft.unsupported(f"{key}: {name}", "samples use only the trained model")


def _of_mapping(entry: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a prompt that is a mapping into settings and keys that are not supported here."""
    settings = {
        DATA["prompt"][k]: v for k, v in entry.items() if k in DATA["prompt"] and v is not None
    }
    width, height = entry.get("width"), entry.get("height")
    if width or height:
        settings["resolution"] = f"{width or height}x{height or width}"
    if controls := [entry[key] for key in DATA["controls"] if entry.get(key)]:
        settings["conditioning_image"] = controls
    supported = (*DATA["prompt"], *DATA["controls"], "width", "height", "fps")
    lost = [str(k) for k in entry if k not in supported]
    if not settings.get("negative_prompt"):
        settings.pop("negative_prompt", None)
    return settings, lost


def _of_text(text: str) -> tuple[dict[str, Any], list[str]]:
    """Split a prompt followed by flags into settings and flags that are not supported here."""
    prompt, *flags = re.split(r"(?:^|\s)--(?=[a-z])", text)
    settings: dict[str, Any] = {"prompt": prompt.strip()}
    sides: dict[str, str] = {}
    lost = []
    for flag in flags:
        name, _, value = flag.partition(" ")
        if name in ("w", "h"):
            sides[name] = value.strip()
        elif name in DATA["prompt_flags"]:
            settings[DATA["prompt_flags"][name]] = value.strip()
        else:
            lost.append(f"--{name}")
    if sides:
        some = next(iter(sides.values()))
        settings["resolution"] = f"{sides.get('w', some)}x{sides.get('h', some)}"
    return settings, lost


def width(draft: Draft, key: str, value: Any) -> None:
    height = draft.get("sample.height") or value
    draft.take(key, "validation_resolution", f"{value}x{height}", "width and height")


def height(draft: Draft, key: str, value: Any) -> None:
    if "sample.width" in {**draft.theirs, **draft.defaults}:
        draft.unneeded(key, "set by validation_resolution")
    else:
        width(draft, key, value)


CONFIG: Final = read_table(__file__, "config", globals())
DATASET: Final = read_table(__file__, "dataset", globals())
