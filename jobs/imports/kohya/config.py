"""Commands and TOML files of kohya's sd-scripts and musubi-tuner: which script, model and keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import launch, models
from jobs.imports.common.command_line import Command, is_open, read_command, rules_of_odd
from jobs.imports.common.draft import Draft, as_number, is_off
from jobs.imports.common.places import parse, read_beside
from jobs.imports.common.table import read_data, read_table
from jobs.imports.common.whose import MUSUBI, SD_SCRIPTS, refuse_others, tool_of, tool_of_command
from jobs.imports.kohya import data, model, optimizer
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


DATA: Final = read_data(__file__)
SCRIPTS: Final = {
    script: (tool, family)
    for tool, families in zip((SD_SCRIPTS, MUSUBI), DATA["scripts"].values(), strict=True)
    for names, family in families.items()
    for script in names.split()
}
_GUI: Final = {
    *("LoRA_type", "stop_text_encoder_training_pct", "max_resolution", "model_train_type"),
    *("dataset_config_mode", "training_mode"),
}
_LISTS: Final = ("network_args", "optimizer_args", "lr_scheduler_args")
_SEVERAL: Final = (
    *(*_LISTS, "text_encoder_lr", "base_weights", "base_weights_multiplier"),
    *("datasets", "resolution", "trainable_modules"),
)
# Variables that hold more flags, behind a switch.
_MORE: Final = re.compile(
    r"\[[@*]\]|^\$\{?\w*(args|extra|flags|opts|options|params)\}?$", re.IGNORECASE
)
_ONE_RUN: Final = "a job trains a LoRA or the full model on images and captions"


def read(given: Sequence[str]) -> tuple[str, str, Draft]:
    """Return whose it is, what is imported, as a short text, and its job.

    Args:
        given: A TOML file; or a shell script, or the words of a command.

    Raises:
        UserError: It cannot be read, is of another tool, or trains something else.
    """
    path = Path(given[0])
    if len(given) == 1 and " --" not in given[0] and path.suffix.lower() in (".toml", ".json"):
        source, command = path.name, of_file(path)
    else:
        source, command = read_command(given)
        use_file(command)
    name = script_of(command)
    tool, family = SCRIPTS[name]
    full = not name.endswith("_network")
    if tool == MUSUBI and "dataset_config" not in command.flags and not command.script:
        raise UserError(f"{source} names no dataset_config", "musubi-tuner trains on nothing else")
    draft = Draft(_spelled_out(command.flags), command.folder)
    _set_model(draft, name, family, full)
    if not command.script and _told_script(command) is None:
        draft.report.to_fill_in.append(
            f"model_family: no script is named; {name}.py is a guess. Check the family, or pass "
            "the whole command"
        )
    launch.read_environment(draft, command.environment)
    launch.read_flags(draft, "accelerate launch --", command.launch)
    _refuse_unknown_words(command)
    for word in command.strays:
        draft.unreadable(word, "does not belong to any flag")
    table = TABLES[tool]
    draft.theirs = _whole_names(draft.theirs, table.rules)
    draft.defaults = _defaults(draft, tool, name)
    table.apply(draft, rules_of_odd(draft.theirs, _SEVERAL))
    _finish(draft, full)
    return tool, source, draft


def _defaults(draft: Draft, tool: str, name: str) -> dict[str, Any]:
    """Return the script's values of keys that are not set."""
    defaults = {"learning_rate": 2e-6} | optimizer.optimizer_defaults(draft)
    # musubi-tuner's others take what accelerate is launched with.
    if tool == SD_SCRIPTS or name == "hv_train" or "mixed_precision" not in draft.values:
        defaults["mixed_precision"] = "no"
    defaults |= TABLES[tool].defaults_of(draft)
    return defaults | ({"stop_text_encoder_training": 0} if name == "train_db" else {})


def _finish(draft: Draft, full: bool) -> None:
    """Say what no single key does."""
    if full:
        for key in ("lora_rank", "lora_alpha", "lora_variant", "lora_target_modules"):
            draft.values.pop(key, None)
    if "dit" not in draft.theirs and {"dataset", "datasets"} & draft.values.keys():
        draft.values["missing_captions"] = "empty"
        draft.assume("captions", "images without any are trained", missing_captions="empty")


# -- what is imported ------------------------------------------------------------------------


def of_file(path: Path) -> Command:
    """Return a configuration file as a command without a script."""
    values = parse(path, otherwise=".toml")
    if tool_of(values) != MUSUBI:
        refuse_others(values, path, SD_SCRIPTS)
    keys = [str(key) for key in values] if isinstance(values, dict) else []
    if not _GUI.isdisjoint(keys) or any(key.startswith("caching_") for key in keys):
        raise UserError(
            f"{path} is a preset of a graphical interface",
            "let it print the training command, and import that",
        )
    flags = _flat(values) if isinstance(values, dict) else {}
    if "datasets" in flags and not {"network_module", "output_dir", "dit"} & flags.keys():
        raise UserError(
            f"{path} only describes datasets",
            "pass the command or the configuration that names it as dataset_config",
        )
    return Command(path.absolute().parent, flags=flags)


def _refuse_unknown_words(command: Command) -> None:
    """Raise `UserError` where any flags may be in what only a shell knows."""
    values = [v for k, v in command.flags.items() if isinstance(v, list) and k not in _SEVERAL]
    words = [*command.strays, *(word for value in values for word in value[1:])]
    single = [v for k, v in command.flags.items() if isinstance(v, str) and k not in _SEVERAL]
    words += filter(_MORE.search, single)
    if unknown := [word for word in words if is_open(word)]:
        raise UserError(
            f"{unknown[0]} may hold any flags, and only the shell that runs the script knows which",
            "pass the command that it runs (put `echo` in front of it)",
        )


def use_file(command: Command) -> None:
    """Put the keys of a `--config_file` below the flags."""
    named = command.flags.pop("config_file", None)
    if named is None:
        return
    text = str(named) if str(named).endswith(".toml") else f"{named}.toml"
    draft = Draft({"config_file": text}, command.folder)
    file = read_beside(draft, "config_file", text, dict, "pass its keys as flags")
    if file is None:
        raise UserError(f"config_file: {draft.report.entries[0].why}")
    command.flags = _flat(file[1]) | command.flags
    command.folder = file[0].absolute().parent


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a file, in which sections of any name mean nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return {normal_key(str(key)): value for key, value in flat.items()}


def _spelled_out(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags in which each word of a list such as `network_args` is a key of its own."""
    theirs: dict[str, Any] = {}
    for key, value in flags.items():
        if key not in _LISTS:
            theirs[key] = value
            continue
        for word in value if isinstance(value, list) else str(value).split():
            name, _, text = str(word).partition("=")
            theirs[f"{key}.{name.strip()}"] = text.strip().strip("\"'")
    return theirs


def _whole_names(flags: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Complete names of flags: argparse takes the beginning of a name that no other shares."""
    names = {}
    for key in flags:
        longer = [name for name in table if name.startswith(key)] if key not in table else []
        names[key] = longer[0] if len(longer) == 1 and len(key) > 5 else key
    return {names[key]: value for key, value in flags.items()}


def script_of(command: Command) -> str:
    """Return the name of the script that is meant.

    Raises:
        UserError: It is of another tool, it trains something else, or nothing says which it is.
    """
    flags = command.flags
    name = (command.script or "").replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    if command.script:
        if name in SCRIPTS:
            return name
        tool = tool_of_command(command)
        whose = f"of {tool}" if tool else "not one of sd-scripts or musubi-tuner"
        raise UserError(f"{name}.py ({whose}) cannot be imported", _ONE_RUN)
    network = str(flags.get("network_module", "")).strip()
    if not network:
        raise UserError(
            "nothing says whether a LoRA is trained: no script is named, and no network_module",
            "pass the whole command: accelerate launch flux_train_network.py --config_file …",
        )
    name = _told_script(command) or next(
        (s for part, s in DATA["parts"].items() if part in flags), ""
    )
    if not name and "dit" in flags:
        name = "hv_train_network" if "text_encoder1" in flags else ""
    elif not name and not network.startswith("networks.lora_"):
        name = "sdxl_train_network" if _is_sdxl(flags) else "train_network"
    if not name:
        raise UserError(
            f"nothing says which script trains {network}",
            "pass the whole command: accelerate launch ….py --config_file …",
        )
    return name


def _told_script(command: Command) -> str | None:
    """Return the script that a network is for, if there is only one."""
    network = str(command.flags.get("network_module", "")).strip()
    if network == "networks.lora_flux" and "dit" in command.flags:
        return "flux_kontext_train_network"  # of musubi-tuner, which has a module of that name
    script: str | None = DATA["networks"].get(network)
    return script


def _is_sdxl(flags: Mapping[str, Any]) -> bool:
    """Whether a model of `networks.lora` is SDXL; the file does not say so itself."""
    if not is_off(flags.get("v2")) or not is_off(flags.get("v_parameterization")):
        return False
    name = str(flags.get("pretrained_model_name_or_path", ""))
    largest = max(as_number(s) or 0 for s in re.split(r"\D+", str(flags.get("resolution", ""))))
    named = re.search(r"xl|pony|illustrious|noob|animagine", name, re.IGNORECASE) is not None
    only = "cache_text_encoder_outputs" in flags or not is_off(flags.get("sdxl"))
    return named or only or largest >= 1024


# -- the model -------------------------------------------------------------------------------


def _set_model(draft: Draft, name: str, usual: str, full: bool) -> None:
    """Set the family, its flavour, and a LoRA or a full model.

    Raises:
        UserError: The model is not one that jobs train.
    """
    family, flavour = model.model_of(draft, name, usual)
    if family is None:
        raise UserError(f"{name}.py: {flavour} is not supported", _ONE_RUN)
    draft.values |= {"model_family": family, "model_type": "full" if full else "lora"}
    if flavour is not None and flavour != next(iter(models.family_of(draft).flavours)):
        draft.values["model_flavour"] = flavour
    draft.assume(f"{name}.py", "from the script", **draft.values)


def reads_guidance(draft: Draft, key: str) -> bool:
    """Whether the script has an input for guidance that is not fixed at 1."""
    family = draft.values["model_family"]
    fixed = "dit" in draft.theirs and family != "hunyuanvideo"
    return family in ("flux", "hunyuanvideo") and not fixed


_NAMES: Final = globals() | vars(data) | vars(model) | vars(optimizer)
TABLES: Final = {
    SD_SCRIPTS: read_table(__file__, "sd_scripts", _NAMES).with_rules(data.flag_rules()),
    MUSUBI: read_table(__file__, "musubi", _NAMES),
}
