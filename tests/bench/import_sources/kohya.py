"""sd-scripts and musubi-tuner: commands and TOML files, read by the tools' own parsers.

Their functions that add flags are run without the libraries of their files; datasets are merged
level by level as `config_util.py` and `config_utils.py` do.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import pathlib
import re
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import MagicMock

from jobs.errors import UserError
from jobs.imports.common.command_line import is_open, read_command
from jobs.imports.common.places import find_beside
from jobs.imports.common.whose import MUSUBI, SD_SCRIPTS
from jobs.imports.imported import import_kohya
from jobs.imports.kohya import config
from tests.bench.import_sources.real import Real, files_in, parse_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs.imports.imported import Imported

# A command for files that only describe datasets.
_ALONE: Final = {
    SD_SCRIPTS: "sdxl_train_network.py --network_module networks.lora --network_train_unet_only",
    MUSUBI: "wan_train_network.py --task t2v-14B --dit a --network_module networks.lora_wan",
}
_CODE: Final = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)
_TRAINS: Final = re.compile(r"\w+_train(_network)?\.py|train_(network|db)\.py|fine_tune\.py")
# Optimizers of both tools and what they are here; those of their libraries that have weight decay.
_OPTIMIZERS: Final = {
    "adamw": "adamw",
    "adamw8bit": "adamw_8bit",
    "pagedadamw": "adamw",
    "pagedadamw8bit": "adamw_8bit",
    "pagedadamw32bit": "adamw",
    "lion": "lion",
    "lion8bit": "lion",
    "pagedlion8bit": "lion",
    "prodigy": "prodigy",
    "adafactor": "adafactor",
    "adamwschedulefree": "adamw_schedule_free",
}
_DECAYED: Final = ("adamw", "adamw8bit", "pagedadamw", "pagedadamw8bit", "pagedadamw32bit")
_NEVER: Final = ("config_file", "output_config", "show_timesteps", "wandb_api_key")


class _Names(dict[str, Any]):
    """Names of a file, and those of all files; what is of other libraries is nothing."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__(argparse=argparse, pathlib=pathlib, Path=Path)
        self.shared = shared

    def __missing__(self, name: str) -> Any:
        if name in self.shared:
            return self.shared[name]
        return vars(builtins)[name] if name in vars(builtins) else MagicMock()


def parsers_of(checkout: Path) -> dict[str, argparse.ArgumentParser]:
    """Name of each of a tool's scripts → its parser."""
    source = checkout / "src" / "musubi_tuner"
    root = source if source.is_dir() else checkout
    names: dict[str, Any] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        adds = "add_argument(" in text or path.stem in config.SCRIPTS
        if adds and "/networks/" not in str(path):
            functions = _functions(path, names)
            names.setdefault(path.stem, SimpleNamespace(**functions))
            if path.stem not in config.SCRIPTS:
                names |= {k: v for k, v in functions.items() if k not in ("setup_parser", "main")}
    parsers = {}
    for script in config.SCRIPTS:
        own = getattr(names.get(script), "__dict__", {})
        if "setup_parser" in own:
            parsers[script] = own["setup_parser"]()
        elif setup := [f for name, f in own.items() if name.endswith("_setup_parser")]:
            parser = names["setup_parser_common"]()
            if script.endswith("_train") and script != "hv_train":
                base = vars(names[f"{script}_network"])
                for name, function in base.items():
                    if name.endswith("_setup_parser"):
                        function(parser)
            for function in setup:
                function(parser)
            parsers[script] = parser
    for parser in parsers.values():
        for action in parser._actions:  # choices of other libraries are not known
            if not list(action.choices or ()):
                action.choices = None
    return parsers


def _functions(path: Path, names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a file that make or fill a parser."""
    body = [
        node
        for node in parse_source(path).body
        if isinstance(node, ast.FunctionDef)
        and ("parser" in ast.unparse(node) or "argparse" in ast.unparse(node))
    ]
    local = _Names(names)
    exec(compile(ast.Module(body, []), str(path), "exec"), local)
    return {node.name: local[node.name] for node in body}


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """Commands in its documentation, and others' scripts and files."""
    parsers = parsers_of(checkout)
    with tempfile.TemporaryDirectory() as folder:
        for document in sorted((checkout / "docs").rglob("*.md")) if own else []:
            text = document.read_text(encoding="utf-8")
            for number, block in enumerate(_CODE.findall(text)):
                if _TRAINS.search(block):
                    path = Path(folder) / f"{document.stem}-{number}.sh"
                    path.write_text(block, encoding="utf-8")
                    yield _real(path, parsers)
        for path in files_in(paths, ".sh", ".bat", ".toml"):
            yield _real(path, parsers)


def _real(path: Path, parsers: Mapping[str, argparse.ArgumentParser]) -> Real:
    words = [str(path)]
    content = re.sub(r"\s+", " ", path.read_text(encoding="utf-8", errors="replace"))
    if path.suffix == ".toml" and "[[datasets]]" in content and "network_module" not in content:
        tool = MUSUBI if re.search(r"(image|video)_(directory|jsonl_file)", content) else SD_SCRIPTS
        words = [*_ALONE[tool].split(), "--dataset_config", str(path.absolute())]

    def read() -> Imported:
        return import_kohya(words)

    real = Real(path.name, read, content=content)
    try:
        name, args, folder, flags = _arguments(words, parsers)
    except (UserError, SystemExit, KeyError, ValueError, argparse.ArgumentError):
        return real  # the import refuses it
    opened = {key for key, value in flags.items() if is_open(value)}
    opened |= {"optimizer_args.weight_decay"} if "optimizer_type" in opened else set()
    opened |= {"max_train_steps"} if "max_train_epochs" in opened else set()
    values = _values(name, args, folder)
    real.values = {ours: value for ours, value in values.items() if value[0] not in opened}
    real.spelled_out = lambda: _spelled_out(words, name, args, parsers[name])
    return real


def _arguments(
    words: list[str], parsers: Mapping[str, argparse.ArgumentParser]
) -> tuple[str, argparse.Namespace, Path, dict[str, Any]]:
    """The script, the flags as its parser reads them and as they are written."""
    path = Path(words[0])
    is_file = len(words) == 1 and path.suffix == ".toml"
    command = config.of_file(path) if is_file else read_command(words)[1]
    unchecked = is_file or "config_file" in command.flags
    config.use_file(command)
    name = config.script_of(command)
    argv: list[str] = []
    known = vars(parsers[name].parse_known_args([])[0])
    for key, value in command.flags.items():
        if value is False or is_open(value) or not any(one.startswith(key) for one in known):
            continue
        argv.append(f"--{key}")
        if value is not True:
            argv += [str(one) for one in (value if isinstance(value, list) else [value])]
    parser = parsers[name]
    parser.exit_on_error = False
    try:
        args = parser.parse_known_args(argv)[0]
    except argparse.ArgumentError:
        if not unchecked:
            raise
        args = parser.parse_known_args([])[0]  # values of files are not checked
        vars(args).update({k: v for k, v in command.flags.items() if k in known})
    return name, args, command.folder, command.flags


def _spelled_out(
    words: list[str], name: str, args: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[Imported, list[str]]:
    """The command with the tool's defaults written into it, and their keys."""
    is_file = len(words) == 1 and words[0].endswith(".toml")
    path = Path(words[0])
    command = config.of_file(path) if is_file else read_command(words)[1]
    config.use_file(command)
    flags, added = dict(command.flags), []
    for key in ("dataset_config", "sample_prompts"):  # a command has no folder of its own
        named = flags.get(key)
        place = find_beside(command.folder, str(named), by_name=True) if named else None
        flags |= {key: str(place)} if place is not None else {}
    for key, value in vars(args).items():
        if key in flags or key in _NEVER or value in (None, False, ""):
            continue
        if parser.get_default(key) == value:
            flags[key] = value
            added.append(key)
    argv = ["accelerate", "launch"]
    if precision := command.launch.get("mixed_precision"):
        argv += ["--mixed_precision", str(precision)]
    argv.append(f"{name}.py")
    for key, value in flags.items():
        argv += [f"--{key}"] if value is True else []
        if value is not True and value is not False:
            argv += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return import_kohya(argv), added


# -- what the tool takes -----------------------------------------------------------------------


def _values(name: str, args: argparse.Namespace, folder: Path) -> dict[str, tuple[str, Any]]:
    """Our key → its key and the value that the tool has for it."""
    optimizer = str(args.optimizer_type or "").rpartition(".")[2].lower()
    if getattr(args, "use_8bit_adam", False):
        optimizer = "adamw8bit"
    optimizer = optimizer or ("lion" if getattr(args, "use_lion_optimizer", False) else "adamw")
    arguments = dict(word.partition("=")[::2] for word in args.optimizer_args or [])
    rate = getattr(args, "unet_lr", None) or args.learning_rate
    full = not hasattr(args, "network_dim")
    values: dict[str, tuple[str, Any]] = {
        "learning_rate": ("learning_rate", rate),
        "optimizer": ("optimizer_type", _OPTIMIZERS.get(optimizer, optimizer)),
        "weight_decay": (
            "optimizer_args.weight_decay",
            arguments.get("weight_decay", 1e-2 if optimizer in _DECAYED else 0.0),
        ),
        "lr_scheduler": ("lr_scheduler", args.lr_scheduler),
        "lr_warmup_steps": ("lr_warmup_steps", _warm_up(args)),
        "max_grad_norm": ("max_grad_norm", args.max_grad_norm),
        "gradient_checkpointing": ("gradient_checkpointing", args.gradient_checkpointing),
        "gradient_accumulation_steps": (
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps,
        ),
        "model_type": ("model_type", "full" if full else "lora"),
        "checkpointing_steps": ("save_every_n_steps", args.save_every_n_steps or 500),
    }
    if args.max_train_epochs:
        values["num_train_epochs"] = ("max_train_epochs", args.max_train_epochs)
    else:
        values["max_train_steps"] = ("max_train_steps", args.max_train_steps)
    if args.mixed_precision is not None:
        values["mixed_precision"] = ("mixed_precision", args.mixed_precision)
    if args.seed is not None:
        values["seed"] = ("seed", args.seed)
    if not full:
        rank = args.network_dim or 4
        values |= {
            "lora_rank": ("network_dim", rank),
            "lora_alpha": ("network_alpha", args.network_alpha or rank),
            "lora_dropout": ("network_dropout", args.network_dropout or 0.0),
        }
    if getattr(args, "min_snr_gamma", None) and name.startswith(("train", "sdxl", "fine")):
        values["snr_gamma"] = ("min_snr_gamma", args.min_snr_gamma)
    if hasattr(args, "loss_type"):
        values["loss_type"] = ("loss_type", args.loss_type.replace("l2", "mse"))
    if "flux_train" in name:
        values["train_guidance"] = ("guidance_scale", args.guidance_scale)
        if args.model_type == "chroma":
            del values["train_guidance"]
    return values | _of_noise(name, args) | _of_datasets(args, folder)


def _warm_up(args: argparse.Namespace) -> Any:
    steps = args.lr_warmup_steps
    return int(steps * args.max_train_steps) if isinstance(steps, float) else steps


def _of_noise(name: str, args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """How sigma is drawn, of the ways that have one name each."""
    if name.startswith("sd3"):
        return {"loss_weighting": ("weighting_scheme", _of_sd3(args.weighting_scheme))}
    how = getattr(args, "timestep_sampling", None)
    if how not in ("uniform", "sigmoid", "shift"):
        return {}
    ours = {"sigmoid": "logit_normal"}.get(how, how)
    values = {"timestep_sampling": ("timestep_sampling", ours)}
    if how == "shift":
        values["flow_shift"] = ("discrete_flow_shift", args.discrete_flow_shift)
    if how != "uniform":
        values["logit_std"] = ("sigmoid_scale", args.sigmoid_scale)
    return values


def _of_sd3(scheme: str) -> str:
    return "none" if scheme == "sigma_sqrt" else "sigma_squared"


def _of_datasets(args: argparse.Namespace, folder: Path) -> dict[str, tuple[str, Any]]:
    """What the folders ask for, each level over those above it."""
    place = find_beside(folder, str(args.dataset_config), by_name=True)
    flags = {k: v for k, v in vars(args).items() if v is not None}
    flags |= {"batch_size": flags.get("train_batch_size", 1)}
    if args.dataset_config is None or place is None:
        if not getattr(args, "train_data_dir", None) or not flags.get("resolution"):
            return {}
        return _of_folders([flags])
    try:
        content = tomllib.loads(place.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError):
        return {}
    merged = [
        {**flags, **content.get("general", {}), **dataset, **subset}
        for dataset in content.get("datasets", [])
        for subset in dataset.get("subsets") or ([] if hasattr(args, "train_data_dir") else [{}])
    ]
    return _of_folders(merged) if merged else {}


def _of_folders(merged: list[dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    first = merged[0]
    values: dict[str, tuple[str, Any]] = {
        "train_batch_size": ("batch_size", first["batch_size"]),
        "random_flip": ("flip_aug", bool(first.get("flip_aug"))),
        "shuffle_captions": ("shuffle_caption", bool(first.get("shuffle_caption"))),
        "caption_dropout_probability": (
            "caption_dropout_rate",
            max(one.get("caption_dropout_rate") or 0.0 for one in merged),
        ),
    }
    if all(one.get("resolution") for one in merged):
        sides = {_side(one["resolution"]) for one in merged}
        values["resolution"] = ("resolution", sorted(sides))
    if frames := max((max(one.get("target_frames", [1])) for one in merged), default=1) - 1:
        values["num_frames"] = ("target_frames", frames // 4 * 4 + 1)
    paths = [one.get("image_dir") or one.get("image_directory") for one in merged]
    if None not in paths and len(set(paths)) == len(paths):
        values["repeats"] = ("num_repeats", [int(one.get("num_repeats", 1)) for one in merged])
    return values


def _side(value: Any) -> int:
    sides = value if isinstance(value, list) else [int(s) for s in str(value).split(",")]
    width, height = (list(sides) * 2)[:2]
    return round((float(width) * float(height)) ** 0.5)
