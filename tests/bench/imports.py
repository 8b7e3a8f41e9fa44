"""`python tests/bench/imports.py TOOL CHECKOUT [FILE …]`: imports against the tool's own values.

TOOL is ai-toolkit, simpletuner or diffusers-script, CHECKOUT its source. What a configuration
leaves out is looked up in that source, so that a new version of the tool shows what has changed.
Each key that decides what is trained is then one of:

    same     the job has the tool's value
    said     it has another one, and the report of the import names the key
    SILENT   it has another one, and nothing says so

Without files, all examples of the checkout are read. Exits with 1 if anything is silent.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from jobs.errors import UserError
from jobs.imports.common.import_report import Kind
from jobs.imports.common.training_keys import OPTIMIZERS, PRECISIONS, SCHEDULES
from jobs.imports.imported import import_ai_toolkit, import_script, import_simpletuner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.imports.imported import Imported

_ADAM: Final = ("adamw", "adamw_8bit")


@dataclass
class Real:
    """A configuration as its tool reads it.

    Attributes:
        name: Of the file or command.
        read: Imports it.
        values: Our key → the tool's key and its value.
    """

    name: str
    read: Callable[[], Imported]
    values: dict[str, tuple[str, Any]] = field(default_factory=dict)


def main() -> int:
    """Compare, and print a line for each difference and the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool", choices=_TOOLS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", type=Path)
    asked = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    read = refused = 0
    for real in _TOOLS[asked.tool](asked.checkout, asked.files):
        try:
            imported = real.read()
        except UserError as error:
            refused += 1
            print(f"{real.name}: refused: {error}")
            continue
        if lost := _refused(imported):
            refused += 1
            print(f"{real.name}: not trained here: {lost}")
            continue
        read += 1
        for ours, (theirs, value) in real.values.items():
            verdict, mine = judge(imported, ours, theirs, value)
            counts[ours, verdict] += 1
            if verdict == "SILENT":
                print(f"{real.name}: {theirs} is {value!r}, and {ours} {mine!r}")
    verdicts = ("same", "said", "SILENT")
    print(f"\n| key | {' | '.join(verdicts)} |\n|---|{'---:|' * len(verdicts)}")
    for ours in dict.fromkeys(key for key, _ in counts):
        print(f"| `{ours}` | {' | '.join(str(counts[ours, one]) for one in verdicts)} |")
    silent = sum(count for (_, verdict), count in counts.items() if verdict == "SILENT")
    print(f"\n{read} compared, {refused} refused or not trained here; {silent} silent")
    return int(silent > 0)


def _refused(imported: Imported) -> str:
    """What the report says of another training than a job can be; empty if it is one."""
    what = ("script", "model_family", "model.arch", "type")
    lost = imported.report.of(Kind.UNSUPPORTED)
    return next((f"{one.key}: {one.value}" for one in lost if one.key in what), "")


def judge(imported: Imported, ours: str, theirs: str, value: Any) -> tuple[str, Any]:
    """same, said or SILENT; and what the job has."""
    spec, report = imported.spec, imported.report
    mine = getattr(spec, ours)
    if ours == "lora_alpha":
        mine = mine or spec.lora_rank
    if ours in ("lora_rank", "lora_alpha", "lora_dropout") and spec.model_type != "lora":
        return "same", mine
    if ours.startswith("adam_") and spec.optimizer not in _ADAM:
        return "same", mine  # another optimizer has them otherwise
    if ours.startswith("validation_") and not spec.validation_prompts:
        return "same", mine
    if ours == "lr_warmup_steps" and spec.lr_scheduler == "constant":
        return "same", mine
    if ours == "ema_decay" and not spec.use_ema:
        return "same", mine
    if ours == "seed" and value is None:
        return "same", mine  # the tool draws one
    if _plain(mine) == _plain(value):
        return "same", mine
    said = [*report.entries, *report.assumed]
    named = any(
        (one.key == theirs or ours in one.ours) and one.kind is not Kind.TAKEN for one in said
    )
    texts = [*report.warnings, *report.to_fill_in]
    named = named or any(text.startswith((f"{ours}:", f"{theirs}:")) for text in texts)
    return ("said" if named else "SILENT"), mine


def _plain(value: Any) -> Any:
    """Numbers as numbers, switches as such, lists of one as what is in them."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, bool):
        return value or None
    with contextlib.suppress(TypeError, ValueError):
        return round(float(value), 12) or None
    sides = str(value).lower().split("x")
    return _plain(sides[0]) if len(sides) == 2 and sides[0] == sides[1] else "x".join(sides)


def _word(words: dict[str, tuple[Any, str]], value: Any) -> Any:
    word = str(value).strip().lower().replace("-", "_")
    return words.get(word, (word, ""))[0]


def _decay(optimizer: str, given: Any, adam: float) -> Any:
    """The weight decay of an optimizer, where the tool leaves it to the library."""
    if given is not None:
        return given
    return adam if optimizer.lower().startswith("adamw") else 0.0


# -- ai-toolkit ------------------------------------------------------------------------------


def of_ai_toolkit(checkout: Path, files: list[Path]) -> Iterator[Real]:
    """Its examples; defaults are the `kwargs.get(key, default)` of its classes."""
    defaults = _gets(checkout / "toolkit" / "config_modules.py")
    for path in files or sorted((checkout / "config" / "examples").rglob("*.y*ml")):
        try:
            process = yaml.safe_load(path.read_text(encoding="utf-8"))["config"]["process"][0]
        except (KeyError, TypeError, IndexError, yaml.YAMLError):
            process = {}  # the import refuses it
        real = Real(path.name, lambda path=path: import_ai_toolkit(path))  # type: ignore[misc]

        def get(part: str, *keys: str, process: Any = process) -> tuple[str, Any]:
            given = process.get(part) or {}
            for key in keys:
                if given.get(key) is not None:
                    return f"{part}.{key}", given[key]
            return f"{part}.{keys[0]}", defaults[_CLASSES[part]].get(keys[-1])

        train = process.get("train") or {}
        params = train.get("optimizer_params") or {}
        optimizer = str(get("train", "optimizer")[1])
        place = "train.optimizer_params"
        real.values = {
            ours: get(*theirs.split())
            for ours, theirs in {
                "learning_rate": "train unet_lr lr",
                "train_batch_size": "train batch_size",
                "max_train_steps": "train steps",
                "max_grad_norm": "train max_grad_norm",
                "gradient_checkpointing": "train gradient_checkpointing",
                "snr_gamma": "train min_snr_gamma snr_gamma",
                "checkpointing_steps": "save save_every",
                "checkpoints_total_limit": "save max_step_saves_to_keep",
                "validation_steps": "sample sample_every",
                "validation_guidance": "sample guidance_scale",
                "validation_num_inference_steps": "sample sample_steps",
                "validation_seed": "sample seed",
            }.items()
        }
        real.values |= {
            "optimizer": ("train.optimizer", _word(OPTIMIZERS, optimizer)),
            "lr_scheduler": (
                "train.lr_scheduler",
                _word(SCHEDULES, get("train", "lr_scheduler")[1]),
            ),
            "mixed_precision": ("train.dtype", _word(PRECISIONS, get("train", "dtype")[1])),
            "adam_epsilon": (f"{place}.eps", params.get("eps", 1e-6)),
            "weight_decay": (
                f"{place}.weight_decay",
                _decay(optimizer, params.get("weight_decay"), 1e-2),
            ),
            "gradient_accumulation_steps": get(
                "train", "gradient_accumulation", "gradient_accumulation_steps"
            ),
            "timestep_sampling": (
                "train.timestep_type",
                _TIMESTEPS.get(str(get("train", "timestep_type")[1])),
            ),
            "caption_dropout_probability": (
                "datasets.caption_dropout_rate",
                max(
                    (d.get("caption_dropout_rate", 0.0) for d in process.get("datasets") or []),
                    default=0.0,
                ),
            ),
        }
        if isinstance(process.get("network"), dict):
            network = process["network"]
            real.values |= {
                "lora_rank": ("network.linear", network.get("rank") or network.get("linear") or 4),
                "lora_alpha": get("network", "linear_alpha", "alpha"),
                "lora_dropout": get("network", "dropout"),
            }
        ema = train.get("ema_config") or {}
        real.values |= {
            "use_ema": ("train.ema_config.use_ema", ema.get("use_ema", False)),
            "ema_decay": (
                "train.ema_config.ema_decay",
                ema.get("ema_decay", defaults["EMAConfig"]["ema_decay"]),
            ),
        }
        yield real


_CLASSES: Final = {
    "train": "TrainConfig",
    "network": "NetworkConfig",
    "save": "SaveConfig",
    "sample": "SampleConfig",
}
_TIMESTEPS: Final = {
    "sigmoid": "logit_normal",
    "linear": "uniform",
    "weighted": "uniform",
    "shift": "uniform_shift",
    "flux_shift": "uniform_shift",
    "lumina2_shift": "uniform_shift",
}


def _gets(path: Path) -> dict[str, dict[str, Any]]:
    """Class → key → default, of a file's `kwargs.get(key, default)`; others' defaults are None."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            own = found.setdefault(node.name, {})
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "kwargs.get":
                    key, default = (*map(_literal, call.args), None)[:2]
                    own.setdefault(str(key), default)
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


# -- SimpleTuner -----------------------------------------------------------------------------

_SIMPLE: Final = {
    "adam_weight_decay": "weight_decay",
    "checkpoint_step_interval": "checkpointing_steps",
    "validation_step_interval": "validation_steps",
}


def of_simpletuner(checkout: Path, files: list[Path]) -> Iterator[Real]:
    """Its examples; defaults are those of its registry of fields."""
    registry: dict[str, Any] = {}
    for path in (checkout / "simpletuner").rglob("field_registry/sections/*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "ConfigField":
                words = {one.arg: _literal(one.value) for one in call.keywords}
                registry[str(words["name"])] = words.get("default_value")
    for path in files or sorted((checkout / "simpletuner" / "examples").glob("*/config.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            values = {}  # the import refuses it
        config = {str(key).lstrip("-"): value for key, value in values.items()}
        real = Real(path.parent.name, lambda path=path: import_simpletuner(path))  # type: ignore[misc]
        for theirs in (
            *("learning_rate", "train_batch_size", "gradient_accumulation_steps", "lr_scheduler"),
            *("lr_warmup_steps", "max_train_steps", "max_grad_norm", "optimizer", "adam_beta1"),
            *("adam_beta2", "adam_epsilon", "adam_weight_decay", "lora_rank", "lora_alpha"),
            *("lora_dropout", "gradient_checkpointing", "caption_dropout_probability"),
            *("mixed_precision", "use_ema", "ema_decay", "snr_gamma", "validation_step_interval"),
            *("validation_num_inference_steps", "validation_guidance", "validation_resolution"),
            *("validation_seed", "seed", "checkpoint_step_interval", "checkpoints_total_limit"),
        ):
            value = config.get(theirs, registry.get(theirs))
            ours = _SIMPLE.get(theirs, theirs)
            if theirs.endswith("_interval") and theirs not in config:
                value = config.get(ours, value)
            if theirs == "lora_alpha" and value is None:
                value = config.get("lora_rank", registry["lora_rank"])
            if theirs == "optimizer":
                value = _word(OPTIMIZERS, value)
            if theirs == "mixed_precision":
                value = _word(PRECISIONS, value)
            if theirs == "max_train_steps" and not value:
                continue  # epochs; what they are follows from the data
            real.values[ours] = (theirs, value)
        yield real


# -- scripts of diffusers --------------------------------------------------------------------

_FENCE: Final = re.compile(r"^ *```\w*\n(.*?)^ *```", re.S | re.M)
_SCRIPT: Final = {
    "adam_weight_decay": "weight_decay",
    "rank": "lora_rank",
    "guidance_scale": "train_guidance",
}


def of_scripts(checkout: Path, files: list[Path]) -> Iterator[Real]:
    """The commands of its examples' READMEs, and each script with its parser's defaults alone."""
    scripts = {path.name: path for path in (checkout / "examples").rglob("train_*.py")}
    for name in [] if files else sorted(scripts):
        yield _command(f"{name} alone", f"accelerate launch {name} --seed=1", scripts[name])
    for path in files or sorted((checkout / "examples").rglob("README*.md")):
        for number, block in enumerate(_FENCE.findall(path.read_text(encoding="utf-8"))):
            if "accelerate launch" not in block:
                continue
            variables = dict(re.findall(r"^export (\w+)=[\"']?([^\"'\n]*)", block, re.M))
            text = block[block.index("accelerate launch") :].replace("\\\n", " ").split("\n")[0]
            for name, value in variables.items():
                text = text.replace(f"${{{name}}}", value).replace(f"${name}", value)
            script = next((w for w in text.split() if w.endswith(".py")), "").rpartition("/")[2]
            if script in scripts:
                yield _command(f"{path.parent.name}/{path.name}#{number}", text, scripts[script])


def _command(name: str, text: str, script: Path) -> Real:
    real = Real(name, lambda: import_script([text]))
    parser = _arguments(script)
    try:
        words = shlex.split(text)
    except ValueError:
        return real
    flags: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            key, has, value = word[2:].partition("=")
            flags[key] = value if has else (True if after.startswith("--") else after)
    for theirs in (
        *("learning_rate", "train_batch_size", "gradient_accumulation_steps", "lr_scheduler"),
        *("lr_warmup_steps", "max_train_steps", "max_grad_norm", "adam_beta1", "adam_beta2"),
        *("adam_epsilon", "adam_weight_decay", "rank", "lora_alpha", "lora_dropout", "seed"),
        *("gradient_checkpointing", "resolution", "max_sequence_length", "guidance_scale"),
        *("snr_gamma", "checkpointing_steps", "lr_num_cycles", "lr_power", "center_crop"),
    ):
        if theirs not in parser and theirs not in flags:
            continue
        value = flags.get(theirs, parser.get(theirs))
        ours = _SCRIPT.get(theirs, theirs)
        if theirs == "max_train_steps" and value is None:
            continue
        if theirs == "guidance_scale" and re.search("klein|z_image", script.name):
            continue  # their models do not take it
        if theirs == "center_crop":
            ours, value = "crop", "center" if value else "random"
        if theirs in ("lr_power", "lr_num_cycles"):
            curve = flags.get("lr_scheduler", "constant")
            if curve != {"lr_power": "polynomial", "lr_num_cycles": "cosine_with_restarts"}[theirs]:
                continue
        real.values[ours] = (theirs, value)
    return real


def _arguments(script: Path) -> dict[str, Any]:
    """Flag → default, of a script's parser; a switch that is left out is off."""
    found: dict[str, Any] = {}
    for call in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
            names = [str(_literal(arg)).lstrip("-") for arg in call.args]
            words = {one.arg: _literal(one.value) for one in call.keywords}
            for name in names:
                found[name] = words.get("default")
    return found


_TOOLS: Final[dict[str, Any]] = {
    "ai-toolkit": of_ai_toolkit,
    "simpletuner": of_simpletuner,
    "diffusers-script": of_scripts,
}

if __name__ == "__main__":
    sys.exit(main())
