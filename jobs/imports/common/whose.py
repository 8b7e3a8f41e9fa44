"""Which tool a configuration belongs to, by keys that no other tool has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from pathlib import Path

SIMPLETUNER: Final = "SimpleTuner"
AI_TOOLKIT: Final = "ai-toolkit"
ONETRAINER: Final = "OneTrainer"
DIFFUSION_PIPE: Final = "diffusion-pipe"
_READ: Final = (SIMPLETUNER, AI_TOOLKIT, ONETRAINER, DIFFUSION_PIPE)
# In this order: musubi-tuner's files have keys of sd-scripts, too.
_KEYS: Final = (
    (SIMPLETUNER, {"data_backend_config", "model_family"}),
    ("musubi-tuner", {"dit", "fp8_scaled", "vae_cache_cpu"}),
    (ONETRAINER, {"training_method", "concept_file_name", "concepts", "base_model_name"}),
    (DIFFUSION_PIPE, {"micro_batch_size_per_gpu", "pipeline_stages", "video_clip_mode"}),
    (
        "kohya's sd-scripts",
        {
            "network_module",
            "network_dim",
            "network_args",
            "network_train_unet_only",
            "caption_extension",
            "dataset_config",
            "save_model_as",
            "reg_data_dir",
        },
    ),
)
# Tables of TOML files that hold nothing but other tables.
_TABLES: Final = (
    (DIFFUSION_PIPE, {"model", "adapter"}),
    (DIFFUSION_PIPE, {"directory"}),
    ("kohya's sd-scripts", {"general", "datasets"}),
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
    keys |= {normal_key(str(k)) for v in values.values() if isinstance(v, dict) for k in v}
    for tool, names in _KEYS:
        if names & keys:
            return tool
    return next((tool for tool, names in _TABLES if names <= keys), "")


def refuse_others(values: Any, path: Path, mine: str) -> None:
    """Raise `UserError` if a configuration is of another tool than the one that is imported."""
    theirs = tool_of(values)
    if theirs and theirs != mine:
        raise UserError(f"{path} is a configuration of {theirs}, not of {mine}", hint(theirs))


def hint(tool: str) -> str:
    """Say what can be done with a configuration of a tool."""
    if tool in _READ:
        return "`fsdp-tui import FILE` knows whose it is"
    return "it cannot be imported yet; `fsdp-tui keys` lists what a job can say"
