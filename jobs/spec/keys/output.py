"""Keys for checkpoints and exports."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator

from jobs.run.judging import Criterion
from jobs.spec.keys.groups import EXPORT, HUB, OUTPUT
from jobs.spec.rules.no_effect import all_checkpoints_stay, not_pushed, nothing_judged
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_bool, as_choice, as_list, as_none, unquoted
from jobs.spec.values.value_types import (
    Bool,
    Interval,
    OptionalBool,
    OptionalText,
    SaveFailure,
    choice,
    refuse,
)


def read_count(value: Any) -> Any:
    """Read yes, no, or how many; 1 and 0 are yes and no."""
    if isinstance(value, str):
        word = unquoted(value)
        value = int(word) if word.isdecimal() else as_bool(word)
    if isinstance(value, int) and value >= 0:
        return bool(value) if value in (0, 1) else value
    raise refuse(value, ("true", "false"), "true, false or a number of checkpoints")


class OutputKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    checkpointing_steps: Interval = field(
        500,
        OUTPUT,
        "Steps between checkpoints, or epochs; 0: only at the end and when the job is stopped, "
        "which always save.",
        resume="same",
        label="save every",
        words=("1 epoch",),
        public=True,
    )
    checkpoints_total_limit: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, OUTPUT, "Number of newest checkpoints to keep.", resume="same", blank="all", ge=1
    )
    checkpoints_keep_best: Annotated[bool | int, BeforeValidator(read_count)] = field(
        False,
        OUTPUT,
        "Never delete the best checkpoint (checkpoints_best_by), whatever "
        "checkpoints_total_limit is; a number: that many of the best.",
        resume="same",
        no_effect=(all_checkpoints_stay, nothing_judged),
        memory=False,
        label="keep best",
    )
    checkpoints_best_by: Annotated[Criterion, choice(Criterion)] = field(
        "validation_loss",
        OUTPUT,
        "What the best checkpoint is chosen by, and the best job of a sweep: the lowest "
        "validation_loss, or the highest of one of the validation_scores.",
        resume="same",
        memory=False,
        label="best by",
    )
    checkpointing_async: OptionalBool = field(
        None,
        OUTPUT,
        "Copy checkpoints to host memory and write them while training continues (default: if "
        "there is room for the copy).",
        resume="same",
    )
    on_save_failure: Annotated[SaveFailure, choice(SaveFailure)] = field(
        "stop",
        OUTPUT,
        "If a checkpoint cannot be written, for example on a full disk: stop the job, or warn and "
        "continue. Older checkpoints are kept either way.",
        resume="same",
        memory=False,
    )
    resume_from_checkpoint: OptionalText = field(
        None,
        OUTPUT,
        "Start from another job's checkpoint: ID, ID:STEP, or the path of a checkpoint or run "
        "directory. The job's own checkpoints take precedence.",
        resume="same",
        blank="job, job:step or folder",
        path=True,
    )


# -- export ---------------------------------------------------------------------------------
# Exports at the end of a job, or from a checkpoint.


ExportFormat = Literal["diffusers", "kohya", "comfyui"]
ExportDtype = Literal["auto", "fp32", "bf16", "fp16"]

_SPELLINGS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def read_formats(value: Any) -> Any:
    """Read one format or several; none means the default."""
    value = as_list(as_none(value))
    if isinstance(value, list | tuple):
        return [
            as_choice(word, get_args(ExportFormat)) for word in dict.fromkeys(map(str, value))
        ] or None
    return value


def read_dtype(value: Any) -> Any:
    """Read a precision; torch's names are accepted, too."""
    value = as_choice(value, get_args(ExportDtype))
    return _SPELLINGS.get(value.strip().lower(), value) if isinstance(value, str) else value


class ExportKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    export_formats: Annotated[list[ExportFormat] | None, BeforeValidator(read_formats)] = field(
        None,
        EXPORT,
        "Key names of an exported LoRA: diffusers, kohya (for its scripts, mostly ComfyUI too), "
        "comfyui, or several (default: all that the family has).",
        resume="same",
        blank="all that the family has",
    )
    export_dtype: Annotated[ExportDtype, BeforeValidator(read_dtype)] = field(
        "auto",
        EXPORT,
        "Precision of exports; auto: the base model's for a full model, fp32 for a LoRA.",
        resume="same",
    )


# -- hub ------------------------------------------------------------------------------------
# Pushing to the Hugging Face hub.


class HubKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    push_to_hub: Bool = field(
        False,
        HUB,
        "Push the export to the Hugging Face hub at the end, with a model card; log in with "
        "`hf auth login` first.",
        resume="same",
        memory=False,
        public=False,
    )
    push_checkpoints_to_hub: Bool = field(
        False,
        HUB,
        "Also export and push each checkpoint, one commit each.",
        resume="same",
        no_effect=not_pushed,
        memory=False,
        public=False,
    )
    hub_model_id: OptionalText = field(
        None,
        HUB,
        "Repository to push to, ORG/NAME or NAME (default: your account and the job's name).",
        resume="same",
        no_effect=not_pushed,
        memory=False,
    )
    hub_private_repo: Bool = field(
        False,
        HUB,
        "Create the repository as a private one.",
        resume="same",
        no_effect=not_pushed,
        memory=False,
        public=False,
    )
