"""Checkpoints and exports."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import OptionalBool, OptionalText, SaveFailure, choice, field


class OutputKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    checkpointing_steps: int = field(
        500, "output", "Save every so many steps; the end and a stop always save. 0: only then.",
        ge=0,
    )  # fmt: skip
    checkpoints_total_limit: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "output", "Keep only the newest so many checkpoints.", ge=1
    )
    checkpointing_async: OptionalBool = field(
        None, "output",
        "Copy what is saved to host memory and write it while training goes on; by itself where "
        "there is room for the copy.",
    )  # fmt: skip
    on_save_failure: Annotated[SaveFailure, choice(SaveFailure)] = field(
        "stop", "output",
        "When a checkpoint cannot be written, as on a full disk: stop the job, or warn and go on. "
        "Older checkpoints stay either way.",
    )  # fmt: skip
    resume_from_checkpoint: OptionalText = field(
        None, "output",
        "Begin after a checkpoint of another job: ID, ID:STEP, or the path of a checkpoint or of "
        "a run directory. The job's own checkpoints, once there are any, come first.",
    )  # fmt: skip
