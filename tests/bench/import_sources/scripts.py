"""The example scripts of diffusers: the commands of their READMEs, and each with no flags."""

from __future__ import annotations

import ast
import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from jobs.imports.imported import import_script
from tests.bench.import_sources.real import Real, keywords, literal, parse_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FENCE: Final = re.compile(r"^ *```\w*\n(.*?)^ *```", re.S | re.M)
_SCRIPT: Final = {
    "adam_weight_decay": "weight_decay",
    "rank": "lora_rank",
    "guidance_scale": "train_guidance",
}


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """The commands of its examples' READMEs, and each script with its parser's defaults alone."""
    scripts = {path.name: path for path in (checkout / "examples").rglob("train_*.py")}
    for name in sorted(scripts) if own else []:
        yield _command(f"{name} alone", f"accelerate launch {name} --seed=1", scripts[name])
    readmes = sorted((checkout / "examples").rglob("README*.md")) if own else []
    for path in [*readmes, *paths]:
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
    real = Real(name, lambda: import_script([text]), content=text)
    parser, source = _arguments(script), script.read_text(encoding="utf-8")
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
        if f"args.{theirs}" not in source:
            continue  # the script has the flag, and never reads it
        if theirs == "guidance_scale" and "klein" in script.name:
            continue  # its model does not take it
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
    defaults: dict[str, Any] = {}
    for call in ast.walk(parse_source(script)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
            names = [str(literal(arg)).lstrip("-") for arg in call.args]
            words = keywords(call)
            for name in names:
                defaults[name] = words.get("default")
    return defaults
