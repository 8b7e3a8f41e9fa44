"""What is pushed to the Hugging Face hub."""

from __future__ import annotations

from pydantic import BaseModel

from jobs.spec.values.value_types import Bool, OptionalText, field


class HubKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    push_to_hub: Bool = field(
        False,
        "hub",
        "Push the export to the Hugging Face hub at the end, with a model card; log in with "
        "`hf auth login` first.",
    )
    push_checkpoints_to_hub: Bool = field(
        False, "hub", "Also export and push each checkpoint, one commit each."
    )
    hub_model_id: OptionalText = field(
        None,
        "hub",
        "Repository to push to, ORG/NAME or NAME (default: your account and the job's name).",
    )
    hub_private_repo: Bool = field(False, "hub", "Create the repository as a private one.")
