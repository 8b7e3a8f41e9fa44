"""Which tool a configuration belongs to, by keys that no other tool has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.common.command_line import Command

SIMPLETUNER: Final = "SimpleTuner"
AI_TOOLKIT: Final = "ai-toolkit"
ONETRAINER: Final = "OneTrainer"
DIFFUSION_PIPE: Final = "diffusion-pipe"
SD_SCRIPTS: Final = "kohya's sd-scripts"
MUSUBI: Final = "musubi-tuner"
LTX_TRAINER: Final = "ltx-trainer"
# What `fsdp-tui import` calls those that it reads.
_IMPORTED: Final = {
    SIMPLETUNER: "simpletuner",
    AI_TOOLKIT: "ai-toolkit",
    ONETRAINER: "onetrainer",
    DIFFUSION_PIPE: "diffusion-pipe",
    SD_SCRIPTS: "kohya",
    MUSUBI: "musubi-tuner",
    LTX_TRAINER: "ltx-trainer",
}
# In this order: musubi-tuner's files have keys of sd-scripts, too.
_KEYS: Final = (
    (LTX_TRAINER, {"training_strategy", "preprocessed_data_root"}),
    (MUSUBI, {"dit", "vae_cache_cpu", "video_directory", "image_directory"}),
    (SIMPLETUNER, {"data_backend_config", "model_family"}),
    (ONETRAINER, {"training_method", "concept_file_name", "concepts", "base_model_name"}),
    (DIFFUSION_PIPE, {"micro_batch_size_per_gpu", "pipeline_stages", "video_clip_mode"}),
    (
        SD_SCRIPTS,
        {
            *("network_module", "network_dim", "network_args", "network_train_unet_only"),
            *("caption_extension", "dataset_config", "save_model_as", "reg_data_dir"),
        },
    ),
)
# Tables of TOML files that hold nothing but other tables.
_TABLES: Final = (
    (DIFFUSION_PIPE, {"model", "adapter"}),
    (DIFFUSION_PIPE, {"directory"}),
    (SD_SCRIPTS, {"general", "datasets"}),
)
# Scripts, by their paths or by flags that no script of another tool has.
_SCRIPTS: Final = (
    (
        MUSUBI,
        re.compile(
            r"musubi|(^|/)(hv(_1_5)?|wan|fpack|flux_kontext|flux_2|qwen_image|zimage|kandinsky5|ltx2"
            r"|hidream_o1|ideogram4|krea2)_train(_network)?\.py$"
        ),
        {"dit"},
    ),
    (
        SD_SCRIPTS,
        re.compile(
            r"sd-scripts|(^|/)((\w+_)?train_network|(flux|sdxl|sd3|anima|lumina)_train|train_db|fine_tune"
            r"|(\w+_)?train_(control_net|controlnet_\w*lllite|leco|textual_inversion))\.py$"
        ),
        {"network_module", "network_dim", "network_args", "dataset_config"},
    ),
    (ONETRAINER, re.compile("OneTrainer"), {"config_path"}),
    (DIFFUSION_PIPE, re.compile("diffusion-pipe"), {"deepspeed"}),
    ("DiffSynth-Studio", re.compile("DiffSynth"), {"lora_base_model", "lora_target_modules"}),
    (SIMPLETUNER, re.compile("SimpleTuner|simpletuner"), {"data_backend_config"}),
    (AI_TOOLKIT, re.compile("ai-toolkit|ai_toolkit"), set[str]()),
)


def tool_of(values: Any) -> str:
    """Name the tool of a parsed configuration; "" if nothing says which.

    Args:
        values: What JSON, YAML or TOML said.
    """
    if not isinstance(values, dict):
        return ""
    config = values.get("config")
    if isinstance(config, dict) and "process" in config:
        return AI_TOOLKIT
    keys = {normal_key(str(key)) for key in values}
    # sd-scripts and musubi-tuner take settings in sections of any name.
    inner = [table for v in values.values() for table in (v if isinstance(v, list) else [v])]
    keys |= {normal_key(str(key)) for table in inner if isinstance(table, dict) for key in table}
    for tool, names in _KEYS:
        if names & keys:
            return tool
    return next((tool for tool, names in _TABLES if names <= keys), "")


def tool_of_command(command: Command) -> str:
    """Name the tool of a command; "" for diffusers' examples, and where nothing says which."""
    script, flags = command.script or "", command.flags
    matches = (t for t, path, own in _SCRIPTS if path.search(script) or not own.isdisjoint(flags))
    return next(matches, "")


def refuse_others(values: Any, path: Path, mine: str) -> None:
    """Raise `UserError` if a configuration is of another tool than the one that is imported."""
    theirs = tool_of(values)
    if theirs and theirs != mine:
        raise UserError(f"{path} is a configuration of {theirs}, not of {mine}", hint(theirs))


def hint(tool: str) -> str:
    """Say what can be done with a configuration of a tool."""
    if tool in _IMPORTED:
        return f"`fsdp-tui import {_IMPORTED[tool]} …` reads it"
    return "it cannot be imported yet; `fsdp-tui keys` lists what a job can say"
