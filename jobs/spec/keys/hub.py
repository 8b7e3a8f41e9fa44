"""What is pushed to the Hugging Face hub."""

from __future__ import annotations

from jobs.spec.keys.groups import HUB
from jobs.spec.rules.no_effect import not_pushed
from jobs.spec.values.field import Keys, field
from jobs.spec.values.value_types import Bool, OptionalText


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
