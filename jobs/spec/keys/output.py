"""Checkpoints and exports."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import OUTPUT
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import OptionalBool, OptionalText, SaveFailure, choice


class OutputKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    checkpointing_steps: int = field(
        500,
        OUTPUT,
        "Steps between checkpoints; 0: only at the end and when the job is stopped, "
        "which always save.",
        resume="same",
        label="save every",
        ge=0,
    )
    checkpoints_total_limit: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, OUTPUT, "Number of newest checkpoints to keep.", resume="same", blank="all", ge=1
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
