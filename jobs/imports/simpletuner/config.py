"""SimpleTuner's `config.json` and `config.env`: the rules of its table that are more than a row."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import models, training_keys
from jobs.imports.common.command_line import split
from jobs.imports.common.draft import Draft, as_number, is_off, plain
from jobs.imports.common.draft import read as read_value
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import parse, read_beside, read_text
from jobs.imports.common.table import read_data, read_table, word_of
from jobs.imports.common.whose import SIMPLETUNER, refuse_others
from jobs.imports.simpletuner import data
from jobs.spec.families import FAMILIES
from jobs.spec.families.base import FLUX_LINE
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.launch_conflicts import kernel_conflict
from jobs.spec.values.resolutions import sides_of
from jobs.spec.values.spellings import as_mapping, normal_key

if TYPE_CHECKING:
    from pathlib import Path

TITLE: Final = SIMPLETUNER
DATA: Final = read_data(__file__)
ENV: Final = ".env"
"""What names of its older configurations end in."""

_MODEL: Final = "pretrained_model_name_or_path"
_EXTRA: Final = "TRAINER_EXTRA_ARGS"  # a variable with flags
_ASSIGNED: Final = re.compile(
    r"(?:export\s+)?(?P<name>[A-Z_a-z]\w*)(?P<adds>\+)?="
    r"(?P<value>\"[^\"]*\"|'[^']*'|.*?)\s*(?:(?<=\s)#.*)?"
)
_USED: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, or is not of this tool.
    """
    values = _variables(path) if path.suffix.lower() == ENV else parse(path)
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a SimpleTuner config: it has no keys")
    theirs: dict[str, Any] = {}
    twice = []
    for key, value in values.items():
        name = normal_key(str(key))
        twice += [name] if name in theirs else []
        theirs[name] = value
    draft = Draft(theirs, path.absolute().parent)
    draft.defaults = CONFIG.defaults_of(draft)
    CONFIG.apply(draft)
    _use_published_model(draft)
    _use_own_settings(draft)
    for name in twice:
        draft.report.warnings.append(f"{name}: set twice in {path.name}; the later one is used")
    return draft


def _variables(path: Path) -> dict[str, Any]:
    """Return the keys of an older `config.env`: a variable in each line, of which one has flags."""
    variables: dict[str, str] = {}
    for line in read_text(path).splitlines():
        match = _ASSIGNED.fullmatch(line.strip())
        if match is None:
            continue
        value = match["value"].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        value = _USED.sub(lambda used: variables.get(used[1] or used[2], used[0]), value)
        name = match["name"]
        variables[name] = f"{variables.get(name, '')} {value}".strip() if match["adds"] else value
    extra = variables.pop(_EXTRA, "").split()
    values: dict[str, Any] = {}
    for name, text in variables.items():
        key = DATA["variables"].get(name, name.lower())
        # A switch that is off is not on the command line.
        values[key] = None if text.lower() in ("", "false") else text
    if values.pop("use_bitfit", None) is not None:
        values["layer_freeze_strategy"] = "bitfit"
    return values | split(extra, path.absolute().parent).flags


# -- model and adapter -----------------------------------------------------------------------


def family(draft: Draft, key: str, value: Any) -> None:
    word = normal_key(str(value))
    word = DATA["families"].get(word, word)
    models.set_family(draft, key, word if word in FAMILIES else None)


def flavour(draft: Draft, key: str, value: Any) -> None:
    family, name = draft.values.get("model_family", ""), str(value).strip()
    flavour = DATA["flavours"].get(family, {}).get(name)
    if flavour is None and name in getattr(FAMILIES.get(family), "flavours", {}):
        flavour = name
    published = DATA["other_models"].get(family, {}).get(name)
    if flavour is not None:
        note = next((note for part, note in DATA["notes"].items() if part in flavour), "")
        draft.take(
            key, "model_flavour", flavour, note or ("" if flavour == value else "its name here")
        )
    elif published is None:
        draft.unsupported(key, "not a published model here; `fsdp-tui families` lists them")
    elif draft.get(_MODEL) is None:
        draft.take(key, _MODEL, published, "its published model")
    else:
        draft.unneeded(key, f"{_MODEL} is used")


def _use_published_model(draft: Draft) -> None:
    """Where no model is named, the tool takes the published one of the flavour."""
    family = draft.values.get("model_family")
    unknown = draft.get("model_flavour") is not None and "model_flavour" not in draft.values
    if family is None or draft.get(_MODEL) is not None or unknown:
        return
    flavour = draft.values.get("model_flavour")
    hub_id = ""
    if draft.get("model_flavour") is None:
        usual = DATA["usual"].get(normal_key(str(draft.get("model_family"))), "")
        flavour = DATA["flavours"].get(family, {}).get(usual)
        hub_id = DATA["other_models"].get(family, {}).get(usual, "")
        if flavour is not None:
            draft.values["model_flavour"] = flavour
            draft.assume("model_flavour", "", model_flavour=flavour)
    if flavour is not None:
        hub_id = FAMILIES[family].flavours[flavour].hub_id
    if hub_id:
        draft.values[_MODEL] = hub_id
        draft.assume(_MODEL, "the flavour's published model", **{_MODEL: hub_id})


def kernel(draft: Draft, key: str, value: Any) -> None:
    """Take the attention kernel; torch chooses one if the model cannot use it here."""
    ours, why = DATA["kernels"].get(word_of(value), ("", ""))
    batch, family = int(draft.number("train_batch_size") or 1), models.family_of(draft)
    if not ours:
        draft.unsupported(key, "torch's kernels are used; others: flash, cudnn")
    elif conflict := kernel_conflict(family, ours, batch, samples=True):
        draft.unneeded(key, conflict.text)
    else:
        draft.take(key, "attention_backend", ours, why)


def lycoris(draft: Draft, key: str, value: Any) -> None:
    """Read the file that says which of LyCORIS's adapters is trained."""
    file = read_beside(draft, key, value, dict, "set lora_variant: lokr if it is a LoKr")
    if file is None:
        return
    path, theirs = file
    draft.record(Kind.TRANSLATED, key, why=f"the keys of {path.name}")
    part = Draft(theirs, draft.folder, prefix=f"{key}.", above=draft)
    _LYCORIS.apply(part)
    draft.values |= part.values


# -- optimizer and schedule ------------------------------------------------------------------


def _optimizer_of(draft: Draft) -> str:
    return str(draft.get("optimizer") or DATA["optimizer"]).strip().lower().replace("-", "_")


def schedule_free(draft: Draft, key: str) -> bool:
    """Whether the optimizer needs no schedule."""
    return _optimizer_of(draft).startswith("adamw_schedulefree")


def settings(draft: Draft, key: str, value: Any) -> None:
    """Parse settings of the optimizer in one text: `eps=1e-6,weight_decay=0`."""
    parts = [part.partition("=")[::2] for part in str(value).split(",")]
    names = {"eps": "adam_epsilon", "weight_decay": "weight_decay"}
    ours: dict[str, Any] = {}
    other = []
    for name, text in parts:
        try:
            setting = names[name.strip()]
            ours[setting] = read_value(setting, text.strip())
        except (KeyError, UserError):
            other.append(name.strip())
    if other:
        draft.unsupported(key, f"not supported: {', '.join(other)}; set adam_* and weight_decay")
    else:
        draft.values |= ours
        draft.record(Kind.TRANSLATED, key, **ours)


def _use_own_settings(draft: Draft) -> None:
    """Set that tool's defaults of the optimizer, where nothing else is set."""
    settings = DATA["optimizer_settings"].items()
    values = next((v for names, v in settings if _optimizer_of(draft) in names.split()), None)
    if values is None or draft.on("deepspeed_config"):
        return
    names = ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
    own = dict(zip(names, values, strict=True))
    missing = {name: value for name, value in own.items() if name not in draft.values}
    draft.values |= missing
    usual = {name: JobSpec.model_fields[name].default for name in missing}
    if others := {name: value for name, value in missing.items() if value != usual[name]}:
        draft.assume("optimizer_config", "the optimizer's own settings", **others)


def warm_up(draft: Draft, key: str, value: Any) -> None:
    word = word_of(draft.get("lr_scheduler"))
    if not is_off(value) and word in DATA["curves"] and not schedule_free(draft, key):
        draft.unsupported(key, f"{word} has no warm-up there: it is the period of the curve")
    else:
        draft.take(key, "lr_warmup_steps", value)


# -- noise -----------------------------------------------------------------------------------


def forced_shift(draft: Draft, key: str) -> bool:
    """Whether the flavour decides the shift."""
    flavour = str(draft.get("model_flavour")).strip().lower()
    return flavour.startswith(("i2v-14b-2.2-", "flf2v-14b-2.2-"))


def no_shift(draft: Draft, key: str) -> bool:
    """Whether the shift that is set is none."""
    shift = draft.get("flow_schedule_shift")
    return is_off(shift) or as_number(shift) == 1


def shifted(draft: Draft, key: str) -> bool:
    """Whether anything shifts sigma."""
    number = draft.number("flow_schedule_shift") not in (None, 0, 1)
    return number or draft.on("flow_schedule_auto_shift") or forced_shift(draft, key)


def auto_shift(draft: Draft, key: str, value: Any) -> None:
    """Take the shift by resolution, as the tool counts tokens: of 2x2 latents in all families."""
    even = draft.on("flow_use_uniform_schedule")
    draft.values["timestep_sampling"] = "uniform_shift" if even else "shift"
    if models.family_of(draft).frame_step:
        draft.unsupported(key, "set flow_shift; the shift does not follow the frames here")
        return
    sides, name = sides_of(draft.values.get("resolution") or 1024), models.family_of(draft).name
    token = 2 * training_keys.FLUX_TOKEN if name == "flux2" else training_keys.FLUX_TOKEN
    own = {"qwen_image": training_keys.QWEN_LINE, "krea2": training_keys.KREA_LINE}
    line = own.get(name, FLUX_LINE)
    training_keys.take_shift_by_size(draft, key, sides, token=token, line=line)


# -- routes of tokens ------------------------------------------------------------------------


def tread(draft: Draft, key: str, value: Any) -> None:
    """Take the routes of tokens; their last block is skipped too, as here."""
    theirs = as_mapping(value) if isinstance(value, str) else value
    routes = theirs.get("routes") if isinstance(theirs, dict) else None
    family = FAMILIES.get(draft.values.get("model_family", ""))
    if not routes and theirs in (None, {}, {"routes": None}, {"routes": []}):
        draft.unneeded(key, "it has no routes")
    elif family is not None and not family.routed_blocks:
        draft.unsupported(key, family.not_routed)
    elif not isinstance(routes, list) or not all(isinstance(route, dict) for route in routes):
        draft.unreadable(key, "not a list of routes")
    else:
        names = ("start_layer_idx", "end_layer_idx", "selection_ratio")
        parts = [[route.get(name) for name in names] for route in routes]
        ours = {f"{first}..{last}": share for first, last, share in parts}
        draft.take(key, "tread", ours, "one draw for all samples of a step that are of one size")


# -- samples ---------------------------------------------------------------------------------


def real_guidance(draft: Draft, key: str) -> bool:
    """Whether samples have guidance besides that of a distilled model."""
    return (draft.number("validation_guidance_real") or 1) > 1


def prompt(draft: Draft, key: str, value: Any) -> None:
    # A list, so that commas in it are none between prompts.
    draft.take(key, "validation_prompts", [*_prompts(draft), str(value)], "a list of one")


def library(draft: Draft, key: str, value: Any) -> None:
    """Read a file with prompts by short names."""
    file = read_beside(draft, key, value, dict, "list the prompts as validation_prompts")
    if file is None:
        return
    path, content = file
    prompts = [
        entry.get("prompt") if isinstance(entry, dict) else entry for entry in content.values()
    ]
    texts = [text for text in prompts if isinstance(text, str) and text.strip()]
    what = f"{len(texts)} prompts of {path.name}"
    if others := len(prompts) - len(texts):
        what += f"; {others} of its entries are no prompts"
    draft.take(key, "validation_prompts", [*_prompts(draft), *texts], what)


def _prompts(draft: Draft) -> list[Any]:
    return [plain(entry) for entry in draft.values.get("validation_prompts", [])]


CONFIG: Final = read_table(__file__, "config", vars(data) | globals())
_LYCORIS: Final = read_table(__file__, "lycoris", globals())
