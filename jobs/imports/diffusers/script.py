"""Command lines of diffusers' training scripts: the rules that are more than a row of the table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, launch, models
from jobs.imports.common.command_line import Command, read_command, rules_of_odd
from jobs.imports.common.draft import Draft, as_number, is_off, plain
from jobs.imports.common.draft import read as read_value
from jobs.imports.common.places import find_beside
from jobs.imports.common.table import read_data, read_table, word_of
from jobs.imports.common.whose import hint, tool_of_command
from jobs.spec.values.dataset_files import list_files

if TYPE_CHECKING:
    from collections.abc import Sequence

TITLE: Final = "a diffusers script"
DATA: Final = read_data(__file__)

# In names of scripts, the longer ones first.
_FAMILIES: Final = {
    "flux2": "flux2",
    "flux": "flux",
    "sd3": "sd3",
    "sdxl": "sdxl",
    "sd_xl": "sdxl",
    "sd15": "stable_diffusion",
    "sana": "sana",
    "lumina2": "lumina2",
    "hidream": "hidream",
    "qwen": "qwen_image",
    "z_image": "z_image",
    "krea2": "krea2",
    "ideogram4": "ideogram4",
}
# Of the oldest scripts, whose names have no family.
_OLDEST: Final = re.compile(r"train_(dreambooth|text_to_image)(_lora)?")
_OTHER_TASKS: Final = re.compile(
    r"controlnet|textual_inversion|inpaint|pix2pix|img2img|kontext|unconditional|distill|adapter|dpo|orpo"
    r"|custom_diffusion|(^|_)(control|reflow|lpl|ppo|prior|decoder|flax|edm|multispectral)(_|$)"
)
# Those that train the whole model. A script of another name without flags of a LoRA may train
# anything: a job that trains it in full by mistake would cost days.
_FULL: Final = re.compile(r"train_dreambooth(_flux|_sd3)?|train_text_to_image(_sdxl)?")
# Those that train on pairs as it is done here.
_PAIRS: Final = re.compile(r"flux_kontext|control_lora_flux|flux2(?:_klein)?_img2img")
_FLAVOURS: Final = {"flux_kontext": "kontext", "control_lora_flux": "control"}
_OF_LORAS: Final = frozenset({"rank", "lora_alpha", "lora_layers"})
_FOLDERS: Final = ("dataset_name", "instance_data_dir", "train_data_dir")
_TAKE_SEVERAL: Final = ("validation_prompts", "report_to")
# Scripts draw among the steps of a FlowMatchEulerDiscreteScheduler, which shifts those of these
# families alike at all sizes. The others' are shifted by tokens, and only while sampling; Sana's
# are not, since the class does not know `flow_shift`.
_SHIFTS: Final[dict[str, float | str | None]] = {
    "sd3": None,  # the family's is its scheduler's
    "ideogram4": None,  # by resolution, as here
    "lumina2": 1 / 6,  # its 6, of the share of data that the script calls sigma
    "z_image": "sampler",
    "hidream": 3.0,
}


def read(given: Sequence[str]) -> tuple[str, Draft]:
    """Return what is imported, as a short text, and its job.

    Raises:
        UserError: There is no command, it cannot be read, it is of another tool, or nothing says
            whether it trains a LoRA.
    """
    source, command = read_command(given)
    _refuse_foreign(command)
    draft = Draft(dict(command.flags), command.folder)
    _set_script(draft, command)
    launch.read_environment(draft, command.environment)
    launch.read_flags(draft, "accelerate launch --", command.launch)
    for word in command.strays:
        draft.unreadable(word, "does not belong to any flag")
    draft.defaults = _defaults(draft, command)
    SCRIPT.apply(draft, rules_of_odd(command.flags, _TAKE_SEVERAL))
    if draft.values["model_type"] == "lora":
        draft.values["lora_init"] = "gaussian"
        draft.assume("init_lora_weights", "as the script initializes A", lora_init="gaussian")
    _warn(draft)
    return source, draft


def _refuse_foreign(command: Command) -> None:
    """Raise `UserError` for a script of another tool, whose flags mean something else."""
    if tool := tool_of_command(command):
        name = (command.script or "the command").rpartition("/")[2]
        raise UserError(f"{name} is of {tool}, not of diffusers", hint(tool))


def _set_script(draft: Draft, command: Command) -> None:
    """Set the family by the script's or model's name, and a LoRA by the script's name or flags."""
    stem = (command.script or "").rpartition("/")[2].removesuffix(".py").lower()
    is_lora = "lora" in stem or not _OF_LORAS.isdisjoint(draft.theirs)
    model = str(draft.theirs.get("pretrained_model_name_or_path", ""))
    family = next((family for word, family in _FAMILIES.items() if word in stem), None)
    family = family or models.guess_family(draft, model)
    family = family or ("stable_diffusion" if _OLDEST.fullmatch(stem) else None)
    if not (is_lora or _FULL.fullmatch(stem) or _OTHER_TASKS.search(stem)):
        what = (
            f"{stem}.py is not one of" if stem else "no script is named; a full model needs one of"
        )
        raise UserError(
            f"{what} the scripts of diffusers that train the full model",
            "for a LoRA, pass its --rank, too",
        )
    draft.values["model_type"] = "lora" if is_lora else "full"
    if command.script is None:
        draft.values |= {} if family is None else {"model_family": family}
        draft.assume("the script", "from the model's name and the flags", **draft.values)
        return
    part = Draft({"script": command.script}, draft.folder, above=draft)
    part.values = draft.values
    if pairs := _PAIRS.search(stem):
        draft.values["model_family"] = family or "flux"
        if flavour := _FLAVOURS.get(pairs[0]):
            draft.values["model_flavour"] = flavour
        draft.assume("script", "from its name and the flags", **draft.values)
    elif _OTHER_TASKS.search(stem):
        draft.values |= {} if family is None else {"model_family": family}
        part.unsupported("script", "the job trains a LoRA or the full model from text only")
        draft.report.to_fill_in.append(f"{stem}.py is not fully supported; check the job")
    elif models.set_family(part, "script", family):
        draft.assume("script", "from its name and the flags", model_type=draft.values["model_type"])


def _defaults(draft: Draft, command: Command) -> dict[str, Any]:
    """Return the script's values of flags that are not set."""
    family, kind = models.family_of(draft), draft.values["model_type"]
    stem = (command.script or "").rpartition("/")[2].removesuffix(".py")
    subject = f"{stem} {family.name} {family.objective} {kind}"
    defaults: dict[str, Any] = {}
    for row in DATA["defaults"]:
        defaults |= (
            {k: v for k, v in row.items() if k != "of"} if re.search(row["of"], subject) else {}
        )
    if "guidance_scale" in defaults and models.widened_of(draft):
        defaults["guidance_scale"] = 30.0
    if draft.get("max_train_steps"):
        del defaults["num_train_epochs"]
    return defaults


def _warn(draft: Draft) -> None:
    rank = draft.number("rank")
    if draft.values["model_type"] == "lora" and rank != 4 and "lora_alpha" not in draft.theirs:
        draft.report.warnings.append(
            "lora_alpha: not set; newer scripts default to 4, older ones to the rank, and this job "
            f"to {draft.values.get('lora_alpha', 'the rank')}"
        )


def _with_widened(draft: Draft, layers: str) -> str:
    """Names of adapted layers, with commas; with that one too, as the script adds it."""
    names, widened = [layer.strip() for layer in layers.split(",")], models.widened_of(draft)
    return ",".join(names if not widened or widened in names else [*names, widened])


def layers(draft: Draft, key: str, value: Any) -> None:
    value = _with_widened(draft, str(value))
    draft.take(key, "lora_target_modules", value, "suffixes of module names")


def prompt(draft: Draft, key: str, value: Any) -> None:
    texts = value if isinstance(value, list) else [value]
    before = [plain(prompt) for prompt in draft.values.get("validation_prompts", [])]
    draft.take(key, "validation_prompts", [*before, *map(str, texts)], "a list of them")


# -- data ------------------------------------------------------------------------------------


def dataset(draft: Draft, key: str, value: Any) -> None:
    """Take the only dataset, with the other flags that describe it."""
    keys = (*_FOLDERS, *DATASET.rules)
    part = data.Part(draft, "", {k: v for k, v in draft.theirs.items() if k in keys})
    if key == "dataset_name":
        data.hub_id(part, key, value)
    elif "dataset_name" in draft.theirs:
        part.unneeded(key, "dataset_name is used")
    else:
        data.folder(part, key, value)
    if "path" in part.values:
        part.theirs = {k: v for k, v in part.theirs.items() if k in DATASET.rules}
        DATASET.apply(part)
        sized = "conditioning_column" in part.values and not models.widened_of(draft)
        if sized:  # there it is as large as the image it belongs to
            side = as_number(draft.get("resolution")) or 512
            draft.values["conditioning_resolution"] = int(side)
        data.settle(draft, [part])


def with_dataset(draft: Draft, key: str, value: Any) -> None:
    """Report a flag that `dataset` reads as unsupported if there was no dataset."""
    if not {"dataset", "datasets"} & set(draft.values):
        draft.unsupported(key, "it needs a dataset, and none could be read")


def has_prior(draft: Draft, key: str) -> bool:
    """Whether there are class images."""
    switched = not is_off(draft.theirs.get("with_prior_preservation"))
    return switched and bool(draft.theirs.get("class_prompt"))


def prior(draft: Draft, key: str, value: Any) -> None:
    """Class images: those of the folder that is named, or as many as are to be made."""
    if not draft.theirs.get("class_prompt"):
        draft.unsupported(key, "it needs class_prompt")
        return
    draft.values["class_prompt"] = draft.theirs["class_prompt"]
    named = draft.theirs.get("class_data_dir")
    folder = find_beside(draft.folder, str(named)) if named else None
    if folder is not None and folder.is_dir() and list_files(folder).pictures:
        entries = [plain(entry) for entry in draft.values.pop("datasets", [])]
        entries = entries or [{"path": draft.values.pop("dataset", "")}]
        entries.append({"path": str(folder), "regularization": True})
        if draft.take(key, "datasets", [entry for entry in entries if entry["path"]]):
            draft.values["datasets"] = read_value("datasets", draft.values["datasets"])
        return
    draft.take(
        key,
        "num_class_images",
        draft.theirs.get("num_class_images") or 100,
        "class images are half of each train_batch_size here, and come on top of it there",
    )


# -- noise -----------------------------------------------------------------------------------


def weighting(draft: Draft, key: str, value: Any) -> None:
    """Set how sigma is drawn, and how it weights the loss."""
    word, name = word_of(value), models.family_of(draft).name
    plain, moved = (
        ("logit_normal", "shift") if word == "logit_normal" else ("uniform", "uniform_shift")
    )
    how = "with the model scheduler's shift" if name in _SHIFTS else "drawn as in the script"
    draft.take(key, "timestep_sampling", moved if name in _SHIFTS else plain, how)
    if shift := _SHIFTS.get(name):
        draft.values["flow_shift"] = shift
    if word == "sigma_sqrt" and name == "lumina2":
        draft.unsupported(key, "loss_weighting follows the noise, the script's the data")
    elif word in ("sigma_sqrt", "cosmap"):
        draft.values.setdefault("loss_weighting", word)


def preconditioned(draft: Draft, key: str, value: Any) -> None:
    """Weight by sigma squared, as SD3's scripts do unless told otherwise.

    They compare the data that the velocity implies, whose error is sigma times the velocity's.
    """
    scheme = word_of(draft.get("weighting_scheme"))
    weight = "none" if scheme == "sigma_sqrt" else "sigma_squared"
    draft.take(key, "loss_weighting", weight, f"with weighting_scheme: {scheme}")


def mean(draft: Draft, key: str, value: Any) -> None:
    """Invert the mean, which counts from the noisy end there."""
    number = as_number(value)
    if number is None:
        draft.unreadable(key, "not a number")
    else:
        draft.take(key, "logit_mean", -number or 0.0, "sign inverted: 0 is noise there")


SCRIPT: Final = read_table(__file__, "script", globals())
DATASET: Final = read_table(__file__, "dataset", globals())
