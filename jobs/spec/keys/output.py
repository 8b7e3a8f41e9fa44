"""Checkpoints and exports."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import OptionalBool, OptionalText, SaveFailure, choice, field


class OutputKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    checkpointing_steps: int = field(
        500,
        "output",
        "Steps between checkpoints; 0: only at the end and when the job is stopped, "
        "which always save.",
        ge=0,
    )
    checkpoints_total_limit: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "output", "Number of newest checkpoints to keep.", ge=1
    )
    checkpointing_async: OptionalBool = field(
        None,
        "output",
        "Copy checkpoints to host memory and write them while training continues (default: if "
        "there is room for the copy).",
    )
    on_save_failure: Annotated[SaveFailure, choice(SaveFailure)] = field(
        "stop",
        "output",
        "If a checkpoint cannot be written, for example on a full disk: stop the job, or warn and "
        "continue. Older checkpoints are kept either way.",
    )
    resume_from_checkpoint: OptionalText = field(
        None,
        "output",
        "Start from another job's checkpoint: ID, ID:STEP, or the path of a checkpoint or run "
        "directory. The job's own checkpoints take precedence.",
    )
